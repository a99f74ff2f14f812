#pragma once

#include "attention/tile_attention.cuh"

namespace nwor {

// TileAttention for two warpgroups that share the stages, with a step in parts: the matrix unit
// works on the values of the step before and on the scores of the step behind while a step's
// weights are computed. Q stays in registers: two warpgroups that both read it beside K would ask
// too much of shared memory. The arithmetic is TileAttention's, bit for bit.
//
// StartScores, AwaitScores<0> for the first step; for every step Weigh, StartScores of the next,
// StartValues, AwaitScores<1>; AwaitValues before Finish.
template <class Traits>
class WideAttention : public TileAttention<Traits> {
  using Base = TileAttention<Traits>;
  using Base::args_, Base::item_, Base::out_, Base::scores_, Base::sum_;
  using Base::kAtomSteps, Base::kInnerSteps, Base::kStep;
  using typename Base::Product;

 public:
  __device__ WideAttention(const VerifyArgs& args, const SharedItem& item,
                           const TileMemory<Traits>& memory)
      : Base(args, item, memory.query, memory.folds),
        memory_(memory),
        score_scale_(item.cap_outer == 0.0f ? item.prefix_scale : 1.0f) {}

  // This thread's part of Q: A fragments of the matrix instruction; zeros past the last row.
  __device__ void LoadQueries() {
    const VerifyParams& p = args_.params;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool valid = Base::Row(half) < item_.plan.num_rows;
      const OutputRow at = LocateRow(args_, item_.plan, valid ? Base::Row(half) : 0);
      const auto* source = static_cast<const typename Traits::Row*>(p.query) +
                           at.row * p.query_strides.row + at.head * p.query_strides.head +
                           threadIdx.x % 4 * 2;
#pragma unroll
      for (int k = 0; k < kInnerSteps; ++k) {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          uint32_t two = 0;
          if (valid) two = *reinterpret_cast<const uint32_t*>(source + 16 * k + 8 * high);
          query_[k][2 * high + half] = two;
        }
      }
    }
  }

  __device__ void StartScores(const RingPlace& stage) {
    bulk::Wait(memory_.keys_full(stage.at), stage.parity);
    const uint32_t keys = wgmma::DescriptorLow(memory_.keys(stage.at), 16);
    wgmma::Fence();
#pragma unroll
    for (int k = 0; k < kInnerSteps; ++k) {
      const int offset = k / kAtomSteps * Traits::kAtomStride + k % kAtomSteps * 32;
      wgmma::Multiply<Product, kStep, false>::Run(scores_, query_[k],
                                                  Base::Descriptor(keys + offset / 16), k > 0);
    }
    wgmma::Commit();
  }
  template <int kPending>
  __device__ void AwaitScores() {
    wgmma::Wait<kPending>();
    wgmma::Pin(scores_);
  }

  // Turns scores into weights. The values of the step before are in when it returns.
  __device__ void Weigh() {
    if (item_.cap_outer != 0.0f) this->SoftCap(item_.prefix_scale);
    float factor[2];
    const bool rescale = this->WeighScores(score_scale_, factor);
    // Sums of weights are not negative: the branch keeps the assembler from moving the wait to
    // before the weights.
    if (sum_[0] + sum_[1] < 0.0f) __nanosleep(1);
    AwaitValues();
    if (rescale) this->Rescale(factor);
    this->PackWeights();
  }
  // The same where not every row sees all of the step's tokens, see TileAttention::Step.
  __device__ void WeighEdge(bool in_flight, int first, int end) {
    this->SoftCap(item_.prefix_scale);
    this->Mask(in_flight, first, end);
    float factor[2];
    const bool rescale = this->WeighScores(score_scale_, factor);
    AwaitValues();
    if (rescale) this->Rescale(factor);
    this->PackWeights();
  }

  // Between WeighEdge and StartValues of a step of in-flight rows.
  __device__ void SetNonFiniteApart(const RingPlace& stage, int first, int end) {
    bulk::Wait(memory_.values_full(stage.at), stage.parity);
    Base::SetNonFiniteApart(memory_.values(stage.at), first, end);
    wgmma::Pin(out_);
  }

  template <int kBlocks>
  __device__ void StartValues(const RingPlace& stage) {
    bulk::Wait(memory_.values_full(stage.at), stage.parity);
    this->template IssueValues<kBlocks>(memory_.values(stage.at));
  }
  __device__ void AwaitValues() {
    wgmma::Wait<0>();
    wgmma::Pin(out_);
  }

 private:
  const TileMemory<Traits>& memory_;
  float score_scale_;  // of a score as WeighScores finds it
  uint32_t query_[kInnerSteps][4];
};

// All leaves of an item, up to its output or partial result. Called by the computing threads.
template <class Traits>
__device__ void RunWideItem(const VerifyArgs& args, const TileMemory<Traits>& memory,
                            const SharedItem& item, RingPlace* stage) {
  static_assert(kLeafAlign % Traits::kStepTokens == 0);
  constexpr int kBlocks = Traits::kStepTokens / 16;
  const PlanItem& plan = item.plan;
  const int leaf_steps = plan.leaf_tokens / Traits::kStepTokens;
  const TileSpan<Traits> span(args.params, plan);
  WideAttention<Traits> attention(args, item, memory);
  attention.LoadQueries();
  int step = 0;
  int used = -1;  // the stage whose values are under way
  const auto release = [&] {
    if (used >= 0 && threadIdx.x % 32 == 0) bulk::Arrive(memory.stage_empty(used));
  };
  // Called when the values of the step before are in: their stage is free. Returns this step's.
  const auto advance = [&] {
    release();
    const RingPlace now = *stage;
    used = now.at;
    stage->Advance(args.stages);
    return now;
  };
  if (span.num_steps > 0) {
    attention.StartScores(*stage);
    attention.template AwaitScores<0>();
  }
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
        const RingPlace now = advance();
        attention.StartScores(*stage);
        attention.template StartValues<kBlocks>(now);
        attention.template AwaitScores<1>();
      }
      if (step == leaf_end) break;
      const bool in_flight = span.IsTail(step);
      const int first = in_flight ? span.TailRow(step) : span.PrefixToken(span.PrefixStep(step));
      const int end = in_flight ? span.tail_rows : span.end;
      attention.WeighEdge(in_flight, first, end);
      const RingPlace now = advance();
      if (in_flight) attention.SetNonFiniteApart(now, first, end);
      if (end - first > 16) {
        attention.template StartValues<kBlocks>(now);
      } else {
        attention.template StartValues<1>(now);
      }
      attention.AwaitValues();
      if (++step < span.num_steps) {
        attention.StartScores(*stage);
        attention.template AwaitScores<0>();
      }
    }
    attention.AwaitValues();
    attention.Finish(leaf);
  }
  release();
}

}  // namespace nwor
