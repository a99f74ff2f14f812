#include <cstdint>

#include "base/cuda/dependent_launch.cuh"
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
constexpr int kMaxRanked = 128;  // keys that are compared with each other instead of counted again
constexpr int kMaxKept = kThreads;  // keys left after sifting: one to a thread
constexpr int kLeastToSift = 8;     // keys of a thread that make it worth while

// Sum over the lanes before this one.
__device__ uint32_t SumBefore(uint32_t value) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t inclusive = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffff, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  return inclusive - value;
}

// The sum over the warps before this one of what each gives. Ends with every thread past a barrier;
// `totals` may be used again after another one.
__device__ uint32_t SumOfWarpsBefore(uint32_t of_warp, uint32_t (&totals)[kWarps]) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) totals[warp] = of_warp;
  __syncthreads();
  return __shfl_sync(0xffffffff, SumBefore(totals[lane]), static_cast<int>(warp));
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

// The keys that one thread looks after: in registers, or, for lists that are too long (kKeys = 0),
// read again each time. A warp has neighbouring ids, 32 of them at a step, so that ids ascend from
// warp to warp, from step to step and from lane to lane.
template <int kKeys>
class OwnKeys {
 public:
  __device__ OwnKeys(const SelectParams& params, const float* scores, int32_t count)
      : params_(params), scores_(scores), count_(count) {
    steps_ = kKeys > 0 ? kKeys : (count + kThreads - 1) / kThreads;
    first_ = static_cast<int32_t>(threadIdx.x / 32) * steps_ * 32 +
             static_cast<int32_t>(threadIdx.x % 32);
    if constexpr (kKeys > 0) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        if (first_ + j * 32 < count_) keys_[j] = KeyOf(params, scores, first_ + j * 32);
      }
    }
  }

  // Calls body(id, key, valid) with all lanes of a warp, ids ascending. Neither counts when it is
  // not valid.
  template <typename Body>
  __device__ void ForEach(Body&& body) const {
    if constexpr (kKeys > 0) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) body(first_ + j * 32, keys_[j], first_ + j * 32 < count_);
    } else {
#pragma unroll 1
      for (int32_t j = 0; j < steps_; ++j) {
        const int32_t id = first_ + j * 32;
        const bool valid = id < count_;
        body(id, valid ? KeyOf(params_, scores_, id) : 0, valid);
      }
    }
  }

 private:
  const SelectParams& params_;
  const float* scores_;
  int32_t count_;
  int32_t steps_;
  int32_t first_;
  uint32_t keys_[kKeys > 0 ? kKeys : 1] = {};
};

// What sifting has left: one key to a thread, with its place instead of its id.
class KeptKey {
 public:
  __device__ KeptKey(uint32_t key, bool valid) : key_(key), valid_(valid) {}

  template <typename Body>
  __device__ void ForEach(Body&& body) const {
    body(static_cast<int32_t>(threadIdx.x), key_, valid_);
  }

 private:
  uint32_t key_;
  bool valid_;
};

// Keys above `threshold` are taken, and of those equal to it the ids up to `last_id`.
struct Cut {
  uint32_t threshold;
  int32_t last_id;

  __device__ bool Takes(uint32_t key, int32_t id) const {
    return key > threshold || (key == threshold && id <= last_id);
  }
};

struct SelectScratch {
  uint32_t totals[2][kWarps];
  uint32_t extremes[2][kWarps];
  uint32_t bins[kBins];
  uint32_t low;    // where the bin that the last key taken falls into begins
  int32_t needed;  // keys to take from that bin
  int32_t in_bin;  // of so many
  uint32_t num_ranked;
  uint32_t ranked_keys[kMaxRanked];
  int32_t ranked_ids[kMaxRanked];
  uint32_t kept_keys[kMaxKept];
  int32_t kept_ids[kMaxKept];
  Cut cut;
};

// The cut within a bin of few keys: the one that `needed` - 1 of them come before.
template <typename Keys>
__device__ Cut RankBin(const Keys& keys, uint32_t low, int shift, SelectScratch& scratch) {
  keys.ForEach([&](int32_t id, uint32_t key, bool valid) {
    if (valid && key >= low && (key - low) >> shift == 0) {
      const uint32_t at = atomicAdd(&scratch.num_ranked, 1u);
      scratch.ranked_keys[at] = key;
      scratch.ranked_ids[at] = id;
    }
  });
  __syncthreads();
  const auto own = static_cast<int32_t>(threadIdx.x);
  const int32_t count = scratch.in_bin;
  if (own < count) {
    const uint32_t key = scratch.ranked_keys[own];
    const int32_t id = scratch.ranked_ids[own];
    int32_t before = 0;
#pragma unroll 4
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t other = scratch.ranked_keys[i];
      before += other > key || (other == key && scratch.ranked_ids[i] < id) ? 1 : 0;
    }
    if (before == scratch.needed - 1) scratch.cut = {key, id};
  }
  __syncthreads();
  return scratch.cut;
}

// The cut among many equal keys: the lowest `needed` ids of them.
template <typename Keys>
__device__ Cut CutTies(const Keys& keys, uint32_t threshold, SelectScratch& scratch) {
  uint32_t equal = 0;
  keys.ForEach([&](int32_t, uint32_t key, bool valid) {
    equal += __popc(__ballot_sync(0xffffffff, valid && key == threshold));
  });
  uint32_t before = SumOfWarpsBefore(equal, scratch.totals[1]);
  const unsigned lower_lanes = (1u << threadIdx.x % 32) - 1;
  const auto needed = static_cast<uint32_t>(scratch.needed);
  keys.ForEach([&](int32_t id, uint32_t key, bool valid) {
    const unsigned mask = __ballot_sync(0xffffffff, valid && key == threshold);
    const uint32_t place = before + __popc(mask & lower_lanes);
    if (valid && key == threshold && place + 1 == needed) scratch.cut = {threshold, id};
    before += __popc(mask);
  });
  __syncthreads();
  return scratch.cut;
}

// Keys from `low` to low + `range`, both included.
struct KeyRange {
  uint32_t low;
  uint32_t range;
};

template <int kKeys>
__device__ KeyRange FindRange(const OwnKeys<kKeys>& keys, SelectScratch& scratch) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t least = 0xffffffff, most = 0;
  keys.ForEach([&](int32_t, uint32_t key, bool valid) {
    least = valid ? min(least, key) : least;
    most = valid ? max(most, key) : most;
  });
  least = __reduce_min_sync(0xffffffff, least);
  most = __reduce_max_sync(0xffffffff, most);
  if (lane == 0) {
    scratch.extremes[0][threadIdx.x / 32] = least;
    scratch.extremes[1][threadIdx.x / 32] = most;
  }
  __syncthreads();
  const uint32_t low = __reduce_min_sync(0xffffffff, scratch.extremes[0][lane]);
  return {low, __reduce_max_sync(0xffffffff, scratch.extremes[1][lane]) - low};
}

// Keeps few keys of many, all that may be taken among them: a key counts in the first place as the
// highest of its thread, and those below what enough threads reach are left out. Returns how many
// were kept, in scratch, ids ascending, or -1: too many, and nothing has changed.
template <int kKeys>
__device__ int32_t Sift(const OwnKeys<kKeys>& keys, int32_t count, int32_t taken,
                        SelectScratch& scratch, KeyRange* kept) {
  const unsigned lane = threadIdx.x % 32;
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  // Warps in which every thread has a key share what is to be reached.
  const int32_t whole_warps = count / (kKeys * 32);
  const int32_t share = whole_warps == 0 ? 33 : (taken + whole_warps - 1) / whole_warps;
  if (share > 32) return -1;
  uint32_t highest = 0;
  keys.ForEach([&](int32_t, uint32_t key, bool valid) { highest = max(highest, valid ? key : 0); });
  const uint32_t most = __reduce_max_sync(0xffffffff, highest);
  uint32_t bound = most;
  // Equal ones go at once, which makes the bound lower than need be.
  for (int32_t i = 1; i < share; ++i) {
    highest = highest == bound ? 0 : highest;
    bound = __reduce_max_sync(0xffffffff, highest);
  }
  if (lane == 0) {
    scratch.extremes[0][warp] = warp < whole_warps ? bound : 0xffffffff;
    scratch.extremes[1][warp] = most;
  }
  __syncthreads();
  const uint32_t low = __reduce_min_sync(0xffffffff, scratch.extremes[0][lane]);
  *kept = {low, __reduce_max_sync(0xffffffff, scratch.extremes[1][lane]) - low};
  uint32_t of_warp = 0;
  keys.ForEach([&](int32_t, uint32_t key, bool valid) {
    of_warp += __popc(__ballot_sync(0xffffffff, valid && key >= low));
  });
  uint32_t before = SumOfWarpsBefore(of_warp, scratch.totals[0]);
  const auto all = static_cast<int32_t>(__reduce_add_sync(0xffffffff, scratch.totals[0][lane]));
  if (all > kMaxKept) return -1;
  const unsigned lower_lanes = (1u << lane) - 1;
  keys.ForEach([&](int32_t id, uint32_t key, bool valid) {
    const unsigned mask = __ballot_sync(0xffffffff, valid && key >= low);
    if (valid && key >= low) {
      const uint32_t place = before + __popc(mask & lower_lanes);
      scratch.kept_keys[place] = key;
      scratch.kept_ids[place] = id;
    }
    before += __popc(mask);
  });
  __syncthreads();
  return all;
}

// REQUIRES: 0 < taken < keys; all keys lie in `range`; bins and num_ranked are zero.
template <typename Keys>
__device__ Cut FindCut(const Keys& keys, const KeyRange& range, int32_t taken,
                       SelectScratch& scratch) {
  uint32_t low = range.low;
  int shift = max(0, 32 - __clz(static_cast<int>(range.range)) - kBinBits);
  auto needed = static_cast<uint32_t>(taken);
  uint32_t num_bins = kBins;
#pragma unroll 1
  while (true) {
    keys.ForEach([&](int32_t, uint32_t key, bool valid) {
      const uint32_t bin = (key - low) >> shift;
      if (valid && key >= low && bin < num_bins) atomicAdd(&scratch.bins[bin], 1u);
    });
    __syncthreads();
    // Bins from the highest down, neighbours to one thread, which empties them again.
    uint32_t counts[kBinsPerThread];
    uint32_t own = 0;
    const int first = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsPerThread;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) {
      counts[i] = scratch.bins[first - i];
      scratch.bins[first - i] = 0;
      own += counts[i];
    }
    uint32_t reached = SumBefore(own);
    const uint32_t of_warp = __shfl_sync(0xffffffff, reached + own, 31);
    reached += SumOfWarpsBefore(of_warp, scratch.totals[0]);
    if (reached < needed && needed <= reached + own) {
#pragma unroll
      for (int i = 0; i < kBinsPerThread; ++i) {
        if (reached < needed && needed <= reached + counts[i]) {
          scratch.low = low + (static_cast<uint32_t>(first - i) << shift);
          scratch.needed = static_cast<int32_t>(needed - reached);
          scratch.in_bin = static_cast<int32_t>(counts[i]);
        }
        reached += counts[i];
      }
    }
    __syncthreads();
    low = scratch.low;
    needed = static_cast<uint32_t>(scratch.needed);
    // A bin that is taken whole needs no closer look: nothing lies between it and its beginning.
    if (scratch.in_bin == scratch.needed) return {low, 0x7fffffff};
    if (scratch.in_bin <= kMaxRanked) return RankBin(keys, low, shift, scratch);
    if (shift == 0) return CutTies(keys, low, scratch);
    // Only the bin is looked at again: keys above it are taken already.
    num_bins = 1u << min(shift, kBinBits);
    shift = max(0, shift - kBinBits);
  }
}

// Calls put(position, id) for every key that the cut takes, positions and ids ascending.
template <typename Keys, typename Put>
__device__ void WriteTaken(const Keys& keys, const Cut& cut, SelectScratch& scratch, Put&& put) {
  uint32_t of_warp = 0;
  keys.ForEach([&](int32_t id, uint32_t key, bool valid) {
    of_warp += __popc(__ballot_sync(0xffffffff, valid && cut.Takes(key, id)));
  });
  // Not the totals that ties were counted in: no barrier lies between.
  uint32_t before = SumOfWarpsBefore(of_warp, scratch.extremes[0]);
  const unsigned lower_lanes = (1u << threadIdx.x % 32) - 1;
  keys.ForEach([&](int32_t id, uint32_t key, bool valid) {
    const bool takes = valid && cut.Takes(key, id);
    const unsigned mask = __ballot_sync(0xffffffff, takes);
    if (takes) put(static_cast<int32_t>(before + __popc(mask & lower_lanes)), id);
    before += __popc(mask);
  });
}

template <int kKeys>
__global__ void __launch_bounds__(kThreads)
    TakeHighestKernel(const __grid_constant__ SelectParams params) {
  __shared__ SelectScratch scratch;
  for (int i = 0; i < kBinsPerThread; ++i) scratch.bins[threadIdx.x + i * kThreads] = 0;
  if (threadIdx.x == 0) scratch.num_ranked = 0;
  // The launch of the scores let this one begin when all before it had ended, so that only the
  // scores have to be waited for.
  if (params.max_blocks == 0) WaitOnDependentGrids();
  const bool shared_list = params.selection == Selection::kShared;
  const auto request =
      static_cast<int32_t>(shared_list ? blockIdx.x : blockIdx.x / params.num_kv_heads);
  const auto kv_head = static_cast<int32_t>(shared_list ? 0 : blockIdx.x % params.num_kv_heads);
  const int64_t store_row = StoreRow(params.rows, request, params.num_rows);
  const int32_t count = min(params.num_candidates[request], params.max_blocks);
  const int32_t taken = BlocksToTake(params, request, count);
  const int64_t row = int64_t{request} * params.num_kv_heads + kv_head;
  WaitOnDependentGrids();
  LaunchDependentGrids();
  if (count < 0 || store_row < 0) return;
  const OwnKeys<kKeys> keys(params, params.scores + row * params.max_blocks, count);
  int32_t* ids = params.ids + (store_row * params.num_kv_heads + kv_head) * params.k;
  const int32_t lists = shared_list ? params.num_kv_heads : 1;
  const auto put = [&](int32_t position, int32_t id) {
    for (int32_t list = 0; list < lists; ++list) ids[int64_t{list} * params.k + position] = id;
  };
  for (int32_t i = taken + static_cast<int32_t>(threadIdx.x); i < params.k; i += kThreads) {
    put(i, -1);
  }
  if (taken == 0) return;
  if (taken == count) return WriteTaken(keys, {0, 0x7fffffff}, scratch, put);
  if constexpr (kKeys >= kLeastToSift) {
    KeyRange range;
    const int32_t kept = Sift(keys, count, taken, scratch, &range);
    if (kept >= 0) {
      const auto place = static_cast<int32_t>(threadIdx.x);
      const KeptKey key(place < kept ? scratch.kept_keys[place] : 0, place < kept);
      const Cut cut = kept == taken ? Cut{0, 0x7fffffff} : FindCut(key, range, taken, scratch);
      return WriteTaken(key, cut, scratch, [&](int32_t position, int32_t from) {
        put(position, scratch.kept_ids[from]);
      });
    }
  }
  const KeyRange range = FindRange(keys, scratch);
  WriteTaken(keys, FindCut(keys, range, taken, scratch), scratch, put);
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
  LaunchDependent(kernel, dim3(static_cast<unsigned>(lists)), kThreads, 0, params,
                  "selection kernel");
}

}  // namespace nwor
