#pragma once

#include "attention/group_attention.cuh"

// The verify-attention kernel for sm_90a: persistent CTAs of one warpgroup take the planned items
// from a queue. Per leaf, a pipeline of cp.async copies (group_stream.cuh) feeds the matrix unit
// (group_attention.cuh); results go out as in verify_kernel.cuh.

namespace nwor {

// All leaves of an item. The pipeline runs on from leaf to leaf: leaves are whole steps. Called by
// the whole CTA.
template <class Traits>
__device__ void RunGroupItem(const VerifyArgs& args, const SharedItem& item, uint32_t stages_at,
                             uint32_t tiles_at, const int32_t* positions) {
  const PlanItem& plan = item.plan;
  static_assert(kLeafAlign % Traits::kStepTokens == 0);
  const int leaf_steps = plan.leaf_tokens / Traits::kStepTokens;
  const int begin = plan.token_begin + plan.leaf_begin * plan.leaf_tokens;
  const int end =
      max(begin, min(plan.token_begin + plan.leaf_end * plan.leaf_tokens, plan.prefix_tokens));
  const int tail_rows = TailRows(args.params, plan, plan.leaf_end - 1);
  const int stages = args.stages;
  GroupStream<Traits> stream(args, item, stages_at, tiles_at, begin, end, tail_rows);

  // 16-bit tokens are read where they were copied to, so one stage is always in use; float8 tokens
  // leave their stage as soon as they are widened.
  const int ahead = Traits::kFloat8 ? stages : stages - 1;
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) stream.Load(step, step);
  GroupAttention<Traits> attention(args, item, positions);
  attention.LoadQueries();

  int stage = 0;
  int step = 0;
  // Returns when the tile of the step is complete for all and the step before is read by none.
  const auto await_tile = [&] {
    ptx::WaitCopies(ahead - 1);
    if constexpr (Traits::kFloat8) {
      __syncthreads();  // the tiles are no longer read
      stream.Widen(step, stage);
      wgmma::FenceShared();
    }
    __syncthreads();
    return stream.Tile(stage);
  };
  // The stage that is free then: of the tokens just widened, or of the step before.
  const auto free_stage = [&] {
    return Traits::kFloat8 ? stage : stage == 0 ? stages - 1 : stage - 1;
  };
  const auto advance = [&] {
    stage = stage + 1 == stages ? 0 : stage + 1;
    ++step;
  };
  const int plain_begin = stream.plain_begin();
#pragma unroll 1
  for (int leaf = plan.leaf_begin; leaf < plan.leaf_end; ++leaf) {
    const bool last = leaf + 1 == plan.leaf_end;
    const int leaf_end = last ? stream.num_steps() : step + leaf_steps;
    const int plain_end = min(stream.plain_end() - ahead, leaf_end);
    attention.Clear();
#pragma unroll 1
    while (step < leaf_end) {
      // Nearly all steps are plain; a loop of their own keeps the rare cases out of their
      // registers.
#pragma unroll 1
      while (step >= plain_begin && step < plain_end && stream.IsAtHand(step + ahead)) {
        const uint32_t tile = await_tile();
        attention.ClearStep(tile, item.prefix_scale,
                            [&] { stream.LoadPlain(step + ahead, free_stage()); });
        advance();
      }
      if (step == leaf_end) break;
      const uint32_t tile = await_tile();
      const bool in_flight = step >= stream.num_prefix();
      if (Traits::kFloat8 && step == stream.num_prefix()) attention.ScaleOutput(item.value_scale);
      attention.EdgeStep(tile, in_flight ? item.tail_scale : item.prefix_scale,
                         in_flight ? stream.TailRow(step) : stream.PrefixToken(step),
                         in_flight ? tail_rows : end, in_flight,
                         [&] { stream.Load(step + ahead, free_stage()); });
      advance();
    }
    // Outputs of a leaf that ends with prefix tokens have not been scaled yet.
    if (Traits::kFloat8 && step <= stream.num_prefix()) attention.ScaleOutput(item.value_scale);
    attention.Finish(leaf);
  }
  ptx::WaitCopies<0>();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 2)
    GroupKernel(const __grid_constant__ VerifyArgs args) {
  if constexpr (Traits::kAvailable) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const uint32_t stages = ptx::SharedAddress(shared_bytes);
    const uint32_t tiles = stages + args.stages * Traits::kStageBytes;
    const int tile_bytes = Traits::kFloat8 ? 2 * Traits::kTileBytes : 0;
    auto* item = reinterpret_cast<SharedItem*>(shared_bytes + args.stages * Traits::kStageBytes +
                                               tile_bytes);
    auto* positions = reinterpret_cast<int32_t*>(reinterpret_cast<uint8_t*>(item) + kItemBytes);
    ServeQueue<Traits>(args, item, positions,
                       [&] { RunGroupItem<Traits>(args, *item, stages, tiles, positions); });
  }
}

}  // namespace nwor
