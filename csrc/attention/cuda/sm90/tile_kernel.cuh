#pragma once

#include "attention/cuda/sm90/tile_attention.cuh"
#include "attention/cuda/sm90/tile_edges.cuh"
#include "attention/cuda/sm90/tile_loader.cuh"
#include "attention/cuda/sm90/tile_opener.cuh"

// The verify-attention kernel for sm_90a and 16-bit caches: persistent CTAs. The warps of one
// warpgroup keep a ring of stages filled, on from item to item: one takes the planned items from a
// queue (tile_opener.cuh), two drive the copy engine (tile_loader.cuh), one copies what that cannot
// (tile_edges.cuh). Another warpgroup, or two, compute (tile_attention.cuh). They meet at barriers
// of the rings only.

namespace nwor {

// All leaves of the item in `slot`, up to its output or partial result. Called by the computing
// threads.
template <class Traits>
__device__ void RunTileItem(const VerifyArgs& args, const TileMemory<Traits>& memory, int slot,
                            RingPlace* stage) {
  static_assert(kLeafAlign % Traits::kStepTokens == 0);
  constexpr int kBlocks = Traits::kStepTokens / 16;
  const PlanItem& plan = memory.item(slot)->plan;
  const int leaf_steps = plan.leaf_tokens / Traits::kStepTokens;
  const TileSpan<Traits> span(args.params, plan);
  TileAttention<Traits> attention(args, memory, slot);
  if (TileMemory<Traits>::kQueryBytes > 0 && Traits::kQueryInRegisters) {
    bulk::Arrive(memory.query_empty());
  }
  // One thread speaks for its warp where only the matrix unit has read.
  const auto release = [&](uint32_t empty) {
    if (threadIdx.x % 32 == 0) bulk::Arrive(empty, 32);
  };
  int step = 0;
  int used = -1;           // the stage whose values are under way
  bool used_edge = false;  // threads have touched them themselves
  const auto release_values = [&] {
    if (used < 0) return;
    if (used_edge) {
      bulk::Arrive(memory.values_empty(used));
    } else {
      release(memory.values_empty(used));
    }
    used = -1;
  };
  // Called when the values of the step before are in. Returns this step's stage.
  const auto advance = [&](bool edge) {
    release_values();
    const RingPlace now = *stage;
    used = now.at;
    used_edge = edge;
    stage->Advance(args.stages);
    return now;
  };
  const auto first_scores = [&] {
    attention.StartScores(*stage);
    attention.template AwaitScores<0>();
    release(memory.keys_empty(stage->at));
    if constexpr (Traits::kGroups == 1) attention.FindTops();
  };
  if (span.num_steps > 0) first_scores();
  int in_group = 0;
#pragma unroll 1
  for (int leaf = plan.leaf_begin; leaf < plan.leaf_end; ++leaf) {
    const int leaf_end = leaf + 1 == plan.leaf_end ? span.num_steps : step + leaf_steps;
    attention.Clear();
#pragma unroll 1
    while (step < leaf_end) {
      // Nearly all steps are plain, and another one follows.
      const int plain_end = min(leaf_end, span.PlainEnd(step));
#pragma unroll 1
      for (; step < plain_end; ++step) {
        attention.Weigh();
        const RingPlace now = advance(false);
        attention.StartScores(*stage);
        attention.template StartValues<kBlocks>(now);
        attention.template AwaitScores<1>();
        release(memory.keys_empty(stage->at));
        // One warpgroup waits for tokens rather than for the matrix unit: its values make room for
        // the next ones as soon as the largest scores are known. Two have weights to compute first.
        if constexpr (Traits::kGroups == 1) {
          attention.FindTops();
          attention.AwaitValues();
          release(memory.values_empty(now.at));
          used = -1;
        }
      }
      if (step == leaf_end) break;
      StepSight sight;
      sight.in_flight = span.IsTail(step);
      sight.first = sight.in_flight ? span.TailRow(step) : span.PrefixToken(span.PrefixStep(step));
      sight.end = sight.in_flight ? span.tail_rows : span.end;
      sight.mask = memory.mask(stage->at);
      attention.WeighEdge(sight);
      const RingPlace now = advance(true);
      if (sight.in_flight || span.PrefixStep(step) < span.plain_begin) {
        attention.SetNonFiniteApart(now, sight);
      }
      if (sight.end - sight.first > 16) {
        attention.template StartValues<kBlocks>(now);
      } else {
        attention.template StartValues<1>(now);
      }
      attention.AwaitValues();
      release_values();
      if (++step < span.num_steps) first_scores();
    }
    attention.AwaitValues();
    release_values();
    attention.Finish(leaf, in_group);
    in_group = NextInGroup(plan, in_group);
  }
}

// The computing threads' walk over the items.
template <class Traits>
__device__ void RunTiles(const VerifyArgs& args, const TileMemory<Traits>& memory) {
  RingPlace slot, stage, query;
  int num_items = 0;
  while (true) {
    bulk::Wait(memory.item_full(slot.at), slot.parity);
    SharedItem* item = memory.item(slot.at);
    if (item->is_end) {
      if (num_items > 0) CombineAll<Traits>(args, item, num_items, memory.combine_buffer());
      return;
    }
    if constexpr (TileMemory<Traits>::kQueryBytes > 0) {
      bulk::Wait(memory.query_full(), query.parity);
      query.Advance(1);
      if constexpr (!Traits::kQueryInRegisters) wgmma::FenceShared();
    }
    RunTileItem(args, memory, slot.at, &stage);
    ++num_items;
    if constexpr (!Traits::kQueryInRegisters) bulk::Arrive(memory.query_empty());
    bulk::Arrive(memory.item_empty(slot.at));
    slot.Advance(2);
  }
}

// What a warp of those that bring tokens does. `thread` counts their threads.
template <class Traits>
__device__ void RunProducer(const VerifyArgs& args, const TileMemory<Traits>& memory, int thread,
                            TileOpener<Traits>* opener) {
  if (thread < 64) {
    TileLoader<Traits>(args, memory, thread >= 32).Run();
  } else if (thread < 96) {
    opener->Run();
  } else {
    TileEdges<Traits>(args, memory).Run();
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
    const TileMemory<Traits> memory(shared_bytes, args);
    if (threadIdx.x == 0) memory.InitBarriers(args.stages);
    if (threadIdx.x / 32 == 1) TouchParameters(args);
    // A map that describes nothing must not be touched.
    if (threadIdx.x / 2 == 32 && args.params.cache.geometry.num_pages > 0) {
      bulk::PrefetchMap(args.maps + threadIdx.x % 2);
    }
    bulk::AwaitLaunchAhead();
    const int producer = static_cast<int>(threadIdx.x) - Traits::kThreads;
    TileOpener<Traits> opener(args, memory, producer / 32 == 2);
    __syncthreads();
    // One warpgroup of large heads, alone on its SM, gets along with its share.
    constexpr bool kMoveRegisters = Traits::kHeadDim <= 128;
    constexpr int kLess = 56;
    constexpr int kMore = Traits::kGroups == 1 ? 256 - kLess : 224;
    if (threadIdx.x < Traits::kThreads) {
      if constexpr (kMoveRegisters) bulk::TakeRegisters<kMore>();
      RunTiles<Traits>(args, memory);
    } else {
      if constexpr (kMoveRegisters) bulk::GiveRegisters<kLess>();
      RunProducer<Traits>(args, memory, producer, &opener);
    }
  }
}

}  // namespace nwor
