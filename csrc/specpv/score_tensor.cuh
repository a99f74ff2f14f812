#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/ptx.cuh"
#include "kv_interceptor/early_launch.cuh"
#include "kv_interceptor/element.cuh"
#include "specpv/retrieval.h"

// Scores on tensor cores: summaries of 16 blocks are the rows of A, eight queries of one head the
// columns of B. Which channel is which step of k does not matter as long as A and B agree, so each
// lane takes eight neighbouring channels as one word of 16 bytes.

namespace nwor {

constexpr int kMaxTensorWarps = 8;
constexpr int kTensorStages = 2;     // units on their way in a warp's ring
constexpr int kTensorBlocks = 16;    // rows of A
constexpr int kTensorQueries = 8;    // columns of B
constexpr int kTensorChannels = 32;  // of one load of a row by four lanes
// Rows of queries are this much apart, so that two of them do not meet in one bank.
constexpr int kQueryPadBytes = 64;
// A sum of queries as that many numbers of 8 bits each: together they are as exact as a float.
constexpr int kSumTerms = 3;
constexpr int kSumRows = 2 * kSumTerms;  // of the positive values, then of the negative ones

template <typename T>
__device__ inline void Mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Two channels with the values of one sign kept, the others zero.
template <typename T>
__device__ inline uint32_t KeepSign(uint32_t pair, bool positive) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair zero = reinterpret_cast<const Pair&>(static_cast<const uint32_t&>(0u));
  const Pair x = reinterpret_cast<const Pair&>(pair);
  const Pair kept = positive ? __hmax2(x, zero) : __hmin2(x, zero);
  return reinterpret_cast<const uint32_t&>(kept);
}

template <typename T, int kChunks>
struct TensorScore {
  static constexpr int kDim = kChunks * kTensorChannels;
  static constexpr int kRowBytes = kDim * 2 + kQueryPadBytes;

  // Queries of one head padded to a multiple of eight.
  __host__ __device__ static int PaddedQueries(int queries) {
    return (queries + kTensorQueries - 1) / kTensorQueries * kTensorQueries;
  }

  static constexpr int kWords = kDim / 8;                      // of 16 bytes in a row
  static constexpr int kUnitBytes = kTensorBlocks * kDim * 2;  // of one of the two summaries

  // All queries of a KV head on their way to shared memory: row [head * padded + query].
  __device__ static void LoadQueries(const SelectParams& params, int32_t request, int32_t kv_head,
                                     const QueryRange& range, int padded, char* shared) {
    const int group = params.num_heads / params.num_kv_heads;
    for (int i = static_cast<int>(threadIdx.x); i < group * padded * kWords;
         i += static_cast<int>(blockDim.x)) {
      const int row = i / kWords, word = i % kWords;
      const int head = row / padded, query = range.begin + row % padded;
      char* const to = shared + row * kRowBytes + word * 16;
      if (query < range.end) {
        const T* from = static_cast<const T*>(params.query) + request * params.query_request +
                        query * params.query_row +
                        (int64_t{kv_head} * group + head) * params.query_head;
        ptx::CopyAsync(ptx::SharedAddress(to), reinterpret_cast<const uint4*>(from) + word);
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // With means over queries and over heads quest is linear: the sum of all scores of a KV head is
  // that of one row, the sum of its queries' positive values against kmax and that of the negative
  // ones against kmin. Each sum is kSumTerms rows of bfloat16. Called by all threads, between
  // barriers.
  __device__ static void SumQueries(const char* queries, int num_heads, int num_queries, int padded,
                                    char* sums) {
    for (int channel = static_cast<int>(threadIdx.x); channel < kDim;
         channel += static_cast<int>(blockDim.x)) {
      float rest[2] = {0.0f, 0.0f};
#pragma unroll 1
      for (int head = 0; head < num_heads; ++head) {
        const char* row = queries + head * padded * kRowBytes + channel * 2;
#pragma unroll 8
        for (int query = 0; query < num_queries; ++query) {
          const float x = ElementToFloat(*reinterpret_cast<const T*>(row + query * kRowBytes));
          rest[0] += fmaxf(x, 0.0f);
          rest[1] += fminf(x, 0.0f);
        }
      }
#pragma unroll
      for (int sign = 0; sign < 2; ++sign) {
#pragma unroll
        for (int term = 0; term < kSumTerms; ++term) {
          T part;
          StoreElement(&part, rest[sign]);
          rest[sign] -= ElementToFloat(part);
          *reinterpret_cast<T*>(sums + (sign * kSumTerms + term) * kRowBytes + channel * 2) = part;
        }
      }
    }
  }

  // Where a word of a unit's row lies. Rows of a multiple of 128 bytes would meet in one bank: odd
  // ones have their halves of 64 bytes exchanged.
  __device__ static int Place(int row, int word) {
    return (row * kWords + (kChunks % 2 == 0 ? word ^ (row % 2 * 4) : word)) * 16;
  }

  // One warp brings the summaries of 16 blocks, whole rows at a time.
  __device__ static void LoadUnit(const T* base, int64_t stride, int first, int last, char* to) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kTensorBlocks * kWords / 32; ++i) {
      const int row = (i * 32 + lane) / kWords, word = (i * 32 + lane) % kWords;
      // Rows beyond the candidates read the last one again; their scores are not stored.
      const T* from = base + min(first + row, last) * stride;
      ptx::CopyAsync(ptx::SharedAddress(to + Place(row, word)),
                     reinterpret_cast<const uint4*>(from) + word);
    }
  }

  // Eight channels of two rows of summaries.
  struct Rows {
    uint4 words[2][kChunks];

    __device__ void Read(const char* unit) {
      const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          words[half][chunk] = *reinterpret_cast<const uint4*>(
              unit + Place(lane / 4 + half * 8, chunk * 4 + lane % 4));
        }
      }
    }

    __device__ void Fragment(int chunk, int step, uint32_t (&a)[4]) const {
      const uint4& top = words[0][chunk];
      const uint4& bottom = words[1][chunk];
      a[0] = step == 0 ? top.x : top.z;
      a[1] = step == 0 ? bottom.x : bottom.z;
      a[2] = step == 0 ? top.y : top.w;
      a[3] = step == 0 ? bottom.y : bottom.w;
    }
  };

  // The same as Score for quest with both means, from the sums of SumQueries. False, and `total`
  // means nothing, where a score is not finite: what infinities give depends on the single rows.
  __device__ static bool ScoreSums(const char* sums, const Rows& high, const Rows& low,
                                   float (&total)[2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float c_high[4] = {}, c_low[4] = {};
    // Columns beyond the terms repeat the last one; nobody looks at them.
    const char* up = sums + min(lane / 4, kSumTerms - 1) * kRowBytes + lane % 4 * 16;
    const char* down = up + kSumTerms * kRowBytes;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint4 p = *reinterpret_cast<const uint4*>(up + chunk * 64);
      const uint4 n = *reinterpret_cast<const uint4*>(down + chunk * 64);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t a[4];
        const uint32_t b_up[2] = {step == 0 ? p.x : p.z, step == 0 ? p.y : p.w};
        const uint32_t b_down[2] = {step == 0 ? n.x : n.z, step == 0 ? n.y : n.w};
        high.Fragment(chunk, step, a);
        Mma<T>(c_high, a, b_up);
        low.Fragment(chunk, step, a);
        Mma<T>(c_low, a, b_down);
      }
    }
    bool finite = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Terms 0 and 1 are columns of the first of four lanes, term 2 is one of the second.
      const float even = c_high[half * 2] + c_low[half * 2];
      const float odd = c_high[half * 2 + 1] + c_low[half * 2 + 1];
      float sum = lane % 4 == 0 ? even + odd : lane % 4 == 1 ? even : 0.0f;
      finite &= lane % 4 > 1 || isfinite(sum);
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      total[half] = sum;
    }
    return __all_sync(0xffffffff, finite);
  }

  // Scores of blocks lane / 4 and lane / 4 + 8 of a unit, whole in each of four lanes.
  template <bool kQuest>
  __device__ static void Score(const SelectParams& params, const char* queries, int num_queries,
                               const Rows& high, const Rows& low, float (&total)[2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int padded = PaddedQueries(num_queries);
    const int group = params.num_heads / params.num_kv_heads;
    const bool query_max = params.query_reduce == QueryReduce::kMax;
    const bool group_max = params.group_reduce == GroupReduce::kMax;
#pragma unroll 1
    for (int head = 0; head < group; ++head) {
      float score[2] = {query_max ? -INFINITY : 0.0f, query_max ? -INFINITY : 0.0f};
#pragma unroll 1
      for (int tile = 0; tile < padded; tile += kTensorQueries) {
        float c_high[4] = {}, c_low[4] = {};
        const char* row = queries + (head * padded + tile + lane / 4) * kRowBytes;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const uint4 q = *reinterpret_cast<const uint4*>(row + chunk * 64 + lane % 4 * 16);
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            uint32_t a[4];
            const uint32_t b[2] = {step == 0 ? q.x : q.z, step == 0 ? q.y : q.w};
            if constexpr (kQuest) {
              const uint32_t up[2] = {KeepSign<T>(b[0], true), KeepSign<T>(b[1], true)};
              const uint32_t down[2] = {KeepSign<T>(b[0], false), KeepSign<T>(b[1], false)};
              high.Fragment(chunk, step, a);
              Mma<T>(c_high, a, up);
              low.Fragment(chunk, step, a);
              Mma<T>(c_low, a, down);
            } else {
              high.Fragment(chunk, step, a);
              Mma<T>(c_high, a, b);
              low.Fragment(chunk, step, a);
              Mma<T>(c_low, a, b);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float s = kQuest ? c_high[i] + c_low[i] : fmaxf(c_high[i], c_low[i]);
          if (tile + lane % 4 * 2 + i % 2 < num_queries) {
            score[i / 2] = query_max ? fmaxf(score[i / 2], s) : score[i / 2] + s;
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int mask = 1; mask <= 2; mask *= 2) {
          const float other = __shfl_xor_sync(0xffffffff, score[half], mask);
          score[half] = query_max ? fmaxf(score[half], other) : score[half] + other;
        }
        total[half] = head == 0   ? score[half]
                      : group_max ? fmaxf(total[half], score[half])
                                  : total[half] + score[half];
      }
    }
  }
};

// Units of 16 blocks are dealt to the warps of all thread blocks of a head; each warp has its own
// ring of units on their way and waits for nobody. Thread blocks of different heads alternate: what
// they read at one time lies side by side. kSums: see SumQueries.
template <typename T, int kChunks, bool kQuest, bool kSums>
__global__ void __launch_bounds__(kMaxTensorWarps * 32, kChunks <= 4 ? 2 : 1)
    TensorScoreKernel(const __grid_constant__ SelectParams params) {
  using Tile = TensorScore<T, kChunks>;
  extern __shared__ __align__(16) char shared[];
  AwaitLaunchAhead();
  LetNextBegin();
  const auto kv_head = static_cast<int32_t>(blockIdx.x % params.num_kv_heads);
  const auto cta = static_cast<int>(blockIdx.x / params.num_kv_heads);
  const auto num_ctas = static_cast<int>(gridDim.x / params.num_kv_heads);
  const auto request = static_cast<int32_t>(blockIdx.y);
  const int32_t candidates = min(params.num_candidates[request], params.max_blocks);
  const int64_t store_row = StoreRow(params.rows, request, params.num_rows);
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int units = (candidates + kTensorBlocks - 1) / kTensorBlocks;
  if (cta * num_warps >= units || store_row < 0) return;
  const QueryRange range = QueriesOf(params, request);
  const int queries = range.end - range.begin;
  const int padded = Tile::PaddedQueries(queries);
  Tile::LoadQueries(params, request, kv_head, range, padded, shared);
  ptx::CommitCopies();

  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int group = params.num_heads / params.num_kv_heads;
  char* const sums = shared + group * padded * Tile::kRowBytes;
  char* const ring =
      sums + (kSums ? kSumRows * Tile::kRowBytes : 0) + warp * kTensorStages * 2 * Tile::kUnitBytes;
  const T* kmax = static_cast<const T*>(params.kmax) + store_row * params.kmax_strides.request +
                  kv_head * params.kmax_strides.head;
  const T* kmin = static_cast<const T*>(params.kmin) + store_row * params.kmin_strides.request +
                  kv_head * params.kmin_strides.head;
  const int step = num_ctas * num_warps;
  const auto load = [&](int unit, char* to) {
    if (unit < units) {
      const int first = unit * kTensorBlocks;
      Tile::LoadUnit(kmax, params.kmax_strides.block, first, candidates - 1, to);
      Tile::LoadUnit(kmin, params.kmin_strides.block, first, candidates - 1, to + Tile::kUnitBytes);
    }
    ptx::CommitCopies();
  };
  int unit = cta * num_warps + warp;
#pragma unroll
  for (int i = 0; i < kTensorStages; ++i) load(unit + i * step, ring + i * 2 * Tile::kUnitBytes);
  ptx::WaitCopies<kTensorStages>();
  __syncthreads();
  if constexpr (kSums) {
    Tile::SumQueries(shared, group, queries, padded, sums);
    __syncthreads();
  }

  float* const scores =
      params.scores + (int64_t{request} * params.num_kv_heads + kv_head) * params.max_blocks;
  int stage = 0;
#pragma unroll 1
  for (; unit < units; unit += step) {
    char* const at = ring + stage * 2 * Tile::kUnitBytes;
    ptx::WaitCopies<kTensorStages - 1>();
    __syncwarp();
    typename Tile::Rows high, low;
    high.Read(at);
    low.Read(at + Tile::kUnitBytes);
    __syncwarp();
    load(unit + kTensorStages * step, at);
    stage = stage + 1 == kTensorStages ? 0 : stage + 1;
    float total[2] = {0.0f, 0.0f};
    if (!kSums || !Tile::ScoreSums(sums, high, low, total)) {
      Tile::template Score<kQuest>(params, shared, queries, high, low, total);
    }
    const int block = unit * kTensorBlocks + lane / 4 + lane % 4 * 8;
    const float own = lane % 4 == 0 ? total[0] : total[1];
    if (lane % 4 < 2 && block < candidates) scores[block] = queries > 0 ? own : 0.0f;
  }
  ptx::WaitCopies<0>();
}

}  // namespace nwor
