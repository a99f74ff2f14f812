#pragma once

#include "attention/cuda/combine.cuh"
#include "attention/cuda/kernel_args.cuh"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/sm90/tma.cuh"
#include "attention/cuda/sm90/traits.cuh"
#include "attention/cuda/swizzle.cuh"

namespace nwor::sm90 {

static_assert(sizeof(SharedWorkTile) <= kWorkTileBytes);

// The dynamic shared memory of a CTA, as addresses.
template <class Traits>
struct SharedStorage {
  uint32_t stages, raw_stages, query, page_ids, barriers, stage_extras, raw_extras;
  float4* running_outputs;     // of the consumer threads: see RunningOutputs
  SharedWorkTile* work_tiles;  // two: one is loaded while the other is computed

  static constexpr int kQueryBytes = QueryBytes(Traits::kHeadDim, Traits::kRowTile);
  static constexpr int kRawBytes = 2 * Traits::kRawTileBytes;

  __device__ SharedStorage(uint8_t* base, const VerifyArgs& args) {
    uint8_t* raw_at = base + args.stages * Traits::kStageBytes;
    uint8_t* query_at = raw_at + (Traits::kFloat8 ? args.raw_stages : 0) * kRawBytes;
    running_outputs = reinterpret_cast<float4*>(query_at + kQueryBytes);
    uint8_t* rest = reinterpret_cast<uint8_t*>(running_outputs) +
                    RunningOutputs(Traits::kHeadDim, args.row_tile) *
                        RunningOutputBytes(Traits::kHeadDim, args.row_tile);
    stages = ptx::SharedAddress(base);
    raw_stages = ptx::SharedAddress(raw_at);
    query = ptx::SharedAddress(query_at);
    work_tiles = reinterpret_cast<SharedWorkTile*>(rest);
    page_ids = ptx::SharedAddress(rest + 2 * kWorkTileBytes);
    barriers = page_ids + kPageIdBytes;
    stage_extras = barriers + 6 * 16;
    raw_extras = stage_extras + args.stages * kStageExtraBytes;
  }

  // What the combine may use: stages, queries and running outputs.
  __device__ CombineBuffer combine_buffer() const {
    return {stages, static_cast<int>(ptx::SharedAddress(work_tiles) - stages)};
  }
  __device__ SharedWorkTile* work_tile(int slot) const {
    return reinterpret_cast<SharedWorkTile*>(reinterpret_cast<uint8_t*>(work_tiles) +
                                             slot * kWorkTileBytes);
  }
  __device__ uint32_t keys(int stage) const { return stages + stage * Traits::kStageBytes; }
  __device__ uint32_t values(int stage) const { return keys(stage) + Traits::kKvTileBytes; }
  // Float8 tokens as TMA has loaded them: rows of one swizzle atom.
  __device__ uint32_t raw_tile(int stage, int values) const {
    return raw_stages + stage * kRawBytes + values * Traits::kRawTileBytes;
  }
  // Barriers. Full: tokens, a work tile or queries have arrived. Empty: they have been used.
  __device__ uint32_t keys_full(int stage) const { return stage_extras + stage * kStageExtraBytes; }
  __device__ uint32_t values_full(int stage) const { return keys_full(stage) + 8; }
  __device__ uint32_t keys_empty(int stage) const { return keys_full(stage) + 16; }
  __device__ uint32_t values_empty(int stage) const { return keys_full(stage) + 24; }
  __device__ uint32_t raw_full(int stage, int values) const {
    return raw_extras + stage * kRawExtraBytes + values * 16;
  }
  __device__ uint32_t raw_empty(int stage, int values) const { return raw_full(stage, values) + 8; }
  __device__ uint32_t work_tile_full(int slot) const { return barriers + slot * 16; }
  __device__ uint32_t work_tile_empty(int slot) const { return work_tile_full(slot) + 8; }
  __device__ uint32_t query_full() const { return work_tile_full(2); }
  __device__ uint32_t query_empty() const { return work_tile_full(2) + 8; }
  __device__ uint32_t page_ids_full(int batch) const { return work_tile_full(3) + batch * 16; }
  __device__ uint32_t page_ids_empty(int batch) const { return page_ids_full(batch) + 8; }
  // The words of the tree mask for the stage's in-flight rows: see StageMask.
  __device__ uint32_t mask(int stage) const { return keys_full(stage) + 32; }
  // Boundary steps: the next step is for the boundary producer, and it has taken notice.
  __device__ uint32_t boundary_ready() const { return work_tile_full(5); }
  __device__ uint32_t boundary_taken() const { return work_tile_full(5) + 8; }

  // Every thread whose own accesses a barrier orders arrives there. Where only TMA and wgmma access
  // the memory, one thread arrives for its warp.
  __device__ void InitBarriers(const VerifyArgs& args) const {
    for (int i = 0; i < args.stages; ++i) {
      mbarrier::Init(keys_full(i), kBoundaryThreads);
      mbarrier::Init(values_full(i), kBoundaryThreads);
      mbarrier::Init(keys_empty(i), Traits::kThreads);
      mbarrier::Init(values_empty(i), Traits::kThreads);
    }
    for (int i = 0; Traits::kFloat8 && i < args.raw_stages; ++i) {
      for (int values = 0; values < 2; ++values) {
        mbarrier::Init(raw_full(i, values), 32);
        mbarrier::Init(raw_empty(i, values), 32);
      }
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier::Init(work_tile_full(i), 32);
      mbarrier::Init(work_tile_empty(i), Traits::kThreads + kBoundaryThreads + 2 * 32);
      mbarrier::Init(page_ids_full(i), 32);
      mbarrier::Init(page_ids_empty(i), Traits::kFloat8 ? 32 : 2 * 32);
    }
    mbarrier::Init(boundary_ready(), 2 * 32);
    mbarrier::Init(boundary_taken(), kBoundaryThreads);
    mbarrier::Init(query_full(), 32);
    mbarrier::Init(query_empty(), Traits::kThreads);
    mbarrier::FenceInit();
  }
};

// Offset of 16-byte chunk `chunk` of token `row` in a tile of K or V.
template <class Traits>
__device__ uint32_t ChunkOffset(int row, int chunk) {
  constexpr int kAtomChunks = Traits::kAtomBytes / 16;
  return chunk / kAtomChunks * Traits::kAtomStride +
         RowSwizzle<Traits::kAtomBytes>::Offset(row, chunk % kAtomChunks);
}
// The same in the queries.
template <class Traits>
__device__ uint32_t QueryOffset(int row, int chunk) {
  constexpr int kAtomChunks = Traits::kAtomBytes / 16;
  return chunk / kAtomChunks * (Traits::kQueryRows * Traits::kAtomBytes) +
         RowSwizzle<Traits::kAtomBytes>::Offset(row, chunk % kAtomChunks);
}

}  // namespace nwor::sm90
