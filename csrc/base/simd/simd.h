#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

// Vector operations of the CPU kernels (attention, linear, specpv) on one native register of
// floats.
//
// A file that needs another instruction set than the compiler's default defines NWOR_SIMD_LEVEL
// before it includes this header and compiles the rest under `#pragma GCC target`. Every level has
// its own namespace, so that several can live in one library:
//
//   kGeneric  4 lanes, compiler vectors only: any machine; a reference for the others
//   kNeon     4 lanes, aarch64
//   kAvx2     8 lanes, x86 with AVX2, FMA and F16C
//   kAvx512  16 lanes, x86 with AVX-512 F, BW, DQ and VL
//
// Nothing here reads beyond the kLanes elements it was asked for, and no operation hides a NaN
// unless its comment says so.

#define NWOR_SIMD_GENERIC 0
#define NWOR_SIMD_NEON 1
#define NWOR_SIMD_AVX2 2
#define NWOR_SIMD_AVX512 3

#ifndef NWOR_SIMD_LEVEL
#if defined(__aarch64__)
#define NWOR_SIMD_LEVEL NWOR_SIMD_NEON
#else
#define NWOR_SIMD_LEVEL NWOR_SIMD_GENERIC
#endif
#endif

#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON
#include <arm_neon.h>
#define NWOR_SIMD_NAMESPACE simd_neon
#elif NWOR_SIMD_LEVEL == NWOR_SIMD_AVX2
#include <immintrin.h>
#define NWOR_SIMD_NAMESPACE simd_avx2
#elif NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
#include <immintrin.h>
#define NWOR_SIMD_NAMESPACE simd_avx512
#else
#define NWOR_SIMD_NAMESPACE simd_generic
#endif

#define NWOR_SIMD_INLINE static inline __attribute__((always_inline))

namespace nwor::NWOR_SIMD_NAMESPACE {

#if NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
constexpr int kLanes = 16;
#elif NWOR_SIMD_LEVEL == NWOR_SIMD_AVX2
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfBits __attribute__((vector_size(2 * kLanes)));
typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));
typedef float Quad __attribute__((vector_size(16)));  // one value for each of a tile's four rows

// Storage types of K/V, distinct so that overloads choose the conversion.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};

template <typename To, typename From>
NWOR_SIMD_INLINE To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

NWOR_SIMD_INLINE Vec Broadcast(float x) { return x - Vec{}; }  // x + 0 would lose the sign of -0

NWOR_SIMD_INLINE Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

NWOR_SIMD_INLINE void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

NWOR_SIMD_INLINE Quad LoadQuad(const float* p) {
  Quad v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

NWOR_SIMD_INLINE void StoreQuad(float* p, Quad v) { std::memcpy(p, &v, sizeof(v)); }

// a * b + c, rounded once where the machine can.
NWOR_SIMD_INLINE Vec Fma(Vec a, Vec b, Vec c) {
#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON
  return vfmaq_f32(c, a, b);
#elif NWOR_SIMD_LEVEL == NWOR_SIMD_AVX2
  return _mm256_fmadd_ps(a, b, c);
#elif NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
  return _mm512_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// v * p[kRow] + c, where p holds one factor for each of a tile's four rows.
template <int kRow>
NWOR_SIMD_INLINE Vec FmaRow(const float* p, Vec v, Vec c) {
#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON
  return vfmaq_laneq_f32(c, v, vld1q_f32(p), kRow);
#else
  return Fma(v, Broadcast(p[kRow]), c);
#endif
}

// The larger of each pair; a NaN in b gives a: scores that are NaN show in the sum, not the
// maximum.
template <typename V>
NWOR_SIMD_INLINE V MaxOf(V a, V b) {
#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON
  return vmaxnmq_f32(a, b);
#else
  return b > a ? b : a;
#endif
}

// The larger of x and a number; NaN stays NaN.
NWOR_SIMD_INLINE Vec AtLeast(Vec x, float least) {
#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON
  return vmaxq_f32(x, Broadcast(least));
#else
  return x < least ? Broadcast(least) : x;
#endif
}

// ---- conversions ----------------------------------------------------------------------------

NWOR_SIMD_INLINE Vec HalfToFloat(HalfBits bits) {
#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON
  return vcvt_f32_f16(BitCast<float16x4_t>(bits));
#elif NWOR_SIMD_LEVEL == NWOR_SIMD_AVX2
  return _mm256_cvtph_ps(BitCast<__m128i>(bits));
#elif NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
  return _mm512_maskz_cvtph_ps(0xffff, BitCast<__m256i>(bits));
#else
  // Subnormals come from the integer, so that a flush-to-zero mode of the caller changes nothing.
  const BitVec wide = __builtin_convertvector(bits, BitVec);
  const BitVec sign = (wide & 0x8000u) << 16;
  const BitVec magnitude = wide & 0x7fffu;
  const BitVec exponent = magnitude & 0x7c00u;
  const BitVec normal = (magnitude << 13) + (112u << 23);
  const BitVec special = normal + (112u << 23);
  const BitVec tiny =
      BitCast<BitVec>(__builtin_convertvector(BitCast<IntVec>(magnitude), Vec) * 0x1p-24f);
  const BitVec finite = exponent == 0u ? tiny : normal;
  return BitCast<Vec>((exponent == 0x7c00u ? special : finite) | sign);
#endif
}

NWOR_SIMD_INLINE Vec LoadAs(const float* p) { return Load(p); }

NWOR_SIMD_INLINE Vec LoadAs(const BFloat16* p) {
  HalfBits bits;
  std::memcpy(&bits, p, sizeof(bits));
#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON
  return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
#else
  return BitCast<Vec>(__builtin_convertvector(bits, BitVec) << 16);
#endif
}

NWOR_SIMD_INLINE Vec LoadAs(const Half* p) {
  HalfBits bits;
  std::memcpy(&bits, p, sizeof(bits));
  return HalfToFloat(bits);
}

// e4m3 has no infinity and one NaN. Shifted into binary16 it means 1/256 of its value, subnormals
// included; the NaN pattern alone has to be raised to a NaN of binary16.
NWOR_SIMD_INLINE Vec LoadAs(const Float8E4M3* p) {
  ByteVec bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  const HalfBits wide = __builtin_convertvector(bytes, HalfBits);
  const HalfBits magnitude = (wide & 0x7f) << 7;
  const HalfBits is_nan = BitCast<HalfBits>(magnitude == 0x3f80);
  return HalfToFloat(((wide & 0x80) << 8) | magnitude | (is_nan & 0x4000)) * 256.0f;
}

NWOR_SIMD_INLINE void StoreAs(float* p, Vec v) { Store(p, v); }

NWOR_SIMD_INLINE void StoreAs(BFloat16* p, Vec v) {
  const BitVec bits = BitCast<BitVec>(v);
  const BitVec rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
  const BitVec quiet = (bits >> 16) | 0x40u;
  const HalfBits out = __builtin_convertvector(BitCast<BitVec>(v != v) ? quiet : rounded, HalfBits);
  std::memcpy(p, &out, sizeof(out));
}

// Round to nearest even; for one value at a time, where no instruction does it.
NWOR_SIMD_INLINE uint16_t FloatToHalf(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u);
  }
  if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
    const float scaled = BitCast<float>(magnitude) * 0x1p24f;
    const float rounded = (scaled + 0x1p23f) - 0x1p23f;
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(rounded));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

NWOR_SIMD_INLINE void StoreAs(Half* p, Vec v) {
#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON
  const float16x4_t out = vcvt_f16_f32(v);
  std::memcpy(p, &out, sizeof(out));
#elif NWOR_SIMD_LEVEL == NWOR_SIMD_AVX2
  const __m128i out = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(p, &out, sizeof(out));
#elif NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
  const __m256i out =
      _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(p, &out, sizeof(out));
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    p[lane].bits = FloatToHalf(v[lane]);
  }
#endif
}

// ---- lanes and rows -------------------------------------------------------------------------

// Reduces a register that repeats the four rows of a tile (lane i belongs to row i % 4).
template <typename Op>
NWOR_SIMD_INLINE Quad ReduceRows(Vec v, Op op) {
  Quad parts[kLanes / 4];
  std::memcpy(parts, &v, sizeof(v));
  Quad result = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) {
    result = op(result, parts[i]);
  }
  return result;
}

// The inverse: row i's value in every lane i % 4.
NWOR_SIMD_INLINE Vec RepeatRows(Quad q) {
  Quad parts[kLanes / 4];
  for (int i = 0; i < kLanes / 4; ++i) {
    parts[i] = q;
  }
  return BitCast<Vec>(parts);
}

// Lane i of the result is the sum of all lanes of the i-th argument.
NWOR_SIMD_INLINE Quad SumLanes(Vec a, Vec b, Vec c, Vec d) {
  const auto add = [](Quad x, Quad y) __attribute__((always_inline)) { return x + y; };
  const Quad qa = ReduceRows(a, add), qb = ReduceRows(b, add);
  const Quad qc = ReduceRows(c, add), qd = ReduceRows(d, add);
#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON
  return vpaddq_f32(vpaddq_f32(qa, qb), vpaddq_f32(qc, qd));
#else
  const Quad ab =
      __builtin_shufflevector(qa, qb, 0, 2, 4, 6) + __builtin_shufflevector(qa, qb, 1, 3, 5, 7);
  const Quad cd =
      __builtin_shufflevector(qc, qd, 0, 2, 4, 6) + __builtin_shufflevector(qc, qd, 1, 3, 5, 7);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
#endif
}

#if NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
// Sums of elements of a and b whose places differ by 2, 1, 8 and 4 of 16: the order of the results
// is what the next one wants.
NWOR_SIMD_INLINE Vec AddHalves(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
NWOR_SIMD_INLINE Vec AddPairs(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
NWOR_SIMD_INLINE Vec AddFarQuads(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30,
                                 31);
}
NWOR_SIMD_INLINE Vec AddNearQuads(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// The same for four times four of them: element 4 t + r of the result is the sum of v[t][r]. Lanes
// of several are added side by side, in a third of the instructions.
NWOR_SIMD_INLINE Vec SumLanesOfFour(const Vec (*v)[4]) {
  Vec quads[4];
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    quads[t] = AddPairs(AddHalves(v[t][0], v[t][1]), AddHalves(v[t][2], v[t][3]));
  }
  return AddNearQuads(AddFarQuads(quads[0], quads[1]), AddFarQuads(quads[2], quads[3]));
}
#endif

// ---- functions ------------------------------------------------------------------------------

// 2^x to one unit in the last place, for x <= 127. Below -126 (where floats lose precision) it goes
// to 0; NaN stays NaN.
NWOR_SIMD_INLINE Vec Exp2(Vec x) {
  const Vec clamped = AtLeast(x, -127.0f);
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const Vec shifted = clamped + 12582912.0f;
  const BitVec exponent = BitCast<BitVec>(shifted) - (BitCast<uint32_t>(12582912.0f) - 127u);
  const Vec r = clamped - (shifted - 12582912.0f);
  // Minimax in relative error on [-1/2, 1/2], the constant term fixed at 1: 2e-9 before rounding.
  Vec p = Broadcast(0.00015353361959569156f);
  p = Fma(p, r, Broadcast(0.0013398873852565885f));
  p = Fma(p, r, Broadcast(0.00961843691766262f));
  p = Fma(p, r, Broadcast(0.055503323674201965f));
  p = Fma(p, r, Broadcast(0.24022647738456726f));
  p = Fma(p, r, Broadcast(0.6931471824645996f));
  p = Fma(p, r, Broadcast(1.0f));
  return p * BitCast<Vec>(exponent << 23);  // exponent 0, from -127, is the float 0
}

// tanh(x), absolute error below 2e-7.
NWOR_SIMD_INLINE Vec Tanh(Vec x) {
  constexpr float kTwoLog2E = 2.8853900817779268f;
  const Vec power = x * kTwoLog2E;
  return 1.0f - 2.0f / (Exp2(power > 64.0f ? Broadcast(64.0f) : power) + 1.0f);
}

}  // namespace nwor::NWOR_SIMD_NAMESPACE
