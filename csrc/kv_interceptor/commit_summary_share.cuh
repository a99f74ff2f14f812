#pragma once

#include <cstdint>
#include <limits>

#include "kv_interceptor/commit_summaries.cuh"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/extremes.cuh"

// Summaries of the blocks that a commit completes, dealt to the warps that move its rows. A unit is
// one head of one block. Every warp finds its own units from the requests' lengths, so that nobody
// has to be asked, and brings their tokens to the L2 cache one unit ahead.

namespace nwor {

// One head of one completed block. Blocks with a page out of range are left out.
struct SummaryUnit {
  int32_t request = -1;  // < 0: there is none
  int32_t row;
  int32_t block;
  int32_t head;
  int32_t cached;  // tokens of the request in the cache before this commit
};

// What a warp's lanes know of the requests `base` to base + 31, one each.
struct LaneRequests {
  SummaryLengths lengths;  // without the row where rows are not given
  int32_t count = -1;

  LaneRequests() = default;
  // Loads depend on nothing but the number of the request, and nothing here waits for them.
  __device__ LaneRequests(const BatchTable& batch, const SummaryTable& table, int32_t base) {
    const int32_t request = base + static_cast<int32_t>(threadIdx.x % 32);
    if (request >= NumRequests(batch)) return;
    count = batch.counts[request];
    lengths.full = table.to.full_lens[request];
    lengths.cached = table.to.cached_lens[request];
    if (table.to.rows != nullptr) lengths.row = table.to.rows[request];
  }
};

// The summaries of one layer. All lanes of a warp call its methods together.
struct LayerSummaries {
  const BatchTable& batch;
  const LayerTable& layer;
  const SummaryTable& table;
  int layer_idx;

  // The unit of that number, and how many there are as soon as that is known. `requests`: the first
  // 32. The batch need not be valid: counts beyond the depth complete nothing.
  __device__ SummaryUnit Find(uint32_t number, LaneRequests requests, uint32_t& num_units) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const auto num_heads = static_cast<uint32_t>(table.num_heads);
    SummaryUnit unit;
    int32_t before = 0;  // blocks of requests before `base`
#pragma unroll 1
    for (int32_t base = 0;;) {
      CompletedBlocks own;
      if (table.to.rows == nullptr) requests.lengths.row = base + lane;
      if (requests.count >= 0 && requests.count <= batch.depth) {
        own = FindCompleted(table.to, requests.lengths, requests.count);
      }
      const int32_t num_own = max(own.last - own.first, 0);
      if (__any_sync(0xffffffff, num_own > 0)) {
        int32_t end = num_own;  // blocks up to and with this lane's
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
          const int32_t other = __shfl_up_sync(0xffffffff, end, distance);
          if (lane >= distance) end += other;
        }
        const auto wanted = static_cast<int32_t>(number / num_heads) - before;
        const int32_t num_blocks = __shfl_sync(0xffffffff, end, 31);
        if (wanted < num_blocks) {
          const int source = __popc(__ballot_sync(0xffffffff, end <= wanted));
          unit.request = base + source;
          unit.row = __shfl_sync(0xffffffff, own.row, source);
          unit.block = __shfl_sync(0xffffffff, own.first + wanted - (end - num_own), source);
          unit.head = static_cast<int32_t>(number % num_heads);
          unit.cached = __shfl_sync(0xffffffff, requests.lengths.cached, source);
        }
        before += num_blocks;
      }
      base += 32;
      if (base >= NumRequests(batch)) {
        num_units = static_cast<uint32_t>(before) * num_heads;
        return unit;
      }
      if (unit.request >= 0) return unit;
      requests = LaneRequests(batch, table, base);
    }
  }

  // K of the lane's token among the 32 from the block's token `first` on; null beyond the block.
  __device__ const char* KeyRowAt(const SummaryUnit& unit, int32_t first) const {
    const int32_t index = first + static_cast<int32_t>(threadIdx.x % 32);
    if (index >= table.to.block_size) return nullptr;
    return KeyRow(batch, layer, table, unit.request, unit.cached, FirstToken(unit) + index,
                  unit.head);
  }
  __device__ int32_t FirstToken(const SummaryUnit& unit) const {
    return table.to.start_token + unit.block * table.to.block_size;
  }
  __device__ int64_t OutAt(const SummaryUnit& unit) const {
    const CommitSummaries& to = table.to;
    return layer_idx * to.layer_stride + unit.row * to.row_stride + unit.block * to.block_stride +
           unit.head * to.head_stride;
  }

  template <typename T>
  __device__ void StorePairs(PairExtremes<T>& extremes, int64_t out_at) const {
    const int lanes_per_row = table.head_dim / 8;
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
    for (int other = 1; other < 32 / lanes_per_row; ++other) {
      extremes.Meet((lane + other * lanes_per_row) % 32, lane < lanes_per_row);
    }
    if (lane < lanes_per_row) {
      const int64_t at = out_at + lane * 8;
      extremes.Store(static_cast<T*>(table.to.kmax) + at, static_cast<T*>(table.to.kmin) + at);
    }
  }

  template <typename T>
  __device__ void SummarizePairs(const SummaryUnit& unit) const {
    PairExtremes<T> extremes;
#pragma unroll 1
    for (int first = 0; first < table.to.block_size; first += 32) {
      const LaneRows rows(KeyRowAt(unit, first), min(32, table.to.block_size - first));
      if (!rows.whole()) return;
      AddPairRows<T>(rows, table.head_dim / 8, extremes);
    }
    StorePairs(extremes, OutAt(unit));
  }

  __device__ void SummarizePlain(const SummaryUnit& unit) const {
    const float scale =
        layer.scales[0] == nullptr ? 1.0f : layer.scales[0][unit.head * layer.scale_stride[0]];
    const int32_t cached = unit.cached - FirstToken(unit);
#pragma unroll 1
    for (int base = 0; base < table.head_dim; base += 32) {
      const int channel = base + static_cast<int>(threadIdx.x % 32);
      float high = -INFINITY, low = INFINITY;
#pragma unroll 1
      for (int first = 0; first < table.to.block_size; first += 32) {
        const LaneRows rows(KeyRowAt(unit, first), min(32, table.to.block_size - first));
        if (!rows.whole()) return;
        AddPlainRows(rows, table, cached - first, scale, channel, &high, &low);
      }
      if (channel < table.head_dim) {
        WriteFloat(table.to.kmax, OutAt(unit) + channel, table.to.dtype, high);
        WriteFloat(table.to.kmin, OutAt(unit) + channel, table.to.dtype, low);
      }
    }
  }
};

// The units `warp`, warp + num_warps, ..., of channels of any type and blocks of any size.
// REQUIRES: the batch is valid.
__device__ __noinline__ void SummarizeAny(LayerSummaries summaries, uint32_t warp,
                                          uint32_t num_warps) {
  const SummaryTable& table = summaries.table;
  uint32_t num_units = std::numeric_limits<uint32_t>::max();
#pragma unroll 1
  for (uint32_t number = warp; number < num_units; number += num_warps) {
    const LaneRequests requests(summaries.batch, table, 0);
    const SummaryUnit unit = summaries.Find(number, requests, num_units);
    if (unit.request < 0) return;
    if (!table.pairs) {
      summaries.SummarizePlain(unit);
    } else if (table.row_dtype == DType::kFloat16) {
      summaries.SummarizePairs<__half>(unit);
    } else {
      summaries.SummarizePairs<__nv_bfloat16>(unit);
    }
  }
}

// What one warp does of a layer's summaries. Usual blocks (pairs of channels, one token to a lane)
// are begun early: their tokens are brought to the L2 cache one unit ahead.
class SummaryShare {
 public:
  // `warp` of `num_warps` that share the layer.
  __device__ SummaryShare(const LayerSummaries& summaries, uint32_t warp, uint32_t num_warps)
      : summaries_(summaries), warp_(warp), num_warps_(num_warps) {}

  // `requests`: the first 32. The batch need not be valid yet: what is read is within bounds and
  // goes nowhere.
  __device__ void Start(const LaneRequests& requests) {
    if (summaries_.table.usual) Begin(warp_, requests);
  }

  // REQUIRES: the batch is valid, and Start was called.
  __device__ void Finish() {
    if (!summaries_.table.usual) return SummarizeAny(summaries_, warp_, num_warps_);
#pragma unroll 1
    for (uint32_t next = warp_ + num_warps_; out_at_ >= 0; next += num_warps_) {
      const LaneRows rows(key_row_, summaries_.table.to.block_size);
      const int64_t out_at = out_at_;
      out_at_ = -1;
      if (next < num_units_) Begin(next, LaneRequests(summaries_.batch, summaries_.table, 0));
      if (!rows.whole()) continue;
      if (summaries_.table.row_dtype == DType::kFloat16) {
        Complete<__half>(rows, out_at);
      } else {
        Complete<__nv_bfloat16>(rows, out_at);
      }
    }
  }

 private:
  __device__ void Begin(uint32_t number, const LaneRequests& requests) {
    const SummaryUnit unit = summaries_.Find(number, requests, num_units_);
    if (unit.request < 0) return;
    out_at_ = summaries_.OutAt(unit);
    key_row_ = summaries_.KeyRowAt(unit, 0);
    if (key_row_ == nullptr) return;
#pragma unroll 1
    for (int32_t byte = 0; byte < summaries_.table.head_dim * 2; byte += 128) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(key_row_ + byte));
    }
  }

  template <typename T>
  __device__ void Complete(const LaneRows& rows, int64_t out_at) const {
    PairExtremes<T> extremes;
    AddPairRows<T>(rows, summaries_.table.head_dim / 8, extremes);
    summaries_.StorePairs(extremes, out_at);
  }

  const LayerSummaries summaries_;
  const uint32_t warp_;
  const uint32_t num_warps_;
  uint32_t num_units_ = std::numeric_limits<uint32_t>::max();  // as far as it is known
  int64_t out_at_ = -1;                                        // of the unit at hand, < 0: none
  const char* key_row_;                                        // and K of the lane's token in it
};

}  // namespace nwor
