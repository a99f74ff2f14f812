#pragma once

#include "attention/cuda/sm90/kv_steps.cuh"
#include "attention/cuda/sm90/mask.cuh"
#include "attention/cuda/sm90/shared_storage.cuh"
#include "attention/cuda/sm90/warpgroup.cuh"
#include "base/cuda/dependent_launch.cuh"

namespace nwor::sm90 {

// A producer warp that fills the stages of a kernel for float8 caches with halves, which wgmma
// reads. There are two: one fills K, the other V, and neither waits for the other. Float8 tokens
// of the pages come from raw stages. In-flight rows and the tokens of compact views have 16 bits:
// the warp reads them from global memory itself.
//
// Barriers of a tile of K, those of V alike. Phases of a stage alternate; PipelineState has the
// parity. An "empty" wait takes the opposite parity, which lets the first pass through.
//
//   raw_full    Float8Loader -> widener: 32 arrivals. Whole steps: 4 lanes arrive for 8 each and
//               expect the bytes of one box of 16 tokens, Traits::kRawTileBytes in all. Other
//               steps: every lane arrives once its own cp.async copies are complete.
//   raw_empty   widener -> Float8Loader: 32 arrivals, one by each lane when its values are stored.
//   keys_full   widener -> consumers: 32 arrivals, one by each lane behind its proxy fence.
//   keys_empty  consumers -> widener: as many as consumer threads (release in kernel.cuh). K of
//               in-flight rows is released when the words of the tree mask have been read, too:
//               the next in-flight step overwrites them.
//
// Nothing waits in a circle, even with one stage and one raw stage:
//   * Widening K of step i waits for QK of the step that had the stage, V for its PV. The consumers
//     start QK of step i + 1 before PV of step i. For that they need K of i + 1, which needs QK of
//     earlier steps only, and V of i, which needs PV of earlier steps only.
//   * The loader takes K of i, V of i, K of i + 1, ... A raw tile of V is emptied by widening V of
//     an earlier step, which needs nothing that is loaded later.
//   * All walk the same steps: the loader those of the pages, the others all.
template <class Traits>
class Float8Widener {
 public:
  __device__ Float8Widener(const VerifyArgs& args, const SharedStorage<Traits>& smem, bool values)
      : args_(args), smem_(smem), values_(values ? 1 : 0) {}

  __device__ void Run() {
    PipelineState slot;
    while (true) {
      mbarrier::Wait(smem_.work_tile_full(slot.index), slot.phase);
      const SharedWorkTile& work_tile = *smem_.work_tile(slot.index);
      if (work_tile.is_end) return;
      const KvSteps<Traits> steps(args_.params, work_tile.plan);
      const bool is_raw = work_tile.plan.source != TokenSource::kCompact;
      int step = 0;
#pragma unroll 1
      while (step < steps.num_steps) {
        const bool in_flight = steps.IsInFlight(step);
        if (is_raw && !in_flight) {
          const int end = step < steps.in_flight_begin ? steps.in_flight_begin : steps.num_steps;
#pragma unroll 1
          for (; step < end; ++step) WidenStep();
          continue;
        }
        mbarrier::Wait(empty(), stage_.phase ^ 1);
        if (in_flight) {
          FillInFlight(work_tile.plan, steps, steps.InFlightRow(step));
        } else {
          FillCompact(work_tile.kv, steps, steps.PrefixToken(steps.PrefixStep(step)));
        }
        wgmma::FenceShared();
        mbarrier::Arrive(full());
        stage_.Advance(args_.stages);
        ++step;
      }
      mbarrier::Arrive(smem_.work_tile_empty(slot.index));
      slot.Advance(2);
    }
  }

 private:
  using RawLayout = RowSwizzle<Traits::kHeadDim>;
  static constexpr int kStep = Traits::kStepTokens;
  static_assert(kStep == 64);

  __device__ static int lane() { return threadIdx.x % 32; }

  // Of the next stage.
  __device__ uint32_t tile() const {
    return smem_.keys(stage_.index) + values_ * Traits::kKvTileBytes;
  }
  __device__ uint32_t full() const { return smem_.keys_full(stage_.index) + values_ * 8; }
  __device__ uint32_t empty() const { return smem_.keys_empty(stage_.index) + values_ * 8; }

  __device__ void WidenStep() {
    mbarrier::Wait(smem_.raw_full(raw_.index, values_), raw_.phase);
    Widen(smem_.raw_tile(raw_.index, values_));
    wgmma::FenceShared();  // for wgmma, and for TMA where cp.async has filled the raw tile
    mbarrier::Arrive(full());
    mbarrier::Arrive(smem_.raw_empty(raw_.index, values_));
    stage_.Advance(args_.stages);
    raw_.Advance(args_.raw_stages);
  }

  // Widens a raw tile once the stage is empty. A lane has tokens lane and lane + 32, one chunk of
  // 16 channels at a time. Eight lanes at once access the same chunk of eight tokens in a row,
  // which the swizzles of both tiles spread over all banks.
  __device__ void Widen(uint32_t raw) const {
    using Layout = RowSwizzle<Traits::kAtomBytes>;
    constexpr int kAtomChunks = Traits::kAtomBytes / 16;
    constexpr int kLoads = Traits::kHeadDim / 16 * 2;
    constexpr int kAhead = 4;
    const uint32_t from = raw + RawLayout::Offset(lane(), 0);
    const uint32_t to = tile() + Layout::Offset(lane(), 0);
    const auto load = [&](int i) {
      return ptx::LoadShared128(RawLayout::Advance(from, i / 2) + i % 2 * 32 * Traits::kHeadDim);
    };
    const auto store = [&](int i, int half, uint4 halves) {
      const int chunk = i / 2 * 2 + half;
      const int atom = chunk / kAtomChunks * Traits::kAtomStride;
      ptx::StoreShared128(
          Layout::Advance(to, chunk % kAtomChunks) + atom + i % 2 * 32 * Traits::kAtomBytes,
          halves);
    };
    uint4 ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = load(i);
    mbarrier::Wait(empty(), stage_.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 values = ahead[i % kAhead];
      if (i + kAhead < kLoads) ahead[i % kAhead] = load(i + kAhead);
      store(i, 0, Widen(values.x, values.y));
      store(i, 1, Widen(values.z, values.w));
    }
  }
  // Eight values.
  __device__ static uint4 Widen(uint32_t low, uint32_t high) {
    return {ptx::Float8ToHalf2(low & 0xffffu), ptx::UpperFloat8ToHalf2(low),
            ptx::Float8ToHalf2(high & 0xffffu), ptx::UpperFloat8ToHalf2(high)};
  }

  // Fills a tile with in-flight rows from `first` on, and the stage with their words of the mask.
  __device__ void FillInFlight(const WorkTile& plan, const KvSteps<Traits>& steps,
                               int first) const {
    const VerifyParams& p = args_.params;
    if (p.prefix_ready) WaitOnDependentGrids();
    if (values_ == 0 && p.tree_mask != nullptr) {
      const StageMask mask(args_, plan);
      if (mask.fits() && lane() < mask.count) {
        const uint64_t word = *StageMask::Word(p, plan, mask.first + lane(), first);
        ptx::StoreShared64(smem_.mask(stage_.index) + lane() * 8, ptx::Bits<uint2>(word));
      }
    }
    const RowStrides& strides = values_ ? p.value_strides : p.key_strides;
    const char* rows =
        static_cast<const char*>(values_ ? p.value : p.key) +
        ((int64_t{plan.query_start} + first) * strides.row + int64_t{plan.kv_head} * strides.head) *
            2;
    FillRows(rows, strides.row * 2, steps.in_flight_rows - first);
  }

  // Fills a tile with tokens of a compact view from `first` on.
  __device__ void FillCompact(const PagedKv& kv, const KvSteps<Traits>& steps, int first) const {
    const int64_t stride = values_ ? kv.value_token : kv.key_token;
    FillRows((values_ ? kv.values : kv.keys) + first * stride, stride, steps.end - first);
  }

  // Fills a tile with 16-bit rows, of which `count` exist; the others become zeros. With up to 16
  // rows it fills one block only; the consumers use no more.
  __device__ void FillRows(const char* rows, int64_t stride, int count) const {
    constexpr int kChunks = Traits::kHeadDim / 8;
    constexpr int kAtOnce = kChunks / 2;  // of a lane: 16 rows of a warp
    const int blocks = count > 16 ? kStep / 16 : 1;
    // Addresses are computed here: kept in registers they would slow every WidenStep.
    int thread = lane();
    asm volatile("" : "+r"(thread));
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const auto row = [&](int i) { return block * 16 + (i * 32 + thread) / kChunks; };
      const int chunk = thread % kChunks;
      uint4 eight[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        eight[i] = {};
        if (row(i) >= count) continue;
        eight[i] = *reinterpret_cast<const uint4*>(rows + row(i) * stride + chunk * 16);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint4 halves = {ToHalf2(eight[i].x), ToHalf2(eight[i].y), ToHalf2(eight[i].z),
                              ToHalf2(eight[i].w)};
        ptx::StoreShared128(tile() + ChunkOffset<Traits>(row(i), chunk), halves);
      }
    }
  }
  __device__ static uint32_t ToHalf2(uint32_t pair) {
    return ptx::ToHalf2<typename Traits::Element>(pair);
  }

  const VerifyArgs& args_;
  const SharedStorage<Traits>& smem_;
  int values_;                 // 1: V, 0: K
  PipelineState stage_, raw_;  // next
};

}  // namespace nwor::sm90
