#pragma once

#include "attention/cuda/item.cuh"
#include "attention/cuda/sm90/bulk_copy.cuh"
#include "attention/cuda/sm90/warpgroup.cuh"

namespace nwor {

// What one tile kernel is compiled for: see VerifyTraits.
//   kGroups  warpgroups that compute
//   kHalves  of a warp's 16 rows that are used: see TileHalves
template <typename T, int kHeadDim_, int kGroups_, int kHalves_>
struct TileTraits {
  using Row = T;
  using Product = T;

  static constexpr bool kAvailable = wgmma::kAvailable;
  static constexpr bool kFloat8 = false;
  static constexpr int kHalves = kHalves_;
  static constexpr bool kTwoRows = kHalves == 2;  // of a thread's outputs: see CombinedRows
  static constexpr bool kSplitQuads = kHalves == 1;
  static constexpr bool kQueryInRegisters = TileQueryInRegisters(kHeadDim_);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRowTile = kGroups * kTileRows / 2 * kHalves;  // at most
  static constexpr int kQueryRows = TileQueryRows(kHeadDim, kRowTile);
  static constexpr int kThreads = TileConsumers(kGroups);  // of those that compute
  static constexpr int kStepTokens = TileStepTokens(kHeadDim);
  static constexpr int kTileBytes = TileBytes(kHeadDim);  // of K or V of a step
  static constexpr int kStageBytes = 2 * kTileBytes;
  // The widest atom that divides a row.
  static constexpr int kAtomBytes = kHeadDim % 64 == 0 ? 128 : kHeadDim % 32 == 0 ? 64 : 32;
  static constexpr int kAtoms = kHeadDim * 2 / kAtomBytes;
  static constexpr int kAtomStride = kStepTokens * kAtomBytes;  // between atoms side by side

  __device__ static void Meet() { ptx::NamedBarrier(1, kThreads); }
};

// A place in a ring of `size`, and which time round it is.
struct RingPlace {
  int at = 0;
  uint32_t parity = 0;

  __device__ void Advance(int size) {
    if (++at == size) {
      at = 0;
      parity ^= 1;
    }
  }
};

// The steps of an item: tokens of the prefix and, where the last leaf begins, the in-flight rows:
// they are there before the pages are known.
template <class Traits>
struct TileSpan {
  static constexpr int kStep = Traits::kStepTokens;
  static constexpr int kBlocks = kStep / 16;         // of 16 tokens: they lie within a page
  static constexpr int kWindowSteps = 32 / kBlocks;  // whose pages are looked up at once
  int begin, end;                                    // prefix tokens
  int tail_rows;
  int num_steps;
  int tail_begin, tail_end;    // steps
  int plain_begin, plain_end;  // prefix steps of tokens that all exist and that every row sees

  __device__ TileSpan(const VerifyParams& p, const PlanItem& plan) {
    const int origin = LeafOrigin(plan.token_begin);
    begin = origin + plan.leaf_begin * plan.leaf_tokens;
    end = max(begin, min(origin + plan.leaf_end * plan.leaf_tokens, plan.prefix_tokens));
    tail_rows = TailRows(p, plan, plan.leaf_end - 1);
    tail_begin = (plan.leaf_end - 1 - plan.leaf_begin) * (plan.leaf_tokens / kStep);
    tail_end = tail_begin + (tail_rows + kStep - 1) / kStep;
    num_steps = (end - begin + kStep - 1) / kStep + tail_end - tail_begin;
    plain_end = (end - begin) / kStep;
    plain_begin = 0;
    if (p.window > 0) {
      // Rows stand at prefix_tokens and beyond, at most request_rows - 1 further.
      const int seen_by_all = plan.prefix_tokens + plan.request_rows - p.window;
      plain_begin = (max(seen_by_all - begin, 0) + kStep - 1) / kStep;
    }
  }
  __device__ bool IsTail(int step) const { return step >= tail_begin && step < tail_end; }
  __device__ int TailRow(int step) const { return (step - tail_begin) * kStep; }
  // Among the steps of the prefix.
  __device__ int PrefixStep(int step) const {
    return step < tail_end ? step : step - (tail_end - tail_begin);
  }
  // The end of the plain steps that begin with `step` and have one behind them, if there are any.
  __device__ int PlainEnd(int step) const {
    const int prefix_step = PrefixStep(step);
    if (IsTail(step) || prefix_step < plain_begin) return step;
    const int end = min(num_steps - 1, step + plain_end - prefix_step);
    return step < tail_begin ? min(end, tail_begin) : end;
  }
  __device__ int num_prefix() const { return num_steps - (tail_end - tail_begin); }
  __device__ int PrefixToken(int prefix_step) const { return begin + prefix_step * kStep; }
  __device__ bool IsPlain(int prefix_step) const {
    return prefix_step >= plain_begin && prefix_step < plain_end;
  }
};

// The dynamic shared memory of a CTA, as addresses.
template <class Traits>
struct TileMemory {
  uint32_t stages, query, ids, barriers, stage_rests;
  float4* folds;      // of the computing threads: see TileFolds
  SharedItem* items;  // two: one is opened while the other is worked on

  static constexpr int kQueryBytes = TileQueryBytes(Traits::kHeadDim, Traits::kRowTile);

  __device__ TileMemory(uint8_t* base, const VerifyArgs& args) {
    uint8_t* query_at = base + args.stages * Traits::kStageBytes;
    folds = reinterpret_cast<float4*>(query_at + kQueryBytes);
    uint8_t* rest =
        reinterpret_cast<uint8_t*>(folds) +
        TileFolds(Traits::kHeadDim, args.row_tile) * TileFoldBytes(Traits::kHeadDim, args.row_tile);
    stages = ptx::SharedAddress(base);
    query = ptx::SharedAddress(query_at);
    items = reinterpret_cast<SharedItem*>(rest);
    ids = ptx::SharedAddress(rest + 2 * kTileItemBytes);
    barriers = ids + kTileIdBytes;
    stage_rests = barriers + 6 * 16;
  }

  // What the combine may use: stages, queries and folds.
  __device__ CombineBuffer combine_buffer() const {
    return {stages, static_cast<int>(ptx::SharedAddress(items) - stages)};
  }
  __device__ SharedItem* item(int slot) const {
    return reinterpret_cast<SharedItem*>(reinterpret_cast<uint8_t*>(items) + slot * kTileItemBytes);
  }
  __device__ uint32_t keys(int stage) const { return stages + stage * Traits::kStageBytes; }
  __device__ uint32_t values(int stage) const { return keys(stage) + Traits::kTileBytes; }
  // Full: tokens, an item, queries are there. Empty: they have been used.
  __device__ uint32_t keys_full(int stage) const { return stage_rests + stage * kTileStageRest; }
  __device__ uint32_t values_full(int stage) const { return keys_full(stage) + 8; }
  __device__ uint32_t keys_empty(int stage) const { return keys_full(stage) + 16; }
  __device__ uint32_t values_empty(int stage) const { return keys_full(stage) + 24; }
  __device__ uint32_t item_full(int slot) const { return barriers + slot * 16; }
  __device__ uint32_t item_empty(int slot) const { return item_full(slot) + 8; }
  __device__ uint32_t query_full() const { return item_full(2); }
  __device__ uint32_t query_empty() const { return item_full(2) + 8; }
  __device__ uint32_t ids_full(int window) const { return item_full(3) + window * 16; }
  __device__ uint32_t ids_empty(int window) const { return ids_full(window) + 8; }
  // The words of the tree mask for the stage's in-flight rows: see StageMask.
  __device__ uint32_t mask(int stage) const { return keys_full(stage) + 32; }
  // Edges: a step for threads to fill is next; they know it.
  __device__ uint32_t edge_given() const { return item_full(5); }
  __device__ uint32_t edge_taken() const { return item_full(5) + 8; }

  // Every thread whose ordinary accesses a barrier orders arrives there; one speaks for its warp
  // where only the copy engine and the matrix unit are involved.
  __device__ void InitBarriers(int num_stages) const {
    for (int i = 0; i < num_stages; ++i) {
      bulk::InitBarrier(keys_full(i), kTileFillers);
      bulk::InitBarrier(values_full(i), kTileFillers);
      bulk::InitBarrier(keys_empty(i), Traits::kThreads);
      bulk::InitBarrier(values_empty(i), Traits::kThreads);
    }
    for (int i = 0; i < 2; ++i) {
      bulk::InitBarrier(item_full(i), 32);
      bulk::InitBarrier(item_empty(i), Traits::kThreads + kTileFillers + 2 * 32);
      bulk::InitBarrier(ids_full(i), 32);
      bulk::InitBarrier(ids_empty(i), 2 * 32);
    }
    bulk::InitBarrier(edge_given(), 2 * 32);
    bulk::InitBarrier(edge_taken(), kTileFillers);
    bulk::InitBarrier(query_full(), 32);
    bulk::InitBarrier(query_empty(), Traits::kThreads);
    bulk::FenceBarriers();
  }
};

// The words of the tree mask for a step of in-flight rows: one for each of the item's query rows
// [first, first + count). They come with the step's tokens, which are under way for microseconds,
// unless they are too many for a stage.
struct StageMask {
  int first, count;

  __device__ StageMask(const VerifyArgs& args, const PlanItem& item)
      : first(args.group.Quotient(item.row_begin)),
        count(args.group.Quotient(item.row_begin + item.num_rows - 1) - first + 1) {}
  __device__ bool fits() const { return count <= kTileMaskRows; }
  // The word of row `row` of those that holds in-flight row `other`, in global memory.
  __device__ static const uint64_t* Word(const VerifyParams& p, const PlanItem& item, int row,
                                         int other) {
    return p.tree_mask + int64_t{item.query_start + row} * p.mask_words + other / 64;
  }
};

// In a tile of tokens: 16-byte chunk `chunk` of token `row`.
template <class Traits>
__device__ uint32_t ChunkOffset(int row, int chunk) {
  constexpr int kAtomChunks = Traits::kAtomBytes / 16;
  return chunk / kAtomChunks * Traits::kAtomStride +
         RowSwizzle<Traits::kAtomBytes>::Offset(row, chunk % kAtomChunks);
}
// The same among the queries.
template <class Traits>
__device__ uint32_t QueryOffset(int row, int chunk) {
  constexpr int kAtomChunks = Traits::kAtomBytes / 16;
  return chunk / kAtomChunks * (Traits::kQueryRows * Traits::kAtomBytes) +
         RowSwizzle<Traits::kAtomBytes>::Offset(row, chunk % kAtomChunks);
}

}  // namespace nwor
