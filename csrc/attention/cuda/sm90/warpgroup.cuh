#pragma once

#include "attention/cuda/ptx.cuh"

// Warpgroup instructions of sm_90a: wgmma (64 rows times a matrix in shared memory) and setmaxnreg.

namespace nwor::warpgroup {

// Sets the warpgroup's registers per thread: more for consumers, fewer for producers.
template <int kRegisters>
__device__ inline void AllocRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void DeallocRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace nwor::warpgroup

namespace nwor::wgmma {

// The descriptor of a matrix of 16-bit elements in shared memory. The matrix consists of atoms: 8
// rows of kAtomBytes bytes, swizzled as RowSwizzle<kAtomBytes> does. `leading` is the distance
// between atoms side by side (used if the columns of the product run along the rows in memory),
// `stride` the distance between atoms one above the other. Adding bytes / 16 to the lower half
// moves the address.
__device__ inline uint32_t DescriptorLow(uint32_t address, int leading) {
  return static_cast<uint32_t>(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}
template <int kAtomBytes>
__device__ inline uint64_t Descriptor(uint32_t low, int stride) {
  static_assert(kAtomBytes == 128 || kAtomBytes == 64 || kAtomBytes == 32);
  constexpr uint32_t kMode = kAtomBytes == 128 ? 1 : kAtomBytes == 64 ? 2 : 3;
  return static_cast<uint64_t>(kMode << 30 | static_cast<uint32_t>(stride >> 4)) << 32 | low;
}

__device__ inline void Fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void Commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed groups are pending.
template <int kPending = 0>
__device__ inline void Wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's writes to shared memory before reads by wgmma and TMA (async proxy).
__device__ inline void FenceShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Keeps the compiler from moving uses of the registers across a wait.
template <int kCount>
__device__ inline void Pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// d = a * b (+ d if accumulate), 64 x kColumns, `a` in registers. kColumnsInRows: the columns of b
// run along the rows in memory.
template <typename T, int kColumns, bool kColumnsInRows>
struct Multiply;

#define NWOR_ACC8(d, i)                                                                 \
  "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), \
      "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define NWOR_ACC16(d, i) NWOR_ACC8(d, i), NWOR_ACC8(d, (i) + 8)
#define NWOR_ACC32(d, i) NWOR_ACC16(d, i), NWOR_ACC16(d, (i) + 16)
#define NWOR_ACC40(d, i) NWOR_ACC32(d, i), NWOR_ACC8(d, (i) + 32)
#define NWOR_ACC48(d, i) NWOR_ACC32(d, i), NWOR_ACC16(d, (i) + 32)
#define NWOR_ACC64(d, i) NWOR_ACC32(d, i), NWOR_ACC32(d, (i) + 32)
#define NWOR_ACC96(d, i) NWOR_ACC64(d, i), NWOR_ACC32(d, (i) + 64)
#define NWOR_ACC128(d, i) NWOR_ACC64(d, i), NWOR_ACC64(d, (i) + 64)

// Operands of one instruction: accumulators, a[0..3], descriptor, accumulate flag, layout.
#define NWOR_LIST32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NWOR_LIST64                                        \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NWOR_LIST80                                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39"
#define NWOR_LIST96                                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NWOR_LIST128                                                 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NWOR_LIST192                                                 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NWOR_LIST256                                                             \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                       \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"             \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"             \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"             \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"             \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"             \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define NWOR_MULTIPLY(kType, kName, kColumns, kAccs, kRest)                           \
  template <bool kColumnsInRows>                                                      \
  struct Multiply<kType, kColumns, kColumnsInRows> {                                  \
    __device__ static void Run(float (&d)[kAccs], const uint32_t (&a)[4], uint64_t b, \
                               bool accumulate) {                                     \
      asm volatile("{ .reg .pred p; " kRest(kName, kColumns) " }"                     \
                   : NWOR_ACC##kAccs(d, 0)                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),              \
                     "r"(static_cast<int>(accumulate)), "n"(kColumnsInRows ? 1 : 0)); \
    }                                                                                 \
  };
#define NWOR_REST64(kName, kColumns)                                                              \
  "setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n" #kColumns "k16.f32." kName "." kName \
  " {" NWOR_LIST64 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;"
#define NWOR_REST80(kName, kColumns)                                                              \
  "setp.ne.b32 p, %45, 0; wgmma.mma_async.sync.aligned.m64n" #kColumns "k16.f32." kName "." kName \
  " {" NWOR_LIST80 "}, {%40,%41,%42,%43}, %44, p, 1, 1, %46;"
#define NWOR_REST96(kName, kColumns)                                                              \
  "setp.ne.b32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n" #kColumns "k16.f32." kName "." kName \
  " {" NWOR_LIST96 "}, {%48,%49,%50,%51}, %52, p, 1, 1, %54;"
#define NWOR_REST128(kName, kColumns)                                                             \
  "setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n" #kColumns "k16.f32." kName "." kName \
  " {" NWOR_LIST128 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;"
#define NWOR_REST192(kName, kColumns)                                                              \
  "setp.ne.b32 p, %101, 0; wgmma.mma_async.sync.aligned.m64n" #kColumns "k16.f32." kName "." kName \
  " {" NWOR_LIST192 "}, {%96,%97,%98,%99}, %100, p, 1, 1, %102;"
#define NWOR_REST256(kName, kColumns)                                                              \
  "setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n" #kColumns "k16.f32." kName "." kName \
  " {" NWOR_LIST256 "}, {%128,%129,%130,%131}, %132, p, 1, 1, %134;"

NWOR_MULTIPLY(__nv_bfloat16, "bf16", 64, 32, NWOR_REST64)
NWOR_MULTIPLY(__half, "f16", 64, 32, NWOR_REST64)
NWOR_MULTIPLY(__nv_bfloat16, "bf16", 80, 40, NWOR_REST80)
NWOR_MULTIPLY(__half, "f16", 80, 40, NWOR_REST80)
NWOR_MULTIPLY(__nv_bfloat16, "bf16", 96, 48, NWOR_REST96)
NWOR_MULTIPLY(__half, "f16", 96, 48, NWOR_REST96)
NWOR_MULTIPLY(__nv_bfloat16, "bf16", 128, 64, NWOR_REST128)
NWOR_MULTIPLY(__half, "f16", 128, 64, NWOR_REST128)
NWOR_MULTIPLY(__nv_bfloat16, "bf16", 192, 96, NWOR_REST192)
NWOR_MULTIPLY(__half, "f16", 192, 96, NWOR_REST192)
NWOR_MULTIPLY(__nv_bfloat16, "bf16", 256, 128, NWOR_REST256)
NWOR_MULTIPLY(__half, "f16", 256, 128, NWOR_REST256)

// The same with `a` in shared memory: the rows of a and b run along the rows in memory.
template <typename T, int kColumns>
struct MultiplyShared;

#define NWOR_MULTIPLY_SHARED(kType, kName, kColumns, kAccs, kList, kOperands)                \
  template <>                                                                                \
  struct MultiplyShared<kType, kColumns> {                                                   \
    __device__ static void Run(float (&d)[kAccs], uint64_t a, uint64_t b, bool accumulate) { \
      asm volatile("{ .reg .pred p; " kOperands(kName, kColumns, kList) " }"                 \
                   : NWOR_ACC##kAccs(d, 0)                                                   \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                     \
    }                                                                                        \
  };
#define NWOR_SHARED32(kName, kColumns, kList)                                                     \
  "setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n" #kColumns "k16.f32." kName "." kName \
  " {" kList "}, %16, %17, p, 1, 1, 0, 0;"
#define NWOR_SHARED64(kName, kColumns, kList)                                                     \
  "setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n" #kColumns "k16.f32." kName "." kName \
  " {" kList "}, %32, %33, p, 1, 1, 0, 0;"

NWOR_MULTIPLY_SHARED(__nv_bfloat16, "bf16", 32, 16, NWOR_LIST32, NWOR_SHARED32)
NWOR_MULTIPLY_SHARED(__half, "f16", 32, 16, NWOR_LIST32, NWOR_SHARED32)
NWOR_MULTIPLY_SHARED(__nv_bfloat16, "bf16", 64, 32, NWOR_LIST64, NWOR_SHARED64)
NWOR_MULTIPLY_SHARED(__half, "f16", 64, 32, NWOR_LIST64, NWOR_SHARED64)

#undef NWOR_MULTIPLY_SHARED
#undef NWOR_SHARED32
#undef NWOR_SHARED64
#undef NWOR_ACC8
#undef NWOR_ACC16
#undef NWOR_ACC32
#undef NWOR_ACC40
#undef NWOR_ACC48
#undef NWOR_ACC64
#undef NWOR_ACC96
#undef NWOR_ACC128
#undef NWOR_MULTIPLY
#undef NWOR_LIST32
#undef NWOR_LIST64
#undef NWOR_LIST80
#undef NWOR_LIST96
#undef NWOR_LIST128
#undef NWOR_LIST192
#undef NWOR_LIST256
#undef NWOR_REST64
#undef NWOR_REST80
#undef NWOR_REST96
#undef NWOR_REST128
#undef NWOR_REST192
#undef NWOR_REST256

}  // namespace nwor::wgmma
