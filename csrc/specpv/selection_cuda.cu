#include <cstdint>

#include "kv_interceptor/launch_check.h"
#include "specpv/selection.h"

// The k highest of a list of scores, by one block of threads: a radix select over the range that
// the scores have, not over all bits of a float. Scores of one list are close to each other; spread
// over their own range they fall into different bins and the counts do not wait for each other.

namespace nwor {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr int kBinsPerThread = kBins / kThreads;

// Sums over the threads before this one, and over all.
struct Prefix {
  uint64_t before;
  uint64_t all;
};

// Ends with every thread past a barrier; `totals` may be used again after another one.
__device__ Prefix ScanBlock(uint64_t value, uint64_t (&totals)[kWarps]) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t inclusive = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffff, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == 31) totals[warp] = inclusive;
  __syncthreads();
  uint64_t of_warps = totals[lane];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffff, of_warps, distance);
    if (lane >= distance) of_warps += other;
  }
  const uint64_t before = __shfl_sync(0xffffffff, of_warps, warp == 0 ? 0 : warp - 1);
  return {inclusive - value + (warp == 0 ? 0 : before), __shfl_sync(0xffffffff, of_warps, 31)};
}

__device__ uint32_t KeyOf(const SelectParams& params, const float* scores, int32_t id) {
  float score = scores[id];
  if (params.selection == Selection::kShared) {
    for (int32_t head = 1; head < params.num_kv_heads; ++head) {
      score += scores[int64_t{head} * params.max_blocks + id];
    }
  }
  return OrderedKey(score);
}

// The keys of neighbouring ids that one thread looks after: in registers, or, for lists that are
// too long (kKeys = 0), read again each time.
template <int kKeys>
class OwnKeys {
 public:
  __device__ OwnKeys(const SelectParams& params, const float* scores, int32_t count)
      : params_(params), scores_(scores) {
    const int32_t share = kKeys > 0 ? kKeys : (count + kThreads - 1) / kThreads;
    begin_ = min(count, static_cast<int32_t>(threadIdx.x) * share);
    size_ = min(count - begin_, share);
    if constexpr (kKeys > 0) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        if (j < size_) keys_[j] = KeyOf(params, scores, begin_ + j);
      }
    }
  }

  // Calls body(id, key), ids ascending.
  template <typename Body>
  __device__ void ForEach(Body&& body) const {
    if constexpr (kKeys > 0) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        if (j < size_) body(begin_ + j, keys_[j]);
      }
    } else {
      for (int32_t j = 0; j < size_; ++j) body(begin_ + j, KeyOf(params_, scores_, begin_ + j));
    }
  }

 private:
  const SelectParams& params_;
  const float* scores_;
  int32_t begin_;
  int32_t size_;
  uint32_t keys_[kKeys > 0 ? kKeys : 1];
};

// Keys above `threshold` are taken, and of those equal to it the first `ties`.
struct Cut {
  uint32_t threshold;
  int32_t ties;
};

struct SelectScratch {
  uint64_t totals[2][kWarps];
  uint32_t extremes[2][kWarps];
  uint32_t bins[kBins];
  uint32_t low;    // where the bin that the last key taken falls into begins
  int32_t needed;  // keys to take from that bin
  int32_t in_bin;  // of so many
};

template <int kKeys>
__device__ Cut FindCut(const OwnKeys<kKeys>& keys, int32_t taken, SelectScratch& scratch) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t least = 0xffffffff, most = 0;
  keys.ForEach([&](int32_t, uint32_t key) {
    least = min(least, key);
    most = max(most, key);
  });
  least = __reduce_min_sync(0xffffffff, least);
  most = __reduce_max_sync(0xffffffff, most);
  if (lane == 0) {
    scratch.extremes[0][threadIdx.x / 32] = least;
    scratch.extremes[1][threadIdx.x / 32] = most;
  }
  for (int i = 0; i < kBinsPerThread; ++i) scratch.bins[threadIdx.x + i * kThreads] = 0;
  __syncthreads();
  uint32_t low = __reduce_min_sync(0xffffffff, scratch.extremes[0][lane]);
  const uint32_t range = __reduce_max_sync(0xffffffff, scratch.extremes[1][lane]) - low;
  int shift = max(0, 32 - __clz(static_cast<int>(range)) - kBinBits);
  int32_t needed = taken;
#pragma unroll 1
  while (true) {
    keys.ForEach([&](int32_t, uint32_t key) {
      const uint32_t bin = (key - low) >> shift;
      if (key >= low && bin < kBins) atomicAdd(&scratch.bins[bin], 1u);
    });
    __syncthreads();
    // Bins from the highest down, neighbours to one thread, which empties them again.
    uint32_t counts[kBinsPerThread];
    uint64_t own = 0;
    const int first = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsPerThread;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) {
      counts[i] = scratch.bins[first - i];
      scratch.bins[first - i] = 0;
      own += counts[i];
    }
    const auto before = static_cast<int32_t>(ScanBlock(own, scratch.totals[0]).before);
    if (before < needed && needed <= before + static_cast<int32_t>(own)) {
      int32_t reached = before;
#pragma unroll
      for (int i = 0; i < kBinsPerThread; ++i) {
        const auto in_bin = static_cast<int32_t>(counts[i]);
        if (reached < needed && needed <= reached + in_bin) {
          scratch.low = low + (static_cast<uint32_t>(first - i) << shift);
          scratch.needed = needed - reached;
          scratch.in_bin = in_bin;
        }
        reached += in_bin;
      }
    }
    __syncthreads();
    low = scratch.low;
    needed = scratch.needed;
    // A bin that is taken whole needs no closer look: `low` - 1 is below all of it.
    if (scratch.in_bin == needed) return {low - 1, 0};
    if (shift == 0) return {low, needed};
    shift = max(0, shift - kBinBits);
  }
}

template <int kKeys>
__global__ void __launch_bounds__(kThreads)
    TakeHighestKernel(const __grid_constant__ SelectParams params) {
  __shared__ SelectScratch scratch;
  const bool shared_list = params.selection == Selection::kShared;
  const auto request =
      static_cast<int32_t>(shared_list ? blockIdx.x : blockIdx.x / params.num_kv_heads);
  const auto kv_head = static_cast<int32_t>(shared_list ? 0 : blockIdx.x % params.num_kv_heads);
  const int64_t store_row = StoreRow(params.rows, request, params.num_rows);
  if (params.num_candidates[request] < 0 || store_row < 0) return;
  const int32_t count = min(params.num_candidates[request], params.max_blocks);
  const int64_t row = int64_t{request} * params.num_kv_heads + kv_head;
  const int32_t taken = BlocksToTake(params, request, count);
  const OwnKeys<kKeys> keys(params, params.scores + row * params.max_blocks, count);
  // All of them: every key is at least 0, and so many may be equal to it.
  Cut cut = {0, taken};
  if (0 < taken && taken < count) cut = FindCut(keys, taken, scratch);

  uint64_t own = 0;  // above in the low half, equal in the high one
  keys.ForEach([&](int32_t, uint32_t key) {
    own += key > cut.threshold ? 1 : key == cut.threshold ? uint64_t{1} << 32 : 0;
  });
  const uint64_t before = ScanBlock(own, scratch.totals[1]).before;
  auto above_before = static_cast<int32_t>(before & 0xffffffff);
  auto equal_before = static_cast<int32_t>(before >> 32);
  int32_t* ids = params.ids + (store_row * params.num_kv_heads + kv_head) * params.k;
  const int32_t lists = shared_list ? params.num_kv_heads : 1;
  const auto put = [&](int32_t position, int32_t id) {
    for (int32_t list = 0; list < lists; ++list) ids[int64_t{list} * params.k + position] = id;
  };
  if (taken > 0) {
    keys.ForEach([&](int32_t id, uint32_t key) {
      const int32_t position = above_before + min(equal_before, cut.ties);
      if (key > cut.threshold) {
        put(position, id);
        ++above_before;
      } else if (key == cut.threshold) {
        if (equal_before < cut.ties) put(position, id);
        ++equal_before;
      }
    });
  }
  for (int32_t i = taken + static_cast<int32_t>(threadIdx.x); i < params.k; i += kThreads) {
    put(i, -1);
  }
}

}  // namespace

void LaunchTakeHighest(const SelectParams& params) {
  const int lists = params.selection == Selection::kShared
                        ? params.num_requests
                        : params.num_requests * params.num_kv_heads;
  const int32_t keys = (params.max_blocks + kThreads - 1) / kThreads;
  const auto kernel = keys <= 2    ? TakeHighestKernel<2>
                      : keys <= 8  ? TakeHighestKernel<8>
                      : keys <= 32 ? TakeHighestKernel<32>
                                   : TakeHighestKernel<0>;
  kernel<<<lists, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
  CheckCuda(cudaGetLastError(), "selection kernel");
}

}  // namespace nwor
