#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <type_traits>
#include <vector>

#include "base/parallel.h"
#include "tree/acceptance_params.h"
#include "tree/fault.h"
#include "tree/probability.h"
#include "tree/tree_params.h"

namespace nwor {
namespace {

// One request's links. Children ascend, so every walk ends.
class Links {
 public:
  Links(const TreeLinks& links, int64_t request, int rows)
      : first_(links.first_child == nullptr ? nullptr : links.first_child + request * rows),
        next_(links.next_sibling == nullptr ? nullptr : links.next_sibling + request * rows),
        end_(links.num_drafts == nullptr ? rows : int64_t{links.num_drafts[request]} + 1),
        rows_(rows) {}

  int FirstChild(int row) const {
    if (first_ != nullptr) return first_[row];
    return row + 1 < end_ ? row + 1 : -1;
  }
  int NextSibling(int row) const { return next_ == nullptr ? -1 : next_[row]; }

  // 0, or the first link that does not lead forward, or the first row that several lead to.
  int64_t FindFault() const {
    if (first_ == nullptr || next_ == nullptr) {
      return end_ < 1 || end_ > rows_ ? PackFault(TreeFault::kRowCount, 0, Saturate(end_ - 1)) : 0;
    }
    // Almost always all is well, and vector instructions see it at once.
    int wrong = 0;
    for (int row = 0; row < rows_; ++row) wrong |= Wrong(first_[row], row) | Wrong(next_[row], row);
    for (int row = 0; wrong != 0 && row < rows_; ++row) {
      if (Wrong(first_[row], row) != 0) return PackFault(TreeFault::kLink, row, first_[row]);
      if (Wrong(next_[row], row) != 0) return PackFault(TreeFault::kLink, row, next_[row]);
    }
    return FindShared();
  }

 private:
  // REQUIRES: links lead forward.
  int64_t FindShared() const {
    std::array<int32_t, kMaxTreeRows> incoming{};
    for (int row = 0; row < rows_; ++row) {
      if (first_[row] >= 0) ++incoming[first_[row]];
      if (next_[row] >= 0) ++incoming[next_[row]];
    }
    for (int row = 0; row < rows_; ++row) {
      if (incoming[row] > 1) return PackFault(TreeFault::kSharedRow, row, incoming[row]);
    }
    return 0;
  }

  int Wrong(int32_t link, int row) const {
    return static_cast<int>(link != -1) &
           (static_cast<int>(link <= row) | static_cast<int>(link >= rows_));
  }

  const int32_t* first_;
  const int32_t* next_;
  int64_t end_;
  int rows_;
};

int32_t Bits(float value) { return std::bit_cast<int32_t>(value); }

// Loops without branches, and through double, so that compilers use vector instructions; a tile
// stays in the first cache between them.
template <typename Stride>
uint64_t SumTile(const float* p, Stride stride, int count, bool* valid) {
  int wrong = 0;
  for (int v = 0; v < count; ++v) {
    const float value = p[v * stride];
    wrong |= static_cast<int>(!(value >= 0.0f)) |
             static_cast<int>(!(value <= 1.0f + kProbabilityTolerance));
  }
  *valid &= wrong == 0;
  if (wrong != 0) return 0;
  int64_t sum = 0;
  for (int v = 0; v < count; ++v) {
    sum += static_cast<int64_t>(static_cast<double>(p[v * stride]) *
                                static_cast<double>(kProbabilityOne));
  }
  return static_cast<uint64_t>(sum);
}

// One request's walk and draw.
class Sampler {
 public:
  Sampler(const SamplingParams& params, int64_t request)
      : params_(params),
        links_(params.links, request, params.rows),
        tokens_(params.tokens + request * params.rows),
        target_(params.target.data + request * params.target.batch),
        draft_(params.draft.data == nullptr ? nullptr
                                            : params.draft.data + request * params.draft.batch),
        coins_(params.coins + request * params.rows),
        final_coin_(params.final_coins[request]),
        path_(params.out.path + request * params.rows) {}

  // Returns the fault, 0 if there is none.
  int64_t Run(int32_t* count, int64_t* next_token) {
    fault_ = links_.FindFault();
    if (fault_ == 0) fault_ = CheckTokensAndCoins();
    int row = 0;
    while (fault_ == 0) {
      const int child = Choose(row);
      if (child < 0) break;
      path_[(*count)++] = child;
      row = child;
    }
    if (fault_ == 0) *next_token = Draw(row);
    return fault_;
  }

 private:
  float Target(int row, int64_t token) const {
    return target_[row * params_.target.row + token * params_.target.token];
  }
  float Draft(int row, int64_t token) const {
    return draft_[row * params_.draft.row + token * params_.draft.token];
  }

  // Only rows that links lead to are rows; the rest may hold anything.
  int64_t CheckTokensAndCoins() const {
    for (int row = 0; row < params_.rows; ++row) {
      for (int i = links_.FirstChild(row); i >= 0; i = links_.NextSibling(i)) {
        if (tokens_[i] < 0 || tokens_[i] >= params_.vocabulary) {
          return PackFault(TreeFault::kToken, i, Saturate(tokens_[i]));
        }
      }
      if (!IsCoin(coins_[row])) return PackFault(TreeFault::kCoin, row, Bits(coins_[row]));
    }
    if (!IsCoin(final_coin_)) return PackFault(TreeFault::kCoin, params_.rows, Bits(final_coin_));
    return 0;
  }

  bool IsRepeated(int row, int child) const {
    for (int i = links_.FirstChild(row); i != child; i = links_.NextSibling(i)) {
      if (tokens_[i] == tokens_[child]) return true;
    }
    return false;
  }

  // The accepted child of `row`, or -1. Leaves in rejected_ what the row's draw must not give.
  int Choose(int row) {
    rejected_.clear();
    uint64_t mass = 0;
    const float coin = coins_[depth_];
    for (int child = links_.FirstChild(row); child >= 0; child = links_.NextSibling(child)) {
      const int64_t token = tokens_[child];
      const float p = Target(row, token);
      if (!IsProbability(p)) return Fail(TreeFault::kProbability, row, p);
      if (IsRepeated(row, child)) continue;
      uint64_t place = FixedCoin(coin, params_.threshold_acc);
      if (params_.rule == AcceptRule::kDraft) {
        const float q = Draft(row, token);
        if (!IsProbability(q)) return Fail(TreeFault::kProbability, row, q);
        place = FixedCoin(coin, std::min(q, 1.0f));
      }
      const uint64_t own = FixedProbability(p);
      if (own == 0) continue;
      mass += own;
      rejected_.push_back(token);
      if (place < mass || (params_.threshold_single < 1.0 && p >= params_.threshold_single)) {
        ++depth_;
        return child;
      }
    }
    return -1;
  }

  // The token after the last accepted row: from what the rejected children leave of its target
  // distribution, or with draft probabilities from the target's excess over them. Where that leaves
  // nothing, which takes a coin of 1 or rounding, from the whole distribution.
  int64_t Draw(int row) {
    bool valid = true;
    tiles_.resize(NumTiles(params_.vocabulary));
    uint64_t total = 0;
    for (size_t tile = 0; tile < tiles_.size(); ++tile) {
      const int begin = static_cast<int>(tile) * kTileTokens;
      const int count = std::min(kTileTokens, params_.vocabulary - begin);
      const float* p = target_ + row * params_.target.row + begin * params_.target.token;
      constexpr std::integral_constant<int64_t, 1> kContiguous;
      tiles_[tile] = params_.target.token == 1 ? SumTile(p, kContiguous, count, &valid)
                                               : SumTile(p, params_.target.token, count, &valid);
      total += tiles_[tile];
    }
    if (!valid) {
      int64_t wrong = 0;
      while (IsProbability(Target(row, wrong))) ++wrong;
      return Fail(TreeFault::kProbability, row, Target(row, wrong));
    }
    if (!SumsToOne(total)) {
      return Fail(TreeFault::kProbabilitySum, row, FloatOf(total));
    }
    if (params_.rule == AcceptRule::kDraft && links_.FirstChild(row) >= 0) {
      return DrawExcess(row);
    }
    uint64_t left = total;
    for (const int64_t token : rejected_) left -= FixedProbability(Target(row, token));
    if (left == 0) {
      rejected_.clear();
      left = total;
    }
    for (const int64_t token : rejected_) {
      tiles_[token / kTileTokens] -= FixedProbability(Target(row, token));
    }
    return Find(PlaceOfCoin(final_coin_, left), [&](int64_t v) {
      const bool gone = std::find(rejected_.begin(), rejected_.end(), v) != rejected_.end();
      return gone ? 0 : FixedProbability(Target(row, v));
    });
  }

  int64_t DrawExcess(int row) {
    std::vector<uint64_t> excess(tiles_.size(), 0);
    uint64_t left = 0;
    uint64_t drafted = 0;
    for (int v = 0; v < params_.vocabulary; ++v) {
      const float q = Draft(row, v);
      if (!IsProbability(q)) return Fail(TreeFault::kProbability, row, q);
      drafted += FixedProbability(q);
      const uint64_t own = FixedExcess(Target(row, v), q);
      excess[v / kTileTokens] += own;
      left += own;
    }
    if (!SumsToOne(drafted)) return Fail(TreeFault::kDraftSum, row, FloatOf(drafted));
    if (left > 0) {
      tiles_.swap(excess);
      return Find(PlaceOfCoin(final_coin_, left),
                  [&](int64_t v) { return FixedExcess(Target(row, v), Draft(row, v)); });
    }
    for (const uint64_t tile : tiles_) left += tile;
    return Find(PlaceOfCoin(final_coin_, left),
                [&](int64_t v) { return FixedProbability(Target(row, v)); });
  }

  // The token whose mass holds `place`, mass by mass; tiles_ are the sums of `mass`.
  template <typename Mass>
  int64_t Find(uint64_t place, Mass mass) const {
    size_t tile = 0;
    while (place >= tiles_[tile]) place -= tiles_[tile++];
    for (int64_t v = static_cast<int64_t>(tile) * kTileTokens;; ++v) {
      const uint64_t own = mass(v);
      if (place < own) return v;
      place -= own;
    }
  }

  int Fail(TreeFault fault, int row, float value) {
    fault_ = PackFault(fault, row, Bits(value));
    return -1;
  }

  const SamplingParams& params_;
  const Links links_;
  const int64_t* tokens_;
  const float* target_;
  const float* draft_;
  const float* coins_;
  const float final_coin_;
  int32_t* path_;
  int depth_ = 0;
  int64_t fault_ = 0;
  std::vector<int64_t> rejected_;  // distinct and possible
  std::vector<uint64_t> tiles_;    // masses of the row that is drawn from
};

void Refuse(const AcceptOutputs& out, int64_t request, int rows, int64_t fault) {
  std::fill_n(out.path + request * rows, rows, -1);
  out.counts[request] = 0;
  out.next_token[request] = -1;
  out.status[request] = fault;
}

}  // namespace

void AcceptGreedyCpu(const GreedyParams& params) {
  for (int64_t request = 0; request < params.num_requests; ++request) {
    const Links links(params.links, request, params.rows);
    const int64_t fault = links.FindFault();
    if (fault != 0) {
      Refuse(params.out, request, params.rows, fault);
      continue;
    }
    const int64_t* tokens = params.tokens + request * params.rows;
    const int64_t* targets = params.target_ids + request * params.rows;
    int32_t* path = params.out.path + request * params.rows;
    std::fill_n(path, params.rows, -1);
    int32_t count = 0;
    int row = 0;
    for (int child = links.FirstChild(row); child >= 0;) {
      if (tokens[child] == targets[row]) {
        path[count++] = child;
        row = child;
        child = links.FirstChild(row);
      } else {
        child = links.NextSibling(child);
      }
    }
    params.out.counts[request] = count;
    params.out.next_token[request] = targets[row];
    params.out.status[request] = 0;
  }
}

void AcceptSamplingCpu(const SamplingParams& params) {
  std::atomic<int64_t> next{0};
  // A thread costs more than a small row.
  const int64_t work = int64_t{params.num_requests} * (params.vocabulary + 64);
  const int64_t workers = std::min<int64_t>(params.num_requests, 1 + work / 65536);
  RunOnTorchThreads(workers, [&] {
    for (int64_t request = next++; request < params.num_requests; request = next++) {
      std::fill_n(params.out.path + request * params.rows, params.rows, -1);
      int32_t count = 0;
      int64_t token = -1;
      const int64_t fault = Sampler(params, request).Run(&count, &token);
      if (fault != 0) {
        Refuse(params.out, request, params.rows, fault);
        continue;
      }
      params.out.counts[request] = count;
      params.out.next_token[request] = token;
      params.out.status[request] = 0;
    }
  });
}

}  // namespace nwor
