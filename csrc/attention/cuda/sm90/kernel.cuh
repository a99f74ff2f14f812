#pragma once

#include "attention/cuda/combine.cuh"
#include "attention/cuda/sm90/boundary_producer.cuh"
#include "attention/cuda/sm90/consumer.cuh"
#include "attention/cuda/sm90/float8_loader.cuh"
#include "attention/cuda/sm90/float8_widener.cuh"
#include "attention/cuda/sm90/queries.cuh"
#include "attention/cuda/sm90/tma_producer.cuh"
#include "attention/cuda/sm90/work_producer.cuh"
#include "base/cuda/dependent_launch.cuh"

// The verify-attention kernel for sm_90a (wgmma, TMA), for 16-bit caches and, with heads of 64 or
// 128 channels, float8 ones: persistent, warp-specialised CTAs. ../launch.cuh launches it.
//
//   producer   one warpgroup keeps the stages filled, across work tiles: one warp fetches work
//   tiles,
//              queries and page ids (work_producer.cuh), two issue TMA loads of K and V
//              (tma_producer.cuh), one copies boundary steps (boundary_producer.cuh). Over a float8
//              cache one loads tokens (float8_loader.cuh) and two widen them to halves, K or V each
//              (float8_widener.cuh)
//   consumer   one or two warpgroups compute QK, softmax and PV (consumer.cuh)
//   mask       tree mask, window and end of the prefix, in boundary steps only (mask.cuh)
//   split      the consumer's state is reset at every split of the prefix (../../plan.h)
//   merge      at the end of a split, with the splits before it (consumer.cuh, ../merge.cuh)
//   combine    partial results of split output tiles, after the last work tile (../combine.cuh)
//
// Producers and consumers synchronise only through the mbarriers of SharedStorage: stages of K and
// V, two work tiles, two batches of page ids, Q. Outputs go to `out`, or to a slot of the
// workspace.

namespace nwor::sm90 {

// Computes all splits of the work tile in `slot`, up to its output or partial result. Called by the
// consumer threads.
template <class Traits>
__device__ void RunWorkTile(const VerifyArgs& args, const SharedStorage<Traits>& smem, int slot,
                            PipelineState* stage) {
  static_assert(kSplitAlign % Traits::kStepTokens == 0);
  constexpr int kBlocks = Traits::kStepTokens / 16;
  const WorkTile& plan = smem.work_tile(slot)->plan;
  const int split_steps = plan.split_tokens / Traits::kStepTokens;
  const KvSteps<Traits> steps(args.params, plan);
  Consumer<Traits> attention(args, smem, slot);
  if (SharedStorage<Traits>::kQueryBytes > 0 && Traits::kQueryInRegisters) {
    mbarrier::Arrive(smem.query_empty());
  }
  // One thread arrives for its warp where only wgmma has read.
  const auto release = [&](uint32_t empty) {
    if (threadIdx.x % 32 == 0) mbarrier::Arrive(empty, 32);
  };
  // K of a step has been used. The words of the tree mask are in the stage of K, too.
  const auto release_keys = [&](int of_step, int index) {
    if (Traits::kFloat8 && steps.IsInFlight(of_step)) return;
    release(smem.keys_empty(index));
  };
  int step = 0;
  int used = -1;               // the stage whose PV product is in flight
  bool used_boundary = false;  // threads have accessed its values themselves
  const auto release_values = [&] {
    if (used < 0) return;
    if (used_boundary) {
      mbarrier::Arrive(smem.values_empty(used));
    } else {
      release(smem.values_empty(used));
    }
    used = -1;
  };
  // Called when the PV product of the previous step is done. Returns this step's stage.
  const auto advance = [&](bool boundary) {
    release_values();
    const PipelineState now = *stage;
    used = now.index;
    used_boundary = boundary;
    stage->Advance(args.stages);
    return now;
  };
  const auto first_qk = [&] {
    attention.StartQk(*stage);
    attention.template WaitQk<0>();
    release_keys(step, stage->index);
    if constexpr (Traits::kWarpgroups == 1) attention.ReduceMax();
  };
  if (steps.num_steps > 0) first_qk();
  int in_group = 0;
#pragma unroll 1
  for (int split = plan.split_begin; split < plan.split_end; ++split) {
    const int split_end = split + 1 == plan.split_end ? steps.num_steps : step + split_steps;
    attention.Clear();
#pragma unroll 1
    while (step < split_end) {
      // Nearly all steps are unmasked and followed by another.
      const int unmasked_end = min(split_end, steps.UnmaskedEnd(step));
#pragma unroll 1
      for (; step < unmasked_end; ++step) {
        attention.Softmax();
        const PipelineState now = advance(false);
        attention.StartQk(*stage);
        attention.template StartPv<kBlocks>(now);
        attention.template WaitQk<1>();
        release_keys(step + 1, stage->index);
        // One warpgroup waits for tokens rather than for the tensor core: it releases its values as
        // soon as the row maxima are known. Two warpgroups compute their weights first.
        if constexpr (Traits::kWarpgroups == 1) {
          attention.ReduceMax();
          attention.WaitPv();
          release(smem.values_empty(now.index));
          used = -1;
        }
      }
      if (step == split_end) break;
      StepMask step_mask;
      step_mask.in_flight = steps.IsInFlight(step);
      step_mask.first =
          step_mask.in_flight ? steps.InFlightRow(step) : steps.PrefixToken(steps.PrefixStep(step));
      step_mask.end = step_mask.in_flight ? steps.in_flight_rows : steps.end;
      step_mask.words = smem.mask(stage->index);
      attention.MaskedSoftmax(step_mask);
      const PipelineState now = advance(true);
      if (step_mask.in_flight || steps.PrefixStep(step) < steps.unmasked_begin) {
        attention.SeparateNonFinite(now, step_mask);
      }
      if (Traits::kFloat8 && step_mask.in_flight) mbarrier::Arrive(smem.keys_empty(now.index));
      if (step_mask.end - step_mask.first > 16) {
        attention.template StartPv<kBlocks>(now);
      } else {
        attention.template StartPv<1>(now);
      }
      attention.WaitPv();
      release_values();
      if (++step >= steps.num_steps) continue;
      if (Traits::kFloat8 && step_mask.in_flight && step == steps.in_flight_end) {
        attention.QuantiseOutput();
      }
      first_qk();
    }
    attention.WaitPv();
    release_values();
    if (Traits::kFloat8 && (split + 1 < plan.split_end || steps.num_steps > steps.in_flight_end)) {
      attention.DequantiseOutput();
    }
    attention.FinishSplit(split, in_group);
    in_group = NextInGroup(plan, in_group);
  }
}

// The loop of the consumer threads over work tiles.
template <class Traits>
__device__ void RunConsumer(const VerifyArgs& args, const SharedStorage<Traits>& smem) {
  PipelineState slot, stage, query;
  int num_work_tiles = 0;
  if (args.params.prefix_ready) WaitOnDependentGrids();
  while (true) {
    mbarrier::Wait(smem.work_tile_full(slot.index), slot.phase);
    SharedWorkTile* work_tile = smem.work_tile(slot.index);
    if (work_tile->is_end) {
      if (num_work_tiles > 0) {
        CombineAll<Traits>(args, work_tile, num_work_tiles, smem.combine_buffer());
      }
      return;
    }
    if constexpr (SharedStorage<Traits>::kQueryBytes > 0) {
      if (Traits::kQueryInRegisters && num_work_tiles == 0) {
        CopyFirstQueries(args, smem, work_tile->plan);
      } else {
        mbarrier::Wait(smem.query_full(), query.phase);
        query.Advance(1);
      }
      if constexpr (!Traits::kQueryInRegisters) wgmma::FenceShared();
    }
    RunWorkTile(args, smem, slot.index, &stage);
    ++num_work_tiles;
    if constexpr (!Traits::kQueryInRegisters) mbarrier::Arrive(smem.query_empty());
    mbarrier::Arrive(smem.work_tile_empty(slot.index));
    slot.Advance(2);
  }
}

// Runs a producer warp. `thread` is the index among the producer threads.
template <class Traits>
__device__ void RunProducer(const VerifyArgs& args, const SharedStorage<Traits>& smem, int thread,
                            WorkProducer<Traits>* work_producer) {
  if (thread / 32 == 2) {
    work_producer->Run();
  } else if constexpr (Traits::kFloat8) {
    if (thread < 32) {
      Float8Loader<Traits>(args, smem).Run();
    } else {
      Float8Widener<Traits>(args, smem, thread >= 96).Run();
    }
  } else if (thread < 64) {
    TmaProducer<Traits>(args, smem, thread >= 32).Run();
  } else {
    BoundaryProducer<Traits>(args, smem).Run();
  }
}

// This thread's index among the producer threads; negative for a consumer. Warps w, w + 4, ...
// share a quarter of the SM, and widening takes many of its issue slots. Two CTAs on an SM are
// usually half a grid apart: the warps of the upper half change places, so that each quarter has
// one that widens.
template <class Traits>
__device__ int ProducerThread() {
  const int thread = static_cast<int>(threadIdx.x) - Traits::kThreads;
  const bool moves = Traits::kFloat8 && thread >= 0 && 2 * blockIdx.x >= gridDim.x;
  return moves ? (thread + 32) % kProducerThreads : thread;
}

// Kernel parameters are loaded from memory on first use: this loads them all at once.
__device__ inline void TouchParameters(const VerifyArgs& args) {
  const auto* words = reinterpret_cast<const uint32_t*>(&args);
#pragma unroll
  for (int i = sizeof(args.maps) / 4; i < sizeof(VerifyArgs) / 4; i += 16) {
    asm volatile("" ::"r"(words[i]));
  }
}

template <class Traits>
__global__ void __launch_bounds__(CtaThreads(Traits::kWarpgroups),
                                  CtasPerSm(Traits::kHeadDim, Traits::kWarpgroups))
    VerifyKernel(const __grid_constant__ VerifyArgs args) {
  if constexpr (Traits::kIsBuilt) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const SharedStorage<Traits> smem(shared_bytes, args);
    if (threadIdx.x == 0) smem.InitBarriers(args);
    if (threadIdx.x / 32 == 1) TouchParameters(args);
    // A tensor map that was not encoded must not be read.
    if (threadIdx.x / 2 == 32 && args.params.cache.geometry.num_pages > 0) {
      tma::PrefetchMap(args.maps + threadIdx.x % 2);
    }
    // Otherwise those wait that read what the launch ahead writes, or write what it reads: the
    // consumers, the work producer behind the first page ids, and the boundary producer.
    if (!args.params.prefix_ready) {
      WaitOnDependentGrids();
      LaunchDependentGrids();
    }
    const int producer = ProducerThread<Traits>();
    WorkProducer<Traits> work_producer(args, smem, producer / 32 == 2);
    __syncthreads();
    // Large heads have one consumer warpgroup and one CTA per SM: enough registers as it is.
    constexpr bool kReallocRegisters = Traits::kHeadDim <= 128;
    // Widening gains from more registers, if the consumers can spare them.
    constexpr int kProducerRegisters = Traits::kFloat8 && Traits::kHalves == 1 ? 64 : 56;
    constexpr int kConsumerRegisters = Traits::kWarpgroups == 1 ? 256 - kProducerRegisters : 224;
    if (threadIdx.x < Traits::kThreads) {
      if constexpr (kReallocRegisters) warpgroup::AllocRegisters<kConsumerRegisters>();
      RunConsumer<Traits>(args, smem);
    } else {
      if constexpr (kReallocRegisters) warpgroup::DeallocRegisters<kProducerRegisters>();
      RunProducer<Traits>(args, smem, producer, &work_producer);
    }
  }
}

}  // namespace nwor::sm90
