#pragma once

#include "attention/cuda/item.cuh"
#include "attention/cuda/sm80/token_stream.cuh"
#include "attention/cuda/sm80/warp_attention.cuh"
#include "attention/cuda/sm90/bulk_copy.cuh"

// The verify-attention kernel: persistent CTAs take the planned items from a queue.
//
//   item:  queries to shared memory; per leaf: streams (token_stream.cuh) feed warps
//          (warp_attention.cuh), whose results are merged (fold.cuh); out goes the output, or a
//          partial result.
//   pair:  CTAs that find no further item combine the partial results once all of them are there.

namespace nwor {

// Queries: packed rows, zeros past the last. Beside float8 pages as halves, each 16 channels in the
// order WarpAttention::LoadKeys asks for: pairs 0,2,4,6 then 1,3,5,7.
template <class Traits>
__device__ void LoadQueries(const VerifyArgs& args, const PlanItem& item, uint8_t* query) {
  const VerifyParams& p = args.params;
  using Row = typename Traits::Row;
  using Layout = RowSwizzle<Traits::kRowBytes>;
  constexpr int kSpans = Traits::kHeadDim / 16;
  const uint64_t policy = ptx::EvictFirstPolicy();
  for (int i = threadIdx.x; i < Traits::kRowTile * kSpans; i += Traits::kThreads) {
    const int row = i / kSpans;
    const int span = i % kSpans;
    const bool valid = row < item.num_rows;
    const OutputRow at = LocateRow(args, item, valid ? row : 0);
    const auto* source = reinterpret_cast<const uint4*>(static_cast<const Row*>(p.query) +
                                                        at.row * p.query_strides.row +
                                                        at.head * p.query_strides.head + span * 16);
    uint8_t* low = query + Layout::Offset(row, 2 * span);
    uint8_t* high = query + Layout::Offset(row, 2 * span + 1);
    if constexpr (Traits::kFloat8) {
      const uint4 a = valid ? source[0] : uint4{};
      const uint4 b = valid ? source[1] : uint4{};
      *reinterpret_cast<uint4*>(low) = {ptx::ToHalf2<Row>(a.x), ptx::ToHalf2<Row>(a.z),
                                        ptx::ToHalf2<Row>(b.x), ptx::ToHalf2<Row>(b.z)};
      *reinterpret_cast<uint4*>(high) = {ptx::ToHalf2<Row>(a.y), ptx::ToHalf2<Row>(a.w),
                                         ptx::ToHalf2<Row>(b.y), ptx::ToHalf2<Row>(b.w)};
    } else {
      ptx::CopyAsync(ptx::SharedAddress(low), source, valid, policy);
      ptx::CopyAsync(ptx::SharedAddress(high), source + 1, valid, policy);
    }
  }
}

// One leaf up to the streams' results in the merge buffer. `stream` has begun with it, and the
// first `started` steps are under way; those of the leaf behind are when it returns, up to
// args.early_stages of them. Called by the whole CTA.
template <class Traits>
__device__ void RunLeaf(const VerifyArgs& args, const SharedMemory<Traits>& smem, int leaf,
                        int started, TokenStream<Traits>* tokens) {
  TokenStream<Traits>& stream = *tokens;
  const SharedItem& item = *smem.item;
  const int warp = threadIdx.x / 32;
  const int stream_idx = warp / Traits::kRowSplits;
  const int first_row = warp % Traits::kRowSplits * Traits::kWarpRows;
  // At a barrier in shared memory: racecheck loses track of everything where some of a CTA's warps
  // meet by bar.sync. Every step meets twice: its phases are always 0 and 1.
  const uint32_t barrier = ptx::SharedAddress(smem.barriers + stream_idx);
  const auto meet = [&](uint32_t parity) {
    if constexpr (Traits::kRowSplits == 1) {
      __syncwarp();
    } else {
      bulk::Meet(barrier, parity);
    }
  };

  const int stages = args.stages;
#pragma unroll 1
  for (int step = started; step < stages - 1; ++step) stream.Load(step, step);
  if (leaf == item.plan.leaf_begin) {
    ptx::WaitCopies(stages - 1);  // the queries', made before the stages'
    __syncthreads();
  }
  WarpAttention<Traits> attention(args, item, ptx::SharedAddress(smem.query), smem.rows->position,
                                  first_row);
  int fill = stages - 1;
  int drain = 0;
  int step = 0;
  const auto load_then_wait = [&](auto load) {
    meet(0);  // the stage to fill is no longer read
    load(step + stages - 1, fill);
    fill = fill + 1 == stages ? 0 : fill + 1;
    ptx::WaitCopies(stages - 1);
    meet(1);  // this step's copies are visible to all warps of the stream
    const uint32_t stage = stream.StageAddress(drain);
    drain = drain + 1 == stages ? 0 : drain + 1;
    return stage;
  };
  const int plain_begin = stream.plain_begin();
  const int plain_end = stream.plain_end() - (stages - 1);
#pragma unroll 1
  while (step < stream.num_steps()) {
    // Nearly all steps are plain; a loop of their own keeps the rare cases out of their registers.
#pragma unroll 1
    while (step >= plain_begin && step < plain_end && stream.IsAtHand(step + stages - 1)) {
      const uint32_t stage = load_then_wait([&](int load, int at) { stream.LoadPlain(load, at); });
      attention.template ClearStep<Traits::kFloat8>(stage);
      ++step;
    }
    const uint32_t stage = load_then_wait([&](int load, int at) { stream.Load(load, at); });
    const bool in_flight = step >= stream.num_prefix();
    if (Traits::kFloat8 && !in_flight && item.plan.source != TokenSource::kCompact) {
      attention.template EdgeStep<Traits::kFloat8>(stage, stream.PrefixToken(step),
                                                   stream.prefix_end());
    } else {
      if (Traits::kFloat8 && step == stream.num_prefix()) attention.ScaleOutput(item.value_scale);
      const int first = in_flight ? stream.TailRow(step) : stream.PrefixToken(step);
      attention.RowStep(stage, first, in_flight ? stream.tail_rows() : stream.prefix_end(),
                        in_flight);
    }
    ++step;
  }
  if (Traits::kFloat8 && stream.num_steps() == stream.num_prefix()) {
    attention.ScaleOutput(item.value_scale);
  }
  int first_id = 0;
  const bool starts_next = Traits::kStartsEarly && leaf + 1 < item.plan.leaf_end;
  if (starts_next) first_id = stream.Open(leaf + 1);
  __syncthreads();  // all stages are drained: the merge buffer takes the place of some
  attention.Store(smem.rows->max[stream_idx], smem.rows->sum[stream_idx],
                  smem.merge + stream_idx * Traits::kRowTile * Traits::kMergeStride);
  if (starts_next) {
    stream.Begin(first_id);
#pragma unroll 1
    for (int step = 0; step < args.early_stages; ++step) stream.Load(step, step);
  }
  __syncthreads();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    VerifyKernel(const __grid_constant__ VerifyArgs args) {
  // Where the library is built for sm_90a, tile_kernel.cuh serves that device.
  if constexpr (!Traits::kSuperseded) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const SharedMemory<Traits> smem(shared_bytes, args);
    if (Traits::kRowSplits > 1 && threadIdx.x < kStreams) {
      // ServeQueue has the CTA meet before a stream does.
      bulk::InitBarrier(ptx::SharedAddress(smem.barriers + threadIdx.x), 32 * Traits::kRowSplits);
    }
    const CombineBuffer buffer = {ptx::SharedAddress(smem.stages),
                                  args.stages * kStreams * Traits::kStageBytes};
    ServeQueue<Traits>(args, smem.item, smem.rows->position, buffer, [&] {
      LoadQueries<Traits>(args, smem.item->plan, smem.query);
      ptx::CommitCopies();
      const PlanItem& plan = smem.item->plan;
      TokenStream<Traits> stream(args, *smem.item, ptx::SharedAddress(smem.stages),
                                 threadIdx.x / 32 / Traits::kRowSplits);
      int in_group = 0;
      for (int leaf = plan.leaf_begin; leaf < plan.leaf_end; ++leaf) {
        const bool started = Traits::kStartsEarly && leaf > plan.leaf_begin;
        if (!started) stream.Begin(stream.Open(leaf));
        RunLeaf<Traits>(args, smem, leaf, started ? args.early_stages : 0, &stream);
        FinishLeaf<Traits>(args, smem, leaf, in_group);
        in_group = NextInGroup(plan, in_group);
      }
    });
  }
}

}  // namespace nwor
