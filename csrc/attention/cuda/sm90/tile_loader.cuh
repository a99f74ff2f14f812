#pragma once

#include "attention/cuda/sm90/tile_memory.cuh"

namespace nwor {

// Two warps of those that bring tokens: have the copy engine fill stages with the plain steps of
// the prefix, one with K, one with V. They read nothing from global memory themselves, so nothing
// holds them up but full stages, and neither waits for the other's.
template <class Traits>
class TileLoader {
 public:
  __device__ TileLoader(const VerifyArgs& args, const TileMemory<Traits>& memory, bool values)
      : args_(args), memory_(memory), policy_(ptx::EvictFirstPolicy()), values_(values ? 1 : 0) {}

  __device__ void Run() {
    while (true) {
      bulk::Wait(memory_.item_full(slot_.at), slot_.parity);
      const SharedItem& item = *memory_.item(slot_.at);
      if (item.is_end) return;
      const TileSpan<Traits> span(args_.params, item.plan);
#pragma unroll 1
      for (int step = 0; step < span.num_steps; ++step) {
        if (span.IsTail(step)) {
          GiveEdge();
        } else {
          Bring(item, span, span.PrefixStep(step));
        }
        stage_.Advance(args_.stages);
      }
      bulk::Arrive(memory_.item_empty(slot_.at));
      slot_.Advance(2);
    }
  }

 private:
  static constexpr int kBlocks = TileSpan<Traits>::kBlocks;
  static constexpr int kWindowSteps = TileSpan<Traits>::kWindowSteps;

  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ void AwaitTile() const {
    const uint32_t empty =
        values_ ? memory_.values_empty(stage_.at) : memory_.keys_empty(stage_.at);
    bulk::Wait(empty, stage_.parity ^ 1);
  }

  __device__ void Bring(const SharedItem& item, const TileSpan<Traits>& span, int step) {
    const int in_window = step % kWindowSteps;
    if (in_window == 0) bulk::Wait(memory_.ids_full(window_.at), window_.parity);
    // Lane l is for the l-th 16 tokens.
    const int block = lane() % kBlocks;
    const int id =
        ptx::LoadShared32(memory_.ids + (window_.at * 32 + in_window * kBlocks + block) * 4);
    if (in_window == kWindowSteps - 1 || step == span.num_prefix() - 1) {
      bulk::Arrive(memory_.ids_empty(window_.at));
      window_.Advance(2);
    }
    if (!span.IsPlain(step)) return GiveEdge();
    const BlockPlace place = PlaceOf(args_, item, span.PrefixToken(step) + block * 16, id);
    const CUtensorMap* map =
        args_.maps + (item.plan.source == TokenSource::kCompact ? 2 : 0) + values_;
    AwaitTile();
    if (lane() >= kBlocks) return;
    const uint32_t tile = values_ ? memory_.values(stage_.at) : memory_.keys(stage_.at);
    const uint32_t full = values_ ? memory_.values_full(stage_.at) : memory_.keys_full(stage_.at);
    bulk::Expect(full, Traits::kTileBytes / kBlocks);
    bulk::Arrive(full, kTileFillers / kBlocks);
#pragma unroll
    for (int atom = 0; atom < Traits::kAtoms; ++atom) {
      bulk::CopyBox(tile + atom * Traits::kAtomStride + block * 16 * Traits::kAtomBytes, map, full,
                    atom * (Traits::kAtomBytes / 2), place.token, item.plan.kv_head, place.page,
                    policy_);
    }
  }

  // Leaves the next stage to TileEdges, once this loader's tile of it is empty.
  __device__ void GiveEdge() {
    AwaitTile();
    bulk::Wait(memory_.edge_taken(), edge_.parity ^ 1);
    bulk::Arrive(memory_.edge_given());
    edge_.Advance(1);
  }

  const VerifyArgs& args_;
  const TileMemory<Traits>& memory_;
  uint64_t policy_;
  int values_;                              // 1: V, 0: K
  RingPlace slot_, window_, stage_, edge_;  // next
};

}  // namespace nwor
