#include "attention/cpu/verify.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "attention/cpu/kernels.h"
#include "attention/cpu/merge_tree.h"
#include "attention/cpu/prefix_reader.h"
#include "attention/cpu/row_mask.h"
#include "base/check.h"
#include "base/parallel.h"

namespace nwor {
namespace {

using cpu::Kernels;
using cpu::MergeTree;
using cpu::RowChunk;
using cpu::Scratch;
using cpu::State;
using cpu::TokenRange;

// A chunk of rows and the splits of its prefix, computed by one work tile or by several.
struct Chunk {
  RowChunk rows;
  int64_t prefix_tokens = 0;
  int64_t first_split = 0;  // no row sees the splits before it
  int64_t num_splits = 1;
  int64_t first_work_tile = 0;
  int64_t num_work_tiles = 1;
};

struct ChunkTile {
  int32_t chunk = 0;
  int64_t first_split = 0;  // relative to the chunk's first split
  int64_t num_splits = 0;
};

class Schedule {
 public:
  Schedule(const VerifyParams& params, const Kernels& kernels, int num_threads)
      : params_(params), kernels_(kernels) {
    AddChunks(num_threads);
    AddWorkTiles(num_threads);
  }

  void Run(int num_threads) {
    const int64_t workers =
        std::min<int64_t>({num_threads, static_cast<int64_t>(work_tiles_.size()),
                           1 + multiply_adds_ / kMinMultiplyAddsPerThread});
    std::atomic<int64_t> next_work_tile{0};
    RunOnTorchThreads(workers, [&] {
      thread_local Scratch scratch;
      const auto num_work_tiles = static_cast<int64_t>(work_tiles_.size());
      for (int64_t i = next_work_tile++; i < num_work_tiles; i = next_work_tile++) {
        RunWorkTile(i, scratch);
      }
    });
  }

 private:
  static constexpr int kWorkTilesPerThread = 4;
  static constexpr int64_t kMinMultiplyAddsPerThread = 1 << 19;

  // All heads share a chunk, unless the batch is too small to give every thread work.
  void AddChunks(int num_threads) {
    const int group = params_.num_heads / params_.num_kv_heads;
    const int rows_per_chunk = std::max(1, cpu::kMaxPackedRows / group);
    int64_t splits = 0;
    for (int b = 0; b < params_.num_requests; ++b) {
      const int rows = params_.query_start[b + 1] - params_.query_start[b];
      const int64_t chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;
      splits += chunks * (1 + cpu::PrefixTokens(params_, b) / cpu::kSplitTokens);
    }
    const int64_t parts = (kWorkTilesPerThread * num_threads + splits - 1) / splits;
    const auto shared_heads = static_cast<int>(std::max<int64_t>(1, params_.num_kv_heads / parts));
    for (int b = 0; b < params_.num_requests; ++b) {
      RowChunk chunk;
      chunk.request = b;
      chunk.request_row = params_.query_start[b];
      chunk.request_rows = params_.query_start[b + 1] - chunk.request_row;
      chunk.group = group;
      for (int first = 0; first < chunk.request_rows; first += rows_per_chunk) {
        chunk.first = first;
        chunk.count = std::min(rows_per_chunk, chunk.request_rows - first);
        const int heads = std::clamp(cpu::kMaxPackedRows / (chunk.head_tiles() * cpu::kTileRows), 1,
                                     shared_heads);
        for (int head = 0; head < params_.num_kv_heads; head += heads) {
          chunk.first_head = head;
          chunk.num_heads = std::min(heads, params_.num_kv_heads - head);
          AddChunk(chunk);
        }
      }
    }
  }

  void AddChunk(const RowChunk& rows) {
    Chunk chunk;
    chunk.rows = rows;
    chunk.prefix_tokens = cpu::PrefixTokens(params_, rows.request);
    chunk.first_split = cpu::RowMask(params_, rows).FirstVisible() / cpu::kSplitTokens;
    const int64_t splits = (chunk.prefix_tokens + cpu::kSplitTokens - 1) / cpu::kSplitTokens;
    chunk.num_splits = std::max<int64_t>(1, splits - chunk.first_split);
    total_splits_ += chunk.num_splits;
    multiply_adds_ += 2 * (chunk.prefix_tokens + rows.request_rows) * rows.packed() *
                      rows.num_heads * params_.head_dim;
    chunks_.push_back(chunk);
  }

  // Work tiles are runs of 2^k splits: short enough that all threads have work, long enough that
  // few partial states are stored. Any choice gives the same bits (see MergeTree).
  void AddWorkTiles(int num_threads) {
    const int64_t wanted = static_cast<int64_t>(kWorkTilesPerThread) * num_threads;
    const auto run = static_cast<int64_t>(
        std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(1, total_splits_ / wanted))));
    int64_t partial_floats = 0;
    for (size_t c = 0; c < chunks_.size(); ++c) {
      Chunk& chunk = chunks_[c];
      chunk.first_work_tile = static_cast<int64_t>(work_tiles_.size());
      for (int64_t split = 0; split < chunk.num_splits; split += run) {
        const int64_t splits = std::min(run, chunk.num_splits - split);
        work_tiles_.push_back({static_cast<int32_t>(c), split, splits});
      }
      chunk.num_work_tiles = static_cast<int64_t>(work_tiles_.size()) - chunk.first_work_tile;
      partial_offsets_.push_back(partial_floats);
      if (chunk.num_work_tiles > 1) {
        partial_floats += chunk.num_work_tiles * StateFloats(chunk);
      }
    }
    partials_.reset(new float[partial_floats]);
    unfinished_.reset(new std::atomic<int64_t>[chunks_.size()]);
    for (size_t c = 0; c < chunks_.size(); ++c) {
      unfinished_[c] = chunks_[c].num_work_tiles;
    }
  }

  void RunWorkTile(int64_t index, Scratch& scratch) {
    const ChunkTile& work_tile = work_tiles_[index];
    const Chunk& chunk = chunks_[work_tile.chunk];
    const int tiles = chunk.rows.tiles();
    scratch.Prepare(chunk.rows, params_.head_dim, kernels_.uses_amx);
    kernels_.pack_queries(params_, chunk.rows, scratch);

    const int slots = 1 + std::bit_width(static_cast<uint64_t>(work_tile.num_splits));
    float* memory = scratch.States(slots, tiles, params_.head_dim);
    MergeTree merge_tree(kernels_, tiles, params_.head_dim);
    for (int64_t i = 0; i < work_tile.num_splits; ++i) {
      const State state =
          State::At(memory + merge_tree.depth() * StateFloats(chunk), tiles, params_.head_dim);
      kernels_.attend(params_, chunk.rows, SplitRange(chunk, work_tile.first_split + i), scratch,
                      state);
      merge_tree.Push(state);
    }
    const State& done = merge_tree.Reduce();
    if (chunk.num_work_tiles == 1) {
      kernels_.finish(params_, chunk.rows, done);
      return;
    }
    std::copy_n(done.acc, StateFloats(chunk), PartialMemory(work_tile.chunk, index));
    if (unfinished_[work_tile.chunk].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      FinishChunk(work_tile.chunk);
    }
  }

  // The thread that completes a chunk merges the states of its work tiles.
  void FinishChunk(int32_t chunk_idx) {
    const Chunk& chunk = chunks_[chunk_idx];
    const int tiles = chunk.rows.tiles();
    MergeTree merge_tree(kernels_, tiles, params_.head_dim);
    for (int64_t i = 0; i < chunk.num_work_tiles; ++i) {
      merge_tree.Push(
          State::At(PartialMemory(chunk_idx, chunk.first_work_tile + i), tiles, params_.head_dim));
    }
    kernels_.finish(params_, chunk.rows, merge_tree.Reduce());
  }

  static TokenRange SplitRange(const Chunk& chunk, int64_t split) {
    TokenRange range;
    range.begin = std::min((chunk.first_split + split) * cpu::kSplitTokens, chunk.prefix_tokens);
    range.end = std::min(range.begin + cpu::kSplitTokens, chunk.prefix_tokens);
    range.then_rows = split + 1 == chunk.num_splits;
    return range;
  }

  int64_t StateFloats(const Chunk& chunk) const {
    return State::Floats(chunk.rows.tiles(), params_.head_dim);
  }
  float* PartialMemory(int32_t chunk_idx, int64_t work_tile) const {
    const Chunk& chunk = chunks_[chunk_idx];
    return partials_.get() + partial_offsets_[chunk_idx] +
           (work_tile - chunk.first_work_tile) * StateFloats(chunk);
  }

  const VerifyParams& params_;
  const Kernels& kernels_;
  std::vector<Chunk> chunks_;
  std::vector<ChunkTile> work_tiles_;
  std::vector<int64_t> partial_offsets_;
  int64_t total_splits_ = 0;
  int64_t multiply_adds_ = 0;
  std::unique_ptr<float[]> partials_;  // states of work tiles that share a chunk
  std::unique_ptr<std::atomic<int64_t>[]> unfinished_;
};

const Kernels& FindKernels(int head_dim, std::string_view instruction_set) {
  const std::vector<const Kernels*> supported = cpu::SupportedKernels(head_dim);
  for (const Kernels* kernels : supported) {
    if (instruction_set.empty() || kernels->name == instruction_set) {
      return *kernels;
    }
  }
  throw Error(Concat("instruction_set: got '", instruction_set,
                     "', expected one of this machine's (", supported.front()->name, " ... ",
                     supported.back()->name, ")"));
}

}  // namespace

void VerifyAttentionCpu(const VerifyParams& params, std::string_view instruction_set) {
  if (params.num_rows == 0) {
    return;
  }
  const Kernels& kernels = FindKernels(params.head_dim, instruction_set);
  const int num_threads = at::get_num_threads();
  Schedule(params, kernels, num_threads).Run(num_threads);
}

std::vector<std::string> VerifyCpuInstructionSets(int head_dim) {
  std::vector<std::string> names;
  for (const Kernels* kernels : cpu::SupportedKernels(head_dim)) {
    names.emplace_back(kernels->name);
  }
  return names;
}

}  // namespace nwor
