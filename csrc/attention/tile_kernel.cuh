#pragma once

#include "attention/tile_attention.cuh"
#include "attention/wide_attention.cuh"

// The verify-attention kernel for sm_90a and 16-bit caches: persistent CTAs. One warpgroup takes
// the planned items from a queue and keeps a ring of stages filled (tile_producer.cuh), on from
// item to item; another computes (tile_attention.cuh). They meet at barriers of the ring only.

namespace nwor {

// All leaves of an item, up to its output or partial result. Called by the computing threads.
template <class Traits>
__device__ void RunTileItem(const VerifyArgs& args, const TileMemory<Traits>& memory,
                            const SharedItem& item, RingPlace* stage) {
  const PlanItem& plan = item.plan;
  static_assert(kLeafAlign % Traits::kStepTokens == 0);
  const int leaf_steps = plan.leaf_tokens / Traits::kStepTokens;
  const TileSpan<Traits> span(args.params, plan);
  TileAttention<Traits> attention(args, item, memory.query, memory.folds);
  attention.LoadQueries();

  int step = 0;
#pragma unroll 1
  for (int leaf = plan.leaf_begin; leaf < plan.leaf_end; ++leaf) {
    const bool last = leaf + 1 == plan.leaf_end;
    const int leaf_end = last ? span.num_steps : step + leaf_steps;
    attention.Clear();
#pragma unroll 1
    for (; step < leaf_end; ++step) {
      const bool in_flight = span.IsTail(step);
      const int prefix_step = span.PrefixStep(step);
      attention.Step(memory, *stage, !in_flight && span.IsPlain(prefix_step), in_flight,
                     in_flight ? span.TailRow(step) : span.PrefixToken(prefix_step),
                     in_flight ? span.tail_rows : span.end);
      stage->Advance(args.stages);
    }
    attention.Finish(leaf);
  }
}

// The computing threads' walk over the items.
template <class Traits>
__device__ void RunTiles(const VerifyArgs& args, const TileMemory<Traits>& memory) {
  RingPlace slot, stage;
  bool worked = false;
  while (true) {
    bulk::Wait(memory.item_full(slot.at), slot.parity);
    SharedItem* item = memory.item(slot.at);
    if (item->is_end) {
      if (worked) CombineAll<Traits>(args, item);
      return;
    }
    if constexpr (Traits::kGroups == 1) {
      RunTileItem(args, memory, *item, &stage);
    } else {
      RunWideItem(args, memory, *item, &stage);
    }
    ReportDone<Traits>(args, item->counts);
    worked = true;
    __syncwarp();
    if (threadIdx.x % 32 == 0) bulk::Arrive(memory.item_empty(slot.at));
    slot.Advance(2);
  }
}

// Parameters come from memory when they are first touched: all at once instead of one by one.
__device__ inline void TouchParameters(const VerifyArgs& args) {
  const auto* words = reinterpret_cast<const uint32_t*>(&args);
#pragma unroll
  for (int i = sizeof(args.maps) / 4; i < sizeof(VerifyArgs) / 4; i += 16) {
    asm volatile("" ::"r"(words[i]));
  }
}

template <class Traits>
__global__ void __launch_bounds__(TileThreads(Traits::kGroups),
                                  TileCtasPerSm(Traits::kHeadDim, Traits::kGroups))
    TileKernel(const __grid_constant__ VerifyArgs args) {
  if constexpr (Traits::kAvailable) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const TileMemory<Traits> memory(shared_bytes, args.stages);
    TileProducer<Traits> producer(args, memory);
    if (threadIdx.x == 0) memory.InitBarriers(args.stages);
    if (threadIdx.x / 32 == 1) TouchParameters(args);
    // Rows that no item has filled yet are multiplied all the same.
    for (int i = threadIdx.x * 16; i < TileQueryBytes(Traits::kHeadDim, Traits::kGroups);
         i += TileThreads(Traits::kGroups) * 16) {
      *reinterpret_cast<uint4*>(shared_bytes + args.stages * Traits::kStageBytes + i) = {};
    }
    wgmma::FenceShared();
    __syncthreads();
    // One warpgroup of the largest heads gets along with its share.
    constexpr bool kMoveRegisters = Traits::kHeadDim <= 192;
    if (threadIdx.x < Traits::kThreads) {
      if constexpr (kMoveRegisters) bulk::TakeRegisters<Traits::kGroups == 1 ? 216 : 232>();
      RunTiles<Traits>(args, memory);
    } else {
      if constexpr (kMoveRegisters) bulk::GiveRegisters<40>();
      producer.Run();
    }
  }
}

}  // namespace nwor
