#include "attention/cpu/amx.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace nwor::cpu {
namespace {

// Asks the system for permission, for the process and its threads.
bool AskForPermission() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool ProcessorHasAmx() {
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return false;
  }
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24;
  return (d & kBFloat16) != 0 && (d & kTiles) != 0;
}

}  // namespace

bool Amx::IsAvailable() {
  static const bool available = ProcessorHasAmx() && AskForPermission();
  return available;
}

}  // namespace nwor::cpu

#if defined(__clang__)
#pragma clang attribute push(                                                                   \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
// Some intrinsics leave lanes undefined that are not read.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace nwor::cpu {
namespace {

constexpr int kRows = Amx::kRows;
constexpr int kChannels = Amx::kChannels;
constexpr int kRowBytes = 64;                      // of a row of a tile register
constexpr int kTileWords = kRows * kRowBytes / 2;  // bfloat16 numbers of a tile
constexpr int kStepTokens = 32;                    // tokens of a step of the sums
constexpr int kWeightWords =
    2 * kTileWords;  // weights of 16 rows and 32 tokens, upper and lower bits

typedef float Floats __attribute__((vector_size(64)));

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The 16 rows of a tile: in place if they are evenly spaced, otherwise copied to `copy`.
struct TileRows {
  const std::byte* first;
  int64_t stride;

  TileRows(const std::byte* const* rows, int head_dim, uint16_t* copy)
      : first(rows[0]), stride(rows[1] - rows[0]) {
    bool even = true;
    for (int i = 2; i < kRows; ++i) even = even && rows[i] - rows[i - 1] == stride;
    if (!even) Copy(rows, head_dim, copy);
  }

 private:
  void Copy(const std::byte* const* rows, int head_dim, uint16_t* copy) {
    for (int i = 0; i < kRows; ++i) {
      std::memcpy(copy + i * head_dim, rows[i], static_cast<size_t>(head_dim) * 2);
    }
    first = reinterpret_cast<const std::byte*>(copy);
    stride = head_dim * 2;
  }
};

// Prefetches a line of each of these rows. Few at a time, see tile.h.
void PrefetchLines(const std::byte* const* rows, int count, int byte) {
  if (rows == nullptr) return;
  for (int i = 0; i < count; ++i) __builtin_prefetch(rows[i] + byte, 0, 2);
}

Floats LoadFloats(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// The 16 numbers of a, then those of b, rounded to bfloat16.
__m512i RoundToBFloat16(Floats a, Floats b) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
}

Floats UpperBits(Floats v) {
  return (Floats)_mm512_and_si512((__m512i)v, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
}

// The rest of a weight after UpperBits. It is zero only if the weight is: an infinite value must
// not be multiplied by zero. So small a number changes no sum.
Floats LowerBits(Floats weight, Floats upper) {
  constexpr float kTiny = 0x1p-126f;
  const Floats lower = weight - upper;
  return (upper > 0.0f) & (lower < kTiny) ? kTiny - Floats{} : lower;
}

// Rows of 16 tokens from [token][4 rows].
void TransposeTokens(const float* tokens, Floats (&rows)[kTileRows]) {
  const Floats a = LoadFloats(tokens), b = LoadFloats(tokens + 16);
  const Floats c = LoadFloats(tokens + 32), d = LoadFloats(tokens + 48);
  const Floats ab01 = __builtin_shufflevector(a, b, 0, 4, 8, 12, 16, 20, 24, 28,  //
                                              1, 5, 9, 13, 17, 21, 25, 29);
  const Floats ab23 = __builtin_shufflevector(a, b, 2, 6, 10, 14, 18, 22, 26, 30,  //
                                              3, 7, 11, 15, 19, 23, 27, 31);
  const Floats cd01 = __builtin_shufflevector(c, d, 0, 4, 8, 12, 16, 20, 24, 28,  //
                                              1, 5, 9, 13, 17, 21, 25, 29);
  const Floats cd23 = __builtin_shufflevector(c, d, 2, 6, 10, 14, 18, 22, 26, 30,  //
                                              3, 7, 11, 15, 19, 23, 27, 31);
  rows[0] = __builtin_shufflevector(ab01, cd01, 0, 1, 2, 3, 4, 5, 6, 7,  //
                                    16, 17, 18, 19, 20, 21, 22, 23);
  rows[1] = __builtin_shufflevector(ab01, cd01, 8, 9, 10, 11, 12, 13, 14, 15,  //
                                    24, 25, 26, 27, 28, 29, 30, 31);
  rows[2] = __builtin_shufflevector(ab23, cd23, 0, 1, 2, 3, 4, 5, 6, 7,  //
                                    16, 17, 18, 19, 20, 21, 22, 23);
  rows[3] = __builtin_shufflevector(ab23, cd23, 8, 9, 10, 11, 12, 13, 14, 15,  //
                                    24, 25, 26, 27, 28, 29, 30, 31);
}

// Tile registers: 0 to 3 are sums, 4 and 5 left operands, 6 and 7 right operands.
template <bool kSecondLeft, bool kSecondRight>
void Multiply() {
  _tile_dpbf16ps(0, 4, 6);
  if (kSecondRight) _tile_dpbf16ps(1, 4, 7);
  if (kSecondLeft) _tile_dpbf16ps(2, 5, 6);
  if (kSecondLeft && kSecondRight) _tile_dpbf16ps(3, 5, 7);
}

// Scores of one or two groups of 16 tokens and one or two of 16 rows: [token][16 rows] in `to`, of
// each pair of groups.
template <bool kSecondTokens, bool kSecondRows>
void ScoreGroups(const TileRows& one, const TileRows& two, const uint16_t* queries,
                 const uint16_t* other_queries, int head_dim, const std::byte* const* prefetch,
                 float* to) {
  asm volatile("" ::: "memory");  // tile loads read what was written before
  _tile_zero(0);
  if (kSecondRows) _tile_zero(1);
  if (kSecondTokens) _tile_zero(2);
  if (kSecondTokens && kSecondRows) _tile_zero(3);
  for (int step = 0; step < head_dim / kChannels; ++step) {
    _tile_loadd(4, one.first + step * kRowBytes, one.stride);
    if (kSecondTokens) _tile_loadd(5, two.first + step * kRowBytes, two.stride);
    _tile_loadd(6, queries + step * kTileWords, kRowBytes);
    if (kSecondRows) _tile_loadd(7, other_queries + step * kTileWords, kRowBytes);
    PrefetchLines(prefetch, kSecondTokens ? 2 * kRows : kRows, step * kRowBytes);
    Multiply<kSecondTokens, kSecondRows>();
  }
  constexpr int kFloats = kRows * kRows;
  _tile_stored(0, to, kRowBytes);
  if (kSecondRows) _tile_stored(1, to + kFloats, kRowBytes);
  if (kSecondTokens) _tile_stored(2, to + 2 * kFloats, kRowBytes);
  if (kSecondTokens && kSecondRows) _tile_stored(3, to + 3 * kFloats, kRowBytes);
}

// Sums of one or two groups of 16 rows and 32 channels. `acc` of the first, `other` of the second.
template <bool kSecondRows>
void SumGroups(const uint16_t* weights, const uint16_t* other_weights, const uint16_t* values,
               int num_steps, int64_t value_step, int head_dim, float* acc, float* other) {
  const int64_t stride = head_dim * 4;
  asm volatile("" ::: "memory");  // as in ScoreGroups
  _tile_loadd(0, acc, stride);
  _tile_loadd(1, acc + kRows, stride);
  if (kSecondRows) {
    _tile_loadd(2, other, stride);
    _tile_loadd(3, other + kRows, stride);
  }
  for (int step = 0; step < num_steps; ++step) {
    _tile_loadd(6, values + step * value_step, kRowBytes);
    _tile_loadd(7, values + step * value_step + kTileWords, kRowBytes);
    for (int part = 0; part < 2; ++part) {
      const int at = step * kWeightWords + part * kTileWords;
      _tile_loadd(4, weights + at, kRowBytes);
      if (kSecondRows) _tile_loadd(5, other_weights + at, kRowBytes);
      Multiply<kSecondRows, true>();
    }
  }
  _tile_stored(0, acc, stride);
  _tile_stored(1, acc + kRows, stride);
  if (kSecondRows) {
    _tile_stored(2, other, stride);
    _tile_stored(3, other + kRows, stride);
  }
}

int GroupsOf(int rows) { return (rows + kRows - 1) / kRows; }

}  // namespace

void Amx::PackQueries(const RowChunk& rows, int head_dim, Scratch& scratch) {
  constexpr int kLanes = 16;
  const int head_rows = rows.head_tiles() * kTileRows, groups = GroupsOf(head_rows);
  const int64_t group_words = int64_t{kRows} * head_dim;
  for (int head = 0; head < rows.num_heads; ++head) {
    for (int row = 0; row < groups * kRows; ++row) {
      uint16_t* to =
          scratch.pairs + (int64_t{head} * groups + row / kRows) * group_words + row % kRows * 2;
      const int64_t packed = int64_t{head} * head_rows + row;
      const float* from =
          scratch.queries + packed / kTileRows * kTileRows * head_dim + packed % kTileRows * kLanes;
      for (int d = 0; d < head_dim; ++d) {
        uint32_t bits = 0;
        if (row < head_rows) {
          std::memcpy(&bits, from + d / kLanes * (kLanes * kTileRows) + d % kLanes, 4);
        }
        to[d / kChannels * kTileWords + d % kChannels / 2 * (2 * kRows) + d % 2] =
            static_cast<uint16_t>(bits >> 16);
      }
    }
  }
}

Amx::Amx(const RowChunk& rows, int head_dim, int block_tokens, Scratch& scratch)
    : rows_(rows), head_dim_(head_dim), block_tokens_(block_tokens), scratch_(scratch) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = kRowBytes;
    config.rows[i] = kRows;
  }
  asm volatile("sttilecfg %0" : "=m"(config_before_));
  asm volatile("ldtilecfg %0" ::"m"(config));
}

Amx::~Amx() {
  if (config_before_[0] == 0) {
    asm volatile("tilerelease" ::);
  } else {
    asm volatile("ldtilecfg %0" ::"m"(config_before_));
  }
}

void Amx::Scores(int head, const std::byte* const* keys, int count,
                 const std::byte* const* prefetch) {
  const int head_tiles = rows_.head_tiles(), groups = GroupsOf(head_tiles * kTileRows);
  const int padded = (count + 3) / 4 * 4, token_groups = GroupsOf(padded);
  const int64_t group_words = int64_t{kRows} * head_dim_;
  const uint16_t* queries = scratch_.pairs + int64_t{head} * groups * group_words;
  alignas(64) float found[4 * kRows * kRows];
  for (int tokens = 0; tokens < token_groups; tokens += 2) {
    const bool two_tokens = tokens + 1 < token_groups;
    const TileRows one(keys + tokens * kRows, head_dim_, scratch_.key_rows);
    const TileRows two(keys + (two_tokens ? tokens + 1 : tokens) * kRows, head_dim_,
                       scratch_.key_rows + group_words);
    for (int group = 0; group < groups; group += 2) {
      const bool two_groups = group + 1 < groups;
      const uint16_t* first = queries + group * group_words;
      const auto score = two_tokens ? (two_groups ? ScoreGroups<true, true>  //
                                                  : ScoreGroups<true, false>)
                                    : (two_groups ? ScoreGroups<false, true>  //
                                                  : ScoreGroups<false, false>);
      const bool prefetches = prefetch != nullptr && group == 0;
      score(one, two, first, first + group_words, head_dim_,
            prefetches ? prefetch + tokens * kRows : nullptr, found);
      // From [token][16 rows] to [token][4 rows] of each tile.
      for (int t = 0; t < 2; ++t) {
        const int from_token = (tokens + t) * kRows;
        const int limit = std::min(kRows, padded - from_token);
        for (int g = 0; g < 2; ++g) {
          const int first_tile = (group + g) * (kRows / kTileRows);
          const int tiles = std::min(kRows / kTileRows, head_tiles - first_tile);
          const float* from = found + (2 * t + g) * kRows * kRows;
          for (int tile = 0; tile < tiles; ++tile) {
            float* to = scratch_.scores +
                        (int64_t{first_tile + tile} * block_tokens_ + from_token) * kTileRows;
            for (int i = 0; i < limit; ++i) {
              std::memcpy(to + i * kTileRows, from + i * kRows + tile * kTileRows,
                          kTileRows * sizeof(float));
            }
          }
        }
      }
    }
  }
}

// Interleaves V of two neighbouring tokens by channel: [32 tokens][16 channels] per tile.
void Amx::PairValues(const std::byte* const* values, int count, const std::byte* const* prefetch) {
  // Permutes 64-bit words so that the interleaving within 128 bits comes out in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const int num_steps = (count + kStepTokens - 1) / kStepTokens;
  for (int pair = 0; pair < num_steps * kStepTokens / 2; ++pair) {
    uint16_t* to = scratch_.value_pairs + int64_t{pair / kRows} * kStepTokens * head_dim_ +
                   pair % kRows * (2 * kRows);
    for (int d = 0; d < head_dim_; d += kChannels) {
      __m512i row[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
      for (int i = 0; i < 2; ++i) {
        if (2 * pair + i < count) row[i] = _mm512_loadu_si512(values[2 * pair + i] + d * 2);
        row[i] = _mm512_permutexvar_epi64(order, row[i]);
      }
      PrefetchLines(prefetch == nullptr ? nullptr : prefetch + 2 * pair, 2, d * 2);
      uint16_t* at = to + d / kRows * kTileWords;
      _mm512_storeu_si512(at, _mm512_unpacklo_epi16(row[0], row[1]));
      _mm512_storeu_si512(at + kTileWords, _mm512_unpackhi_epi16(row[0], row[1]));
    }
  }
}

// Packs the weights of 16 rows: 32 tokens of each, upper bits and then the rest.
void Amx::PackWeights(int first_tile, int count, uint16_t* packed) const {
  const int num_steps = (count + kStepTokens - 1) / kStepTokens;
  for (int tile = 0; tile < kRows / kTileRows; ++tile) {
    for (int step = 0; step < num_steps; ++step) {
      Floats rows[2][kTileRows] = {};
      for (int half = 0; half < 2; ++half) {
        const int first = step * kStepTokens + half * kRows;
        if (first_tile + tile >= rows_.head_tiles() || first >= count) continue;
        TransposeTokens(
            scratch_.scores + (int64_t{first_tile + tile} * block_tokens_ + first) * kTileRows,
            rows[half]);
      }
      for (int row = 0; row < kTileRows; ++row) {
        const Floats upper[2] = {UpperBits(rows[0][row]), UpperBits(rows[1][row])};
        uint16_t* to = packed + step * kWeightWords + (tile * kTileRows + row) * kStepTokens;
        _mm512_storeu_si512(to, RoundToBFloat16(upper[0], upper[1]));
        _mm512_storeu_si512(to + kTileWords, RoundToBFloat16(LowerBits(rows[0][row], upper[0]),
                                                             LowerBits(rows[1][row], upper[1])));
      }
    }
  }
}

void Amx::Sums(const std::byte* const* values, int count, const std::byte* const* prefetch,
               float* acc) {
  const int head_tiles = rows_.head_tiles(), head_rows = head_tiles * kTileRows;
  const int num_steps = (count + kStepTokens - 1) / kStepTokens;
  const int padded = (count + 3) / 4 * 4;
  const int64_t value_step = int64_t{kStepTokens} * head_dim_;
  PairValues(values, count, prefetch);
  // Tokens of padding have weight 0.
  for (int tile = 0; tile < head_tiles; ++tile) {
    float* scores = scratch_.scores + int64_t{tile} * block_tokens_ * kTileRows;
    std::fill(scores + padded * kTileRows, scores + num_steps * kStepTokens * kTileRows, 0.0f);
  }
  for (int row = 0; row < head_rows; ++row) {
    const float kept = scratch_.decay[row];
    if (kept == 1.0f) continue;
    float* to = acc + int64_t{row} * head_dim_;
    for (int d = 0; d < head_dim_; d += 16) {
      const Floats scaled = LoadFloats(to + d) * kept;
      std::memcpy(to + d, &scaled, sizeof(scaled));
    }
  }
  for (int first = 0; first < head_rows; first += 2 * kRows) {
    const bool two = first + kRows < head_rows;
    uint16_t* weights = scratch_.weights;
    uint16_t* other_weights = weights + 2 * kWeightWords;
    PackWeights(first / kTileRows, count, weights);
    if (two) PackWeights((first + kRows) / kTileRows, count, other_weights);
    // A tile may have more rows than the head: those are the next head's and must not change.
    float* sums[2] = {acc + int64_t{first} * head_dim_, acc + int64_t{first + kRows} * head_dim_};
    const int last = two ? 1 : 0;
    const int last_rows = std::min(kRows, head_rows - first - last * kRows);
    const size_t last_bytes = static_cast<size_t>(last_rows) * head_dim_ * sizeof(float);
    float* const home = sums[last];
    if (last_rows < kRows) {
      sums[last] = scratch_.sums;
      std::memcpy(sums[last], home, last_bytes);
    }
    for (int d = 0; d < head_dim_; d += kChannels) {
      const uint16_t* right = scratch_.value_pairs + d / kRows * kTileWords;
      const auto sum = two ? SumGroups<true> : SumGroups<false>;
      sum(weights, other_weights, right, num_steps, value_step, head_dim_, sums[0] + d,
          sums[1] + d);
    }
    if (last_rows < kRows) std::memcpy(home, sums[last], last_bytes);
  }
}

}  // namespace nwor::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
