#pragma once

#include "attention/group_attention.cuh"

// The verify-attention kernel for sm_90a: persistent CTAs of one warpgroup take the planned items
// from a queue. Per leaf, a pipeline of cp.async copies (group_stream.cuh) feeds the matrix unit
// (group_attention.cuh); results go out as in verify_kernel.cuh.

namespace nwor {

// One leaf up to the result in registers. Called by the whole CTA.
template <class Traits>
__device__ void RunGroupLeaf(const VerifyArgs& args, const SharedItem& item, uint32_t stages_at,
                             uint32_t tiles_at, GroupAttention<Traits>& attention, int leaf) {
  const int begin = item.plan.token_begin + leaf * item.plan.leaf_tokens;
  const int end = max(begin, min(begin + item.plan.leaf_tokens, item.plan.prefix_tokens));
  const int tail_rows = TailRows(args.params, item.plan, leaf);
  GroupStream<Traits> stream(args, item, stages_at, tiles_at, begin, end, tail_rows);

  // 16-bit tokens are read where they were copied to, so one stage is always in use; float8 tokens
  // leave their stage as soon as they are widened.
  const int stages = args.stages;
  const int ahead = Traits::kFloat8 ? stages : stages - 1;
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) stream.Load(step, step);
  if (leaf == item.plan.leaf_begin) attention.LoadQueries();
  attention.Clear();

  int stage = 0;
  int step = 0;
  const auto next_tile = [&](auto load) {
    ptx::WaitCopies(ahead - 1);
    if constexpr (Traits::kFloat8) {
      __syncthreads();  // the tiles are no longer read
      stream.Widen(step, stage);
      load(step + ahead, stage);
    }
    wgmma::FenceShared();
    __syncthreads();  // this step's tokens are there for all, the step before is read by none
    if constexpr (!Traits::kFloat8) load(step + ahead, stage == 0 ? stages - 1 : stage - 1);
    const uint32_t tile = stream.Tile(stage);
    stage = stage + 1 == stages ? 0 : stage + 1;
    return tile;
  };
  const int plain_begin = stream.plain_begin();
  const int plain_end = stream.plain_end() - ahead;
#pragma unroll 1
  while (step < stream.num_steps()) {
    // Nearly all steps are plain; a loop of their own keeps the rare cases out of their registers.
#pragma unroll 1
    while (step >= plain_begin && step < plain_end && stream.IsAtHand(step + ahead)) {
      const uint32_t tile = next_tile([&](int load, int at) { stream.LoadPlain(load, at); });
      attention.ClearStep(tile, item.prefix_scale);
      ++step;
    }
    const uint32_t tile = next_tile([&](int load, int at) { stream.Load(load, at); });
    const bool in_flight = step >= stream.num_prefix();
    if (Traits::kFloat8 && step == stream.num_prefix()) attention.ScaleOutput(item.value_scale);
    attention.EdgeStep(tile, in_flight ? item.tail_scale : item.prefix_scale,
                       in_flight ? stream.TailRow(step) : stream.PrefixToken(step),
                       in_flight ? tail_rows : end, in_flight);
    ++step;
  }
  if (Traits::kFloat8 && stream.num_steps() == stream.num_prefix()) {
    attention.ScaleOutput(item.value_scale);
  }
  __syncthreads();  // the stages are free for the next leaf
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
    ServeQueue<Traits>(args, item, [&](int index) {
      OpenItem<Traits>(args, index, item, positions);
      __syncthreads();
      GroupAttention<Traits> attention(args, *item, positions);
#pragma unroll 1
      for (int leaf = item->plan.leaf_begin; leaf < item->plan.leaf_end; ++leaf) {
        RunGroupLeaf<Traits>(args, *item, stages, tiles, attention, leaf);
        attention.Finish(leaf);
      }
    });
  }
}

}  // namespace nwor
