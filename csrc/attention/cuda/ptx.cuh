#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

// PTX instructions of both kernels, sm_80 and up. mbarrier.cuh has those of barriers, sm90/ those
// of sm_90a.

namespace nwor::ptx {

// Whether this compilation is for sm_90a, which has wgmma.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHasWgmma = true;
#else
inline constexpr bool kHasWgmma = false;
#endif

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Cache policy for tokens that are read once: L2 evicts them first.
__device__ inline uint64_t EvictFirstPolicy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes from global to shared memory.
__device__ inline void CopyAsync(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
__device__ inline void CopyAsync(uint32_t target, const void* source, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target),
               "l"(source), "l"(policy)
               : "memory");
}

// 8 bytes.
__device__ inline void CopyAsync8(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(source) : "memory");
}

// 16 bytes; if !valid, writes zeros and does not read the source.
__device__ inline void CopyAsync(uint32_t target, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}
__device__ inline void CopyAsync(uint32_t target, const void* source, bool valid, uint64_t policy) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target),
               "l"(source), "r"(bytes), "l"(policy)
               : "memory");
}

__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ inline void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until at most `pending` of this thread's copy groups are pending. REQUIRES: 0 <= pending
// < 6.
__device__ inline void WaitCopies(int pending) {
  // The usual depths come first; a switch would become an indirect branch.
  if (pending == 2) return WaitCopies<2>();
  if (pending == 5) return WaitCopies<5>();
  if (pending == 3) return WaitCopies<3>();
  if (pending == 4) return WaitCopies<4>();
  if (pending == 1) return WaitCopies<1>();
  WaitCopies<0>();
}

__device__ inline void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ inline void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ inline uint32_t LoadShared32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ inline uint2 LoadShared64(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

__device__ inline uint4 LoadShared128(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ inline void StoreShared128(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ inline void StoreShared64(uint32_t address, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
__device__ inline void StoreShared32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// c += a * b over 16 rows, 8 columns and 16 inner elements.
template <typename T>
__device__ inline void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void Mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void Mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename To>
__device__ inline To Bits(const auto& from) {
  static_assert(sizeof(To) == sizeof(from));
  return *reinterpret_cast<const To*>(&from);
}

template <typename T>
__device__ inline uint32_t Pack(float low, float high);
template <>
__device__ inline uint32_t Pack<__nv_bfloat16>(float low, float high) {
  return Bits<uint32_t>(__floats2bfloat162_rn(low, high));
}
template <>
__device__ inline uint32_t Pack<__half>(float low, float high) {
  return Bits<uint32_t>(__floats2half2_rn(low, high));
}

template <typename T>
__device__ inline float2 ToFloat2(uint32_t pair);
template <>
__device__ inline float2 ToFloat2<__nv_bfloat16>(uint32_t pair) {
  return __bfloat1622float2(Bits<__nv_bfloat162>(pair));
}
template <>
__device__ inline float2 ToFloat2<__half>(uint32_t pair) {
  return __half22float2(Bits<__half2>(pair));
}

// Keeps those of two elements of type T that are infinite or NaN (all exponent bits set) and
// replaces the others by zero.
template <typename T>
__device__ inline uint32_t NonFinite(uint32_t pair) {
  constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  return ((pair & kOnes) == kOnes ? pair & 0xffffu : 0u) |
         ((pair >> 16 & kOnes) == kOnes ? pair & 0xffff0000u : 0u);
}
template <typename T>
__device__ inline uint4 NonFinite(uint4 eight) {
  return {NonFinite<T>(eight.x), NonFinite<T>(eight.y), NonFinite<T>(eight.z),
          NonFinite<T>(eight.w)};
}

// Two elements of type T as two halves.
template <typename T>
__device__ inline uint32_t ToHalf2(uint32_t pair);
template <>
__device__ inline uint32_t ToHalf2<__half>(uint32_t pair) {
  return pair;
}
template <>
__device__ inline uint32_t ToHalf2<__nv_bfloat16>(uint32_t pair) {
  return Bits<uint32_t>(__float22half2_rn(__bfloat1622float2(Bits<__nv_bfloat162>(pair))));
}

// Two float8 e4m3 values, in the low 16 bits, as two halves: exact, NaN kept.
__device__ inline uint32_t Float8ToHalf2(uint32_t pair) {
  return Bits<uint32_t>(
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3));
}

// The same for the upper two of four bytes. The conversion can read half a register directly, but
// the compiler does not use that after a shift.
__device__ inline uint32_t UpperFloat8ToHalf2(uint32_t quad) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }"
      : "=r"(halves)
      : "r"(quad));
  return halves;
#else
  return Float8ToHalf2(quad >> 16);
#endif
}

// Synchronises `count` threads, whole warps, at barrier `id`.
__device__ inline void NamedBarrier(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// The same; returns to all threads whether `value` is true for any of them.
__device__ inline bool NamedBarrierOr(int id, int count, bool value) {
  uint32_t any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; "
      "selp.u32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(value)), "r"(id), "r"(count)
      : "memory");
  return any != 0;
}

// Atomic add with release semantics: a thread that sees it with LoadAcquire also sees what this
// thread did or saw before.
__device__ inline void AddRelease(uint32_t* pointer, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
__device__ inline uint32_t LoadAcquire(const uint32_t* pointer) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

}  // namespace nwor::ptx
