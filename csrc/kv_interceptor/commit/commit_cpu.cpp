#include <algorithm>
#include <atomic>
#include <vector>

#include "base/parallel.h"
#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/digest.h"
#include "kv_interceptor/commit/path.h"
#include "kv_interceptor/stage/row_copy.h"

namespace nwor {
namespace {

class PlainWriter final : public CacheWriter {
 public:
  void WriteRow(const CacheLayout& cache, int64_t slot, const KvRowsView& row,
                DType row_dtype) override {
    StoreRow(cache, slot, row, 0, row_dtype);
  }
  bool may_fail() const override { return false; }
};

// One accepted row with its destinations, resolved once for all layers.
struct Move {
  int32_t staging_row;
  std::array<int64_t, kMaxCommitGroups> slots;
};

std::vector<Move> ResolveMoves(const CommitParams& params) {
  std::vector<Move> moves;
  for (int32_t request = 0; request < params.num_requests; ++request) {
    for (int32_t index = 0; index < params.counts[request]; ++index) {
      Move move{StagingRow(params, request, index), {}};
      for (int group = 0; group < params.num_groups; ++group) {
        move.slots[group] = DestinationSlot(params, group, request, index, move.staging_row);
      }
      moves.push_back(move);
    }
  }
  return moves;
}

// One layer's share of a commit: where its rows go and where their old bytes are kept.
class LayerCommit {
 public:
  LayerCommit(const CommitParams& params, int layer, std::byte* log)
      : layer_(params.layers[layer]), group_(params.groups[layer_.group]), log_(log) {
    cache_ = {layer_.key, layer_.value, group_.geometry, layer_.scales};
    const int64_t bytes = ElementBytes(group_.dtype);
    staged_ = group_.staged;
    staged_.key = static_cast<std::byte*>(staged_.key) +
                  layer_.staged_layer * group_.staged_key_layer * bytes;
    staged_.value = static_cast<std::byte*>(staged_.value) +
                    layer_.staged_layer * group_.staged_value_layer * bytes;
  }

  static int64_t SideBytes(const CommitGroup& group) {
    return int64_t{group.geometry.num_heads} * group.geometry.head_dim *
           ElementBytes(group.geometry.dtype);
  }

  // Writes each destination, its old bytes kept first if there is a log. May throw between any two
  // rows.
  void Write(const std::vector<Move>& moves, CacheWriter& writer) {
    const int64_t row_bytes = ElementBytes(group_.dtype);
    for (const Move& move : moves) {
      const int64_t slot = move.slots[layer_.group];
      if (log_ != nullptr) {
        Exchange(slot, /*restore=*/false);
        ++num_logged_;
      }
      KvRowsView row = staged_;
      row.key =
          static_cast<std::byte*>(staged_.key) + move.staging_row * staged_.key_row * row_bytes;
      row.value =
          static_cast<std::byte*>(staged_.value) + move.staging_row * staged_.value_row * row_bytes;
      writer.WriteRow(cache_, slot, row, group_.dtype);
    }
  }

  // Puts every logged destination back, latest first.
  void Undo(const std::vector<Move>& moves) {
    while (num_logged_ > 0) {
      --num_logged_;
      Exchange(moves[num_logged_].slots[layer_.group], /*restore=*/true);
    }
  }

 private:
  void Exchange(int64_t slot, bool restore) {
    const CacheGeometry& geometry = group_.geometry;
    const int64_t head_bytes = int64_t{geometry.head_dim} * ElementBytes(geometry.dtype);
    const int64_t side_bytes = SideBytes(group_);
    std::byte* kept = log_ + num_logged_ * 2 * side_bytes;
    const HeadRuns key = CacheRun(cache_.key, geometry.key, geometry, slot);
    const HeadRuns value = CacheRun(cache_.value, geometry.value, geometry, slot);
    const HeadRuns kept_key{kept, head_bytes}, kept_value{kept + side_bytes, head_bytes};
    CopyHeads(restore ? key : kept_key, restore ? kept_key : key, geometry.num_heads, head_bytes);
    CopyHeads(restore ? value : kept_value, restore ? kept_value : value, geometry.num_heads,
              head_bytes);
  }

  const CommitLayer& layer_;
  const CommitGroup& group_;
  CacheLayout cache_;
  KvRowsView staged_;
  std::byte* log_;
  size_t num_logged_ = 0;
};

void Publish(const CommitParams& params, const CommitVerdict& verdict, int64_t num_tokens) {
  if (params.status != nullptr) {
    std::fill_n(params.status, static_cast<int>(kNumStatusWords), int64_t{0});
    params.status[kStatusCode] = static_cast<int64_t>(verdict.error);
    params.status[kStatusRequest] = verdict.request;
    params.status[kStatusIndex] = verdict.index;
    params.status[kStatusValue] = verdict.value;
    params.status[kStatusCommitted] = num_tokens;
  }
  if (params.counters != nullptr) {
    AddCommit(params.counters,
              {verdict.error, num_tokens, params.bytes_per_token, params.closing_tokens});
  }
  if (params.tips != nullptr && verdict.error == CommitError::kOk) {
    for (int32_t request = 0; request < params.num_requests; ++request) {
      const int32_t count = params.counts[request];
      if (count > 0) params.tips[request] = StagingRow(params, request, count - 1);
    }
  }
}

}  // namespace

CacheWriter& PlainCacheWriter() {
  static PlainWriter writer;
  return writer;
}

CommitVerdict CommitCpu(const CommitParams& params, CommitUndoLog& log, CacheWriter& writer) {
  CommitVerdict verdict = ValidateCommit(params);
  if (verdict.error != CommitError::kOk) {
    Publish(params, verdict, 0);
    return verdict;
  }
  const std::vector<Move> moves = ResolveMoves(params);
  const auto num_moves = static_cast<int64_t>(moves.size());

  int64_t num_bytes = 0;  // of old and of new bytes
  std::vector<int64_t> offsets(params.num_layers);
  for (int layer = 0; layer < params.num_layers; ++layer) {
    offsets[layer] = num_bytes;
    num_bytes += num_moves * 2 * LayerCommit::SideBytes(params.groups[params.layers[layer].group]);
  }
  const bool keeps_log = writer.may_fail();
  if (keeps_log && static_cast<int64_t>(log.bytes.size()) < num_bytes) log.bytes.resize(num_bytes);

  std::vector<LayerCommit> layers;
  layers.reserve(params.num_layers);
  for (int layer = 0; layer < params.num_layers; ++layer) {
    layers.emplace_back(params, layer, keeps_log ? log.bytes.data() + offsets[layer] : nullptr);
  }
  // Layers are independent: each thread logs and writes its own. Below so many bytes a second
  // thread costs more than it copies.
  constexpr int64_t kBytesPerThread = 128 * 1024;
  std::atomic<int> next{0};
  try {
    RunOnTorchThreads(1 + num_bytes / kBytesPerThread, [&] {
      for (int layer = next.fetch_add(1); layer < params.num_layers; layer = next.fetch_add(1)) {
        layers[layer].Write(moves, writer);
      }
    });
  } catch (...) {
    for (LayerCommit& layer : layers) layer.Undo(moves);
    verdict = {CommitError::kWriteFailed, 0, 0, 0};
    Publish(params, verdict, 0);
    return verdict;
  }
  if (params.tail.keys != nullptr) FeedTail(params);
  Publish(params, verdict, num_moves);
  return verdict;
}

void CommitDigestCpu(const CommitParams& params, int64_t digest[2]) {
  if (params.round_status != nullptr && params.round_status[kStatusCode] != 0) {
    digest[0] = digest[1] = kDigestRefusal;
    return;
  }
  uint64_t sum = 0;
  for (int32_t request = 0; request < params.num_requests; ++request) {
    const int32_t count = std::clamp(params.counts[request], 0, params.depth);
    sum += DigestCount(request, params.counts[request]);
    for (int32_t index = 0; index < count; ++index) {
      const int64_t at = int64_t{request} * params.depth + index;
      for (int group = 0; group < params.num_groups; ++group) {
        const int32_t row = StagingRow(params, request, index);
        const int64_t slot = params.groups[group].slots != nullptr || row >= 0
                                 ? DestinationSlot(params, group, request, index, row)
                                 : -1;
        sum += DigestEntry(request, index, group, params.path[at], slot);
      }
    }
  }
  digest[0] = static_cast<int64_t>(sum);
  digest[1] = ~digest[0];
}

}  // namespace nwor
