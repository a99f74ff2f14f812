#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/cuda/ptx.cuh"
#include "base/cuda/dependent_launch.cuh"
#include "base/cuda/element.cuh"
#include "specpv/retrieval.h"
#include "specpv/score_share.cuh"

// Scores on tensor cores: summaries of 16 blocks are the rows of A, eight queries of one head the
// columns of B. Both are brought to the lanes as matrices of eight rows and eight channels.

namespace nwor {

constexpr int kMaxTensorWarps = 8;
constexpr int kTensorStages = 2;     // units on their way in a warp's ring
constexpr int kTensorBlocks = 16;    // rows of A
constexpr int kTensorQueries = 8;    // columns of B
constexpr int kTensorChannels = 32;  // of four matrices, two steps of k
// Tiles of queries multiplied side by side: an mma waits for the one before it on the same sums,
// and each tile has two of its own.
constexpr int kTilesAbreast = 4;
// Rows of queries are this much apart, so that no two of a matrix meet in one bank.
constexpr int kQueryPadBytes = 16;
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

struct TensorScoreParams : SelectParams {
  // Queries of one head that shared memory has room for, a multiple of kTensorQueries. Those of a
  // request that has more are read from where they lie.
  int32_t query_room = 0;
};

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

  // A KV head's queries where they lie. Strides in bytes.
  struct FarQueries {
    const char* first;
    int64_t head, row;

    __device__ FarQueries(const SelectParams& params, int32_t request, int32_t kv_head, int begin)
        : head(params.query_head * 2), row(params.query_row * 2) {
      const int64_t group = params.num_heads / params.num_kv_heads;
      first = static_cast<const char*>(params.query) + request * params.query_request * 2 +
              begin * row + kv_head * group * head;
    }
  };

  // All of them on their way to shared memory: row [head * padded + query].
  __device__ static void LoadQueries(const FarQueries& from, int group, int queries, int padded,
                                     char* shared) {
    for (int i = static_cast<int>(threadIdx.x); i < group * padded * kWords;
         i += static_cast<int>(blockDim.x)) {
      const int row = i / kWords, word = i % kWords;
      const int head = row / padded, query = row % padded;
      char* const to = shared + row * kRowBytes + word * 16;
      if (query < queries) {
        ptx::CopyAsync(ptx::SharedAddress(to),
                       from.first + head * from.head + query * from.row + word * 16);
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // With means over queries and over heads quest is linear: the sum of all scores of a KV head is
  // that of one row, the sum of its queries' positive values against kmax and that of the negative
  // ones against kmin. Each sum is kSumTerms rows of bfloat16. Called by all threads, between
  // barriers.
  __device__ static void SumQueries(const char* queries, int64_t head_bytes, int64_t row_bytes,
                                    int num_heads, int num_queries, char* sums) {
    for (int channel = static_cast<int>(threadIdx.x); channel < kDim;
         channel += static_cast<int>(blockDim.x)) {
      float rest[2] = {0.0f, 0.0f};
#pragma unroll 1
      for (int head = 0; head < num_heads; ++head) {
        const char* row = queries + head * head_bytes + channel * 2;
#pragma unroll 8
        for (int query = 0; query < num_queries; ++query) {
          const float x = ElementToFloat(*reinterpret_cast<const T*>(row + query * row_bytes));
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

  // Where a word of a unit's row lies: words are exchanged so that those of eight rows do not meet
  // in one bank.
  __device__ static int Place(int row, int word) {
    return (row * kWords + (word ^ (kChunks % 2 == 0 ? row % 8 : row / 2 % 4))) * 16;
  }

  // A request's summaries of one KV head.
  struct Summaries {
    const T* high;
    const T* low;
    int64_t high_block, low_block;  // strides

    __device__ Summaries(const SelectParams& params, int32_t request, int32_t kv_head)
        : high_block(params.kmax_strides.block), low_block(params.kmin_strides.block) {
      const int64_t row = params.pages.block_table == nullptr ? request : 0;
      high = static_cast<const T*>(params.kmax) + row * params.kmax_strides.request +
             kv_head * params.kmax_strides.head;
      low = static_cast<const T*>(params.kmin) + row * params.kmin_strides.request +
            kv_head * params.kmin_strides.head;
    }
  };

  // One warp brings the summaries of 16 blocks, whole rows at a time. block_of(i): where block i of
  // them lies; all lanes call it.
  template <typename BlockOf>
  __device__ static void LoadUnit(const T* base, int64_t stride, BlockOf&& block_of, char* to) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kTensorBlocks * kWords / 32; ++i) {
      const int row = (i * 32 + lane) / kWords, word = (i * 32 + lane) % kWords;
      const T* from = base + block_of(row) * stride;
      ptx::CopyAsync(ptx::SharedAddress(to + Place(row, word)),
                     reinterpret_cast<const uint4*>(from) + word);
    }
  }

  // A of step `step` of k, of a unit's rows in shared memory. The same as LoadMatrix4 at
  // Place(lane % 16, step * 2 + lane / 16), with few addresses for all steps.
  __device__ static void ReadUnit(uint32_t unit, int step, uint32_t (&a)[4]) {
    constexpr int kTurns = kChunks % 2 == 0 ? 4 : 2;  // words are exchanged within so many steps
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int place = Place(lane % 16, lane / 16) ^ (step % kTurns * 32);
    ptx::LoadMatrix4(a, unit + place + step / kTurns * kTurns * 32);
  }

  // The same as Score for quest with both means, from the sums of SumQueries. False, and `total`
  // means nothing, where a score is not finite: what infinities give depends on the single rows.
  __device__ static bool ScoreSums(uint32_t sums, uint32_t high, uint32_t low, float (&total)[2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float c_high[4] = {}, c_low[4] = {};
    // Columns beyond the terms repeat the last one; nobody looks at them.
    const uint32_t up = sums + min(lane % 8, kSumTerms - 1) * kRowBytes + lane / 8 * 16;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t p[4], n[4];
      ptx::LoadMatrix4(p, up + chunk * 64);
      ptx::LoadMatrix4(n, up + kSumTerms * kRowBytes + chunk * 64);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t a[4];
        ReadUnit(high, chunk * 2 + step, a);
        Mma<T>(c_high, a, {p[step * 2], p[step * 2 + 1]});
        ReadUnit(low, chunk * 2 + step, a);
        Mma<T>(c_low, a, {n[step * 2], n[step * 2 + 1]});
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
      total[half] = OverLanes(sum, false);
    }
    return __all_sync(0xffffffff, finite);
  }

  // The sum or the highest of what the four lanes of a row have.
  __device__ static float OverLanes(float value, bool highest) {
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
      const float other = __shfl_xor_sync(0xffffffff, value, mask);
      value = highest ? fmaxf(value, other) : value + other;
    }
    return value;
  }

  // Where a lane reads its part of a tile's rows: in shared memory, or where they lie.
  template <bool kNear>
  using TileRows = std::conditional_t<kNear, uint32_t, const char*>;

  // B of a chunk's two steps of k.
  template <bool kNear>
  __device__ static void ReadQueries(TileRows<kNear> rows, int chunk, uint32_t (&b)[4]) {
    if constexpr (kNear) {
      ptx::LoadMatrix4(b, rows + chunk * 64);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[i] = *reinterpret_cast<const uint32_t*>(rows + chunk * 64 + i * 16);
      }
    }
  }

  // The products of some tiles with a unit's summaries.
  template <bool kQuest, bool kNear>
  __device__ static void MultiplyTiles(const TileRows<kNear> (&rows)[kTilesAbreast], uint32_t high,
                                       uint32_t low, float (&c_high)[kTilesAbreast][4],
                                       float (&c_low)[kTilesAbreast][4]) {
#pragma unroll(kNear ? kChunks : 1)
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t b[kTilesAbreast][4];
#pragma unroll
      for (int i = 0; i < kTilesAbreast; ++i) ReadQueries<kNear>(rows[i], chunk, b[i]);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t a_high[4], a_low[4];
        ReadUnit(high, chunk * 2 + step, a_high);
        ReadUnit(low, chunk * 2 + step, a_low);
#pragma unroll
        for (int i = 0; i < kTilesAbreast; ++i) {
          const uint32_t x = b[i][step * 2], y = b[i][step * 2 + 1];
          if constexpr (kQuest) {
            Mma<T>(c_high[i], a_high, {KeepSign<T>(x, true), KeepSign<T>(y, true)});
            Mma<T>(c_low[i], a_low, {KeepSign<T>(x, false), KeepSign<T>(y, false)});
          } else {
            Mma<T>(c_high[i], a_high, {x, y});
            Mma<T>(c_low[i], a_low, {x, y});
          }
        }
      }
    }
  }

  // Scores of blocks lane / 4 and lane / 4 + 8 of a unit, whole in each of four lanes. kNear: the
  // queries are those of LoadQueries in shared memory at `near`.
  template <bool kQuest, bool kNear>
  __device__ static void Score(const SelectParams& params, uint32_t near, const FarQueries& far,
                               int group, int num_queries, uint32_t high, uint32_t low,
                               float (&total)[2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int head_tiles = PaddedQueries(num_queries) / kTensorQueries;
    const int tiles = group * head_tiles;
    const bool query_max = params.query_reduce == QueryReduce::kMax;
    const bool group_max = params.group_reduce == GroupReduce::kMax;
    // A sum of sums does not care where a head ends.
    const bool by_heads = query_max || group_max;
    // NaN gives way to any number in a maximum and stays where there is none.
    const float none = query_max ? NAN : 0.0f;
    float score[2] = {none, none};
    total[0] = total[1] = group_max ? NAN : 0.0f;
    int tile = 0;  // of its head
#pragma unroll 1
    for (int first = 0; first < tiles; first += kTilesAbreast) {
      TileRows<kNear> rows[kTilesAbreast];
#pragma unroll
      for (int i = 0; i < kTilesAbreast; ++i) {
        // Tiles beyond the last are the last again; nobody looks at them.
        const int at = min(first + i, tiles - 1);
        if constexpr (kNear) {
          rows[i] = near + (at * kTensorQueries + lane % 8) * kRowBytes + lane / 8 * 16;
        } else {
          // Nor at columns beyond the queries.
          const int query = min(at % head_tiles * kTensorQueries + lane / 4, num_queries - 1);
          rows[i] = far.first + at / head_tiles * far.head + query * far.row + lane % 4 * 4;
        }
      }
      float c_high[kTilesAbreast][4] = {}, c_low[kTilesAbreast][4] = {};
      MultiplyTiles<kQuest, kNear>(rows, high, low, c_high, c_low);
#pragma unroll
      for (int i = 0; i < kTilesAbreast; ++i) {
        const bool counts = first + i < tiles;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float s = kQuest ? c_high[i][j] + c_low[i][j] : fmaxf(c_high[i][j], c_low[i][j]);
          const int query = tile * kTensorQueries + lane % 4 * 2 + j % 2;
          const float counted = counts && query < num_queries ? s : none;
          score[j / 2] = query_max ? fmaxf(score[j / 2], counted) : score[j / 2] + counted;
        }
        tile = tile + 1 == head_tiles ? 0 : tile + 1;
        if (by_heads && counts && tile == 0) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float of_head = OverLanes(score[half], query_max);
            total[half] = group_max ? fmaxf(total[half], of_head) : total[half] + of_head;
            score[half] = none;
          }
        }
      }
    }
    if (!by_heads) {
#pragma unroll
      for (int half = 0; half < 2; ++half) total[half] = OverLanes(score[half], false);
    }
  }
};

// Brings the first units of a thread block to the L2 cache while the launch ahead still runs: of
// what all heads have of them, side by side in memory, a part for each head. What that launch
// writes may be read here as it was before: `share` is a guess, within the tensors whatever it is.
__device__ inline void HintUnits(const SelectParams& params, const RequestShare& share,
                                 int32_t kv_head) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (share.request < 0 || lane >= 2 * kTensorStages || params.pages.block_table != nullptr) return;
  const SummaryStrides& strides = lane % 2 == 0 ? params.kmax_strides : params.kmin_strides;
  if (strides.head != params.head_dim ||
      strides.block != int64_t{params.num_kv_heads} * params.head_dim) {
    return;
  }
  const int unit = (share.cta + lane / 2 * share.num_ctas) * num_warps + warp;
  const int64_t part = int64_t{kTensorBlocks} * params.head_dim;
  const int64_t begin = unit * kTensorBlocks * strides.block + kv_head * part;
  const int64_t elements = min(part, share.candidates * strides.block - begin);
  if (elements <= 0) return;
  const void* from = lane % 2 == 0 ? params.kmax : params.kmin;
  const char* at = static_cast<const char*>(from) + (share.request * strides.request + begin) * 2;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at),
               "r"(static_cast<uint32_t>(elements * 2)));
#endif
}

// Thread blocks are shared out by requests (score_share.cuh), a request's units of 16 blocks are
// dealt to the warps of all thread blocks that it has for a head; each warp has its own ring of
// units on their way and waits for nobody. Thread blocks of different heads alternate: what they
// read at one time lies side by side. kSums: see SumQueries.
template <typename T, int kChunks, bool kQuest, bool kSums>
__global__ void __launch_bounds__(kMaxTensorWarps * 32, kChunks <= 4 ? 2 : 1)
    TensorScoreKernel(const __grid_constant__ TensorScoreParams params) {
  using Tile = TensorScore<T, kChunks>;
  extern __shared__ __align__(16) char shared[];
  const auto kv_head = static_cast<int32_t>(blockIdx.x % params.num_kv_heads);
  const auto cta = static_cast<int32_t>(blockIdx.x / params.num_kv_heads);
  const auto num_ctas = static_cast<int32_t>(gridDim.x / params.num_kv_heads);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int num_warps = static_cast<int>(blockDim.x / 32);
  HintUnits(params, FindShare(params, cta, num_ctas, kTensorBlocks), kv_head);
  WaitOnDependentGrids();
  LaunchDependentGrids();
  const RequestShare share = FindShare(params, cta, num_ctas, kTensorBlocks);
  const int32_t candidates = share.candidates;
  const int units = (candidates + kTensorBlocks - 1) / kTensorBlocks;
  if (share.request < 0 || share.cta * num_warps >= units) return;
  const QueryRange range = QueriesOf(params, share.request);
  const int queries = range.end - range.begin;
  const int group = params.num_heads / params.num_kv_heads;
  const typename Tile::FarQueries far(params, share.request, kv_head, range.begin);
  const bool near = queries <= params.query_room;
  const int padded = near ? Tile::PaddedQueries(queries) : 0;
  if (near) Tile::LoadQueries(far, group, queries, padded, shared);
  ptx::CommitCopies();

  const int lane = static_cast<int>(threadIdx.x % 32);
  char* const sums = shared + group * padded * Tile::kRowBytes;
  char* const ring =
      sums + (kSums ? kSumRows * Tile::kRowBytes : 0) + warp * kTensorStages * 2 * Tile::kUnitBytes;
  const typename Tile::Summaries summaries(params, share.request, kv_head);
  const int step = share.num_ctas * num_warps;
  const auto load = [&](int unit, char* to) {
    if (unit < units) {
      const int first = unit * kTensorBlocks;
      const auto load_both = [&](auto&& block_of) {
        Tile::LoadUnit(summaries.high, summaries.high_block, block_of, to);
        Tile::LoadUnit(summaries.low, summaries.low_block, block_of, to + Tile::kUnitBytes);
      };
      // Rows beyond the candidates read the last one again; their scores are not stored.
      if (params.pages.block_table == nullptr) {
        load_both([&](int i) { return int64_t{min(first + i, candidates - 1)}; });
      } else {
        const int own = min(first + lane % kTensorBlocks, candidates - 1);
        const int place = max(0, BlockInPages(params.pages, share.request, own));
        load_both([&](int i) { return int64_t{__shfl_sync(0xffffffff, place, i)}; });
      }
    }
    ptx::CommitCopies();
  };
  int unit = share.cta * num_warps + warp;
#pragma unroll 1
  for (int i = 0; i < kTensorStages; ++i) load(unit + i * step, ring + i * 2 * Tile::kUnitBytes);
  ptx::WaitCopies<kTensorStages>();
  __syncthreads();
  if constexpr (kSums) {
    if (near) {
      Tile::SumQueries(shared, padded * Tile::kRowBytes, Tile::kRowBytes, group, queries, sums);
    } else {
      Tile::SumQueries(far.first, far.head, far.row, group, queries, sums);
    }
    __syncthreads();
  }

  float* const scores =
      params.scores + (int64_t{share.request} * params.num_kv_heads + kv_head) * params.max_blocks;
  int stage = 0;
#pragma unroll 1
  for (; unit < units; unit += step) {
    char* const at = ring + stage * 2 * Tile::kUnitBytes;
    const uint32_t high = ptx::SharedAddress(at), low = high + Tile::kUnitBytes;
    ptx::WaitCopies<kTensorStages - 1>();
    __syncwarp();
    float total[2] = {0.0f, 0.0f};
    if (!kSums || !Tile::ScoreSums(ptx::SharedAddress(sums), high, low, total)) {
      const uint32_t rows = ptx::SharedAddress(shared);
      if (near) {
        Tile::template Score<kQuest, true>(params, rows, far, group, queries, high, low, total);
      } else {
        Tile::template Score<kQuest, false>(params, rows, far, group, queries, high, low, total);
      }
    }
    __syncwarp();
    load(unit + kTensorStages * step, at);
    stage = stage + 1 == kTensorStages ? 0 : stage + 1;
    const int block = unit * kTensorBlocks + lane / 4 + lane % 4 * 8;
    const float own = lane % 4 == 0 ? total[0] : total[1];
    if (lane % 4 < 2 && block < candidates) scores[block] = queries > 0 ? own : 0.0f;
  }
  ptx::WaitCopies<0>();
}

}  // namespace nwor
