#pragma once

#include "attention/cuda/sm90/tile_memory.cuh"

namespace nwor {

// One warp of those that bring tokens: fills the stages of steps that the copy engine cannot, the
// in-flight rows and prefix tokens of which some do not exist or are out of some row's window.
template <class Traits>
class TileEdges {
 public:
  __device__ TileEdges(const VerifyArgs& args, const TileMemory<Traits>& memory)
      : args_(args), memory_(memory) {}

  __device__ void Run() {
    RingPlace slot, stage, edge;
    while (true) {
      bulk::Wait(memory_.item_full(slot.at), slot.parity);
      const SharedItem& item = *memory_.item(slot.at);
      if (item.is_end) return;
      const TileSpan<Traits> span(args_.params, item.plan);
#pragma unroll 1
      for (int step = 0; step < span.num_steps; ++step) {
        const int prefix_step = span.PrefixStep(step);
        const bool in_flight = span.IsTail(step);
        if (in_flight || !span.IsPlain(prefix_step)) {
          bulk::Wait(memory_.edge_given(), edge.parity);
          bulk::Arrive(memory_.edge_taken());
          edge.Advance(1);
          Fill(item, span, in_flight,
               in_flight ? span.TailRow(step) : span.PrefixToken(prefix_step), stage.at);
        }
        stage.Advance(args_.stages);
      }
      bulk::Arrive(memory_.item_empty(slot.at));
      slot.Advance(2);
    }
  }

 private:
  static constexpr int kChunks = Traits::kHeadDim / 8;

  // What the item's rows see of the in-flight rows from `first` on.
  __device__ void CopyMask(const PlanItem& plan, int first, int stage) const {
    const StageMask mask(args_, plan);
    const int lane = threadIdx.x % 32;
    if (args_.params.tree_mask == nullptr || !mask.fits() || lane >= mask.count) return;
    ptx::CopyAsync8(memory_.mask(stage) + lane * 8,
                    StageMask::Word(args_.params, plan, mask.first + lane, first));
  }

  // Rows that do not exist, or that no row sees, become zeros in V and stay undefined in K. Of a
  // step of up to 16 tokens no more are used. `first` is the step's first prefix token or in-flight
  // row. The copies have no cache policy: in such a place ptxas (CUDA 13.0) makes an instruction of
  // it that the device refuses.
  __device__ void Fill(const SharedItem& item, const TileSpan<Traits>& span, bool in_flight,
                       int first, int stage) const {
    const VerifyParams& p = args_.params;
    const int tokens = (in_flight ? span.tail_rows : span.end) - first;
    const int blocks = tokens > 16 ? TileSpan<Traits>::kBlocks : 1;
    if (in_flight) CopyMask(item.plan, first, stage);
    for (int block = 0; block < blocks; ++block) {
      const int token = first + block * 16;
      const int valid_begin = (in_flight ? 0 : item.plan.token_begin) - token;
      const int valid_end = tokens - block * 16;
      const TokenRows rows = Locate(item, span, in_flight, token, valid_begin < min(16, valid_end));
#pragma unroll 2
      for (int i = threadIdx.x % 32; i < 16 * kChunks; i += 32) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const bool valid = row >= valid_begin && row < valid_end;
        const uint32_t to = memory_.keys(stage) + ChunkOffset<Traits>(block * 16 + row, chunk);
        if (valid) ptx::CopyAsync(to, rows.keys + row * rows.key_stride + chunk * 16);
        // Without a valid row to name, the read address is that of the queries.
        const char* source = valid ? rows.values + row * rows.value_stride + chunk * 16
                                   : static_cast<const char*>(p.query);
        ptx::CopyAsync(to + Traits::kTileBytes, source, valid);
      }
    }
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
    wgmma::FenceShared();
    bulk::Arrive(memory_.keys_full(stage));
    bulk::Arrive(memory_.values_full(stage));
  }

  struct TokenRows {
    const char* keys;
    const char* values;
    int64_t key_stride, value_stride;
  };
  __device__ TokenRows Locate(const SharedItem& item, const TileSpan<Traits>& span, bool in_flight,
                              int token, bool exists) const {
    const VerifyParams& p = args_.params;
    const TokenMap& map = item.tokens;
    if (in_flight) {
      const int64_t head = item.plan.kv_head;
      const int64_t row = item.plan.query_start + token;
      const int64_t key_row = p.key_strides.row * 2;
      const int64_t value_row = p.value_strides.row * 2;
      return {static_cast<const char*>(p.key) + row * key_row + head * p.key_strides.head * 2,
              static_cast<const char*>(p.value) + row * value_row + head * p.value_strides.head * 2,
              key_row, value_row};
    }
    BlockOffsets at = {};
    if (exists) at = LocateBlock(args_, item, token, ReadId(item, token, span.end));
    return {map.keys + at.key, map.values + at.value, map.key_token, map.value_token};
  }

  const VerifyArgs& args_;
  const TileMemory<Traits>& memory_;
};

}  // namespace nwor
