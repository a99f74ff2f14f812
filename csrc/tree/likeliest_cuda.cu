#include <cstdint>

#include "base/cuda/element.cuh"
#include "base/cuda/launch_check.h"
#include "tree/likeliest_params.h"

// One block per row, which reads its logits once. Every thread keeps the maximum and the sum of its
// share, and which token its maximum is. The best tokens are in the shares of the threads with the
// best maxima: only those are looked at again. Shares follow from the vocabulary alone, so sums do
// not depend on where a row lies.
//
// A token is compared by its key: its logit, and of equals the lower id. No two keys are equal, so
// that also of a row of equals few threads have to be looked at.

namespace nwor {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kAhead = 4;  // loads of a thread in flight

struct LikeliestShared {
  uint64_t warp_best[kWarps];
  float warp_max[kWarps];
  float warp_sum[kWarps];
  uint64_t listed[kThreads + kMaxLikeliest];
  int num_listed;
  uint64_t winners[kMaxLikeliest];  // the best maxima of threads
  uint64_t best[kMaxLikeliest];
};

// What is no finite number has no chance.
__device__ float Chance(float logit) { return fabsf(logit) < INFINITY ? logit : -INFINITY; }

// Never 0. Both zeros are one.
__device__ uint64_t KeyOf(float logit, int token) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  const uint32_t ordered = bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFu : 0x80000000u);
  return uint64_t{ordered} << 32 | ~static_cast<uint32_t>(token);
}
__device__ int TokenOf(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }
__device__ float LogitOf(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(ordered ^ (ordered >> 31 != 0 ? 0x80000000u : 0xFFFFFFFFu));
}

// The logits of one row, in packets of 16 bytes.
template <typename T>
struct Row {
  static constexpr int kPacket = 16 / sizeof(T);
  using Elements = Packet<T, kPacket>;

  const T* data;
  int size;
  bool vectors;  // whether packets are aligned

  __device__ int NumPackets() const { return (size + kPacket - 1) / kPacket; }

  // Beyond the end: no chance.
  __device__ Elements Load(int packet) const {
    const int first = packet * kPacket;
    Elements loaded;
    if (vectors && first + kPacket <= size) {
      const uint4 word = __ldg(reinterpret_cast<const uint4*>(data + first));
      loaded = reinterpret_cast<const Elements&>(word);
    } else {
#pragma unroll
      for (int e = 0; e < kPacket; ++e) {
        if (first + e < size) {
          loaded.element[e] = data[first + e];
        } else {
          StoreElement(&loaded.element[e], -INFINITY);
        }
      }
    }
    return loaded;
  }
};

// A running softmax: the sum is of exp(logit - max).
struct Mass {
  float max = -INFINITY;
  float sum = 0.0f;

  // What a sum with this maximum is to be scaled by; -infinite ones are of nothing.
  __device__ float ScaleTo(float larger) const {
    return max == -INFINITY ? 0.0f : __expf(max - larger);
  }
  __device__ void Merge(const Mass& other) {
    const float larger = fmaxf(max, other.max);
    sum = sum * ScaleTo(larger) + other.sum * other.ScaleTo(larger);
    max = larger;
  }
};

// Joins the keys of threads that want it to best[0 .. kept), and leaves the `count` largest there,
// in order. Returns how many there are. Every thread of the block calls it.
__device__ int KeepBest(uint64_t key, bool wanted, int kept, int count, LikeliestShared& shared,
                        uint64_t* best) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kept) shared.listed[thread] = best[thread];
  if (thread == 0) shared.num_listed = kept;
  __syncthreads();
  if (wanted) shared.listed[atomicAdd(&shared.num_listed, 1)] = key;
  __syncthreads();
  const int total = shared.num_listed;
  for (int i = thread; i < total; i += kThreads) {
    const uint64_t mine = shared.listed[i];
    int rank = 0;
#pragma unroll 4
    for (int other = 0; other < total; ++other) rank += shared.listed[other] > mine ? 1 : 0;
    if (rank < count) best[rank] = mine;
  }
  __syncthreads();
  return min(total, count);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    LikeliestKernel(const __grid_constant__ LikeliestParams params) {
  using Reader = Row<T>;
  constexpr int kPacket = Reader::kPacket;
  __shared__ LikeliestShared shared;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int count = params.count;
  const T* const data = static_cast<const T*>(params.logits) + blockIdx.x * params.row_stride;
  const Reader row{data, params.vocabulary, reinterpret_cast<uintptr_t>(data) % 16 == 0};
  const int packets = row.NumPackets();

  Mass mass;
  int top = thread * kPacket;  // the token of the maximum
  for (int first = thread; first < packets; first += kAhead * kThreads) {
    typename Reader::Elements loaded[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kThreads < packets) loaded[i] = row.Load(first + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int packet = first + i * kThreads;
      if (packet >= packets) break;
      float logits[kPacket];
      float larger = mass.max;
#pragma unroll
      for (int e = 0; e < kPacket; ++e) {
        logits[e] = Chance(ElementToFloat(loaded[i].element[e]));
        if (logits[e] > larger) {
          larger = logits[e];
          top = packet * kPacket + e;
        }
      }
      if (larger == -INFINITY) continue;
      mass.sum *= mass.ScaleTo(larger);
      mass.max = larger;
#pragma unroll
      for (int e = 0; e < kPacket; ++e) mass.sum += __expf(logits[e] - larger);
    }
  }

  const uint64_t key = thread < packets ? KeyOf(mass.max, top) : 0;
  uint64_t largest = key;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, largest, step);
    largest = other > largest ? other : largest;
    mass.Merge({__shfl_xor_sync(0xFFFFFFFFu, mass.max, step),
                __shfl_xor_sync(0xFFFFFFFFu, mass.sum, step)});
  }
  if (lane == 0) {
    shared.warp_best[warp] = largest;
    shared.warp_max[warp] = mass.max;
    shared.warp_sum[warp] = mass.sum;
  }
  __syncthreads();

  // The count-th best of the warps' maxima, 0 where there are fewer: nothing below it is wanted, as
  // so many tokens are at least that. Each warp finds it by itself.
  const uint64_t of_warp = shared.warp_best[lane];
  int above = 0;
#pragma unroll 8
  for (int other = 0; other < kWarps; ++other) above += shared.warp_best[other] > of_warp ? 1 : 0;
  const uint32_t last = __ballot_sync(0xFFFFFFFFu, above == count - 1 && of_warp != 0);
  const uint64_t bar = __shfl_sync(0xFFFFFFFFu, of_warp, last == 0 ? 0 : __ffs(last) - 1);
  const bool wanted = key != 0 && (last == 0 || key >= bar);

  // The same among the threads' maxima: the best tokens are in the shares of at most `count`.
  const int num_winners = KeepBest(key, wanted, 0, count, shared, shared.winners);
  const uint64_t least = num_winners == count ? shared.winners[count - 1] : 0;

  // A token of these shares for each thread, in turns where there are more.
  const int share = (packets + kThreads - 1) / kThreads * kPacket;
  int kept = 0;
  for (int first = 0; first < num_winners * share; first += kThreads) {
    const int candidate = first + thread;
    uint64_t found = 0;
    if (candidate < num_winners * share) {
      const int owner = TokenOf(shared.winners[candidate / share]) / kPacket % kThreads;
      const int place = candidate % share;
      const int token = (owner + place / kPacket * kThreads) * kPacket + place % kPacket;
      if (token < row.size) found = KeyOf(Chance(ElementToFloat(data[token])), token);
    }
    kept = KeepBest(found, found != 0 && found >= least, kept, count, shared, shared.best);
  }

  if (thread >= count) return;
  Mass all{shared.warp_max[0], shared.warp_sum[0]};
  for (int other = 1; other < kWarps; ++other) {
    all.Merge({shared.warp_max[other], shared.warp_sum[other]});
  }
  const int64_t out = int64_t{blockIdx.x} * count + thread;
  const uint64_t mine = shared.best[thread];
  const float logit = LogitOf(mine);
  params.tokens[out] = TokenOf(mine);
  params.log_probs[out] = logit == -INFINITY ? -INFINITY : logit - all.max - logf(all.sum);
}

}  // namespace

void LaunchLikeliest(const LikeliestParams& params) {
  const auto blocks = static_cast<unsigned>(params.num_rows);
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
  };
  switch (params.dtype) {
    case DType::kFloat16:
      launch(LikeliestKernel<__half>);
      break;
    case DType::kBFloat16:
      launch(LikeliestKernel<__nv_bfloat16>);
      break;
    default:
      launch(LikeliestKernel<float>);
  }
  CheckCuda(cudaGetLastError(), "likeliest_tokens launch");
}

}  // namespace nwor
