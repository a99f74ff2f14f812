#include "attention/cpu/verify_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "attention/cpu/prefix_reader.h"
#include "attention/cpu/state_stack.h"
#include "attention/cpu/task.h"
#include "attention/cpu/visibility.h"
#include "base/check.h"
#include "base/parallel.h"

namespace nwor {
namespace {

using cpu::Kernels;
using cpu::RowChunk;
using cpu::Scratch;
using cpu::State;
using cpu::StateStack;
using cpu::TokenRange;

// A chunk of rows and the leaves of its prefix, done by one item or by several.
struct Chunk {
  RowChunk rows;
  int64_t prefix_tokens = 0;
  int64_t first_leaf = 0;  // leaves before it lie outside every row's window
  int64_t num_leaves = 1;
  int64_t first_item = 0;
  int64_t num_items = 1;
};

struct Item {
  int32_t chunk = 0;
  int64_t first_leaf = 0;  // counted from the chunk's first
  int64_t num_leaves = 0;
};

class Schedule {
 public:
  Schedule(const VerifyParams& params, const Kernels& kernels, int num_threads)
      : params_(params), kernels_(kernels) {
    AddChunks(num_threads);
    AddItems(num_threads);
  }

  void Run(int num_threads) {
    const int64_t workers = std::min<int64_t>({num_threads, static_cast<int64_t>(items_.size()),
                                               1 + multiply_adds_ / kMinMultiplyAddsPerThread});
    std::atomic<int64_t> next_item{0};
    RunOnTorchThreads(workers, [&] {
      thread_local Scratch scratch;
      const auto num_items = static_cast<int64_t>(items_.size());
      for (int64_t i = next_item++; i < num_items; i = next_item++) {
        RunItem(i, scratch);
      }
    });
  }

 private:
  static constexpr int kItemsPerThread = 4;
  static constexpr int64_t kMinMultiplyAddsPerThread = 1 << 19;

  // All heads walk together, unless the batch is too small to give every thread a share.
  void AddChunks(int num_threads) {
    const int group = params_.num_heads / params_.num_kv_heads;
    const int rows_per_chunk = std::max(1, cpu::kMaxPackedRows / group);
    int64_t leaves = 0;
    for (int b = 0; b < params_.num_requests; ++b) {
      const int rows = params_.query_start[b + 1] - params_.query_start[b];
      const int64_t chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;
      leaves += chunks * (1 + cpu::PrefixTokens(params_, b) / cpu::kLeafTokens);
    }
    const int64_t parts = (kItemsPerThread * num_threads + leaves - 1) / leaves;
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
    chunk.first_leaf = cpu::Visibility(params_, rows).FirstVisible() / cpu::kLeafTokens;
    const int64_t leaves = (chunk.prefix_tokens + cpu::kLeafTokens - 1) / cpu::kLeafTokens;
    chunk.num_leaves = std::max<int64_t>(1, leaves - chunk.first_leaf);
    total_leaves_ += chunk.num_leaves;
    multiply_adds_ += 2 * (chunk.prefix_tokens + rows.request_rows) * rows.packed() *
                      rows.num_heads * params_.head_dim;
    chunks_.push_back(chunk);
  }

  // Items are runs of 2^k leaves: short enough that all threads have work, long enough that few
  // states are kept. Any choice gives the same bits (see StateStack).
  void AddItems(int num_threads) {
    const int64_t wanted = static_cast<int64_t>(kItemsPerThread) * num_threads;
    const auto run = static_cast<int64_t>(
        std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(1, total_leaves_ / wanted))));
    int64_t kept_floats = 0;
    for (size_t c = 0; c < chunks_.size(); ++c) {
      Chunk& chunk = chunks_[c];
      chunk.first_item = static_cast<int64_t>(items_.size());
      for (int64_t leaf = 0; leaf < chunk.num_leaves; leaf += run) {
        const int64_t leaves = std::min(run, chunk.num_leaves - leaf);
        items_.push_back({static_cast<int32_t>(c), leaf, leaves});
      }
      chunk.num_items = static_cast<int64_t>(items_.size()) - chunk.first_item;
      kept_offsets_.push_back(kept_floats);
      if (chunk.num_items > 1) {
        kept_floats += chunk.num_items * StateFloats(chunk);
      }
    }
    kept_.reset(new float[kept_floats]);
    unfinished_.reset(new std::atomic<int64_t>[chunks_.size()]);
    for (size_t c = 0; c < chunks_.size(); ++c) {
      unfinished_[c] = chunks_[c].num_items;
    }
  }

  void RunItem(int64_t index, Scratch& scratch) {
    const Item& item = items_[index];
    const Chunk& chunk = chunks_[item.chunk];
    const int tiles = chunk.rows.tiles();
    scratch.Prepare(chunk.rows, params_.head_dim, kernels_.matrix_unit);
    kernels_.pack_queries(params_, chunk.rows, scratch);

    const int slots = 1 + std::bit_width(static_cast<uint64_t>(item.num_leaves));
    float* memory = scratch.States(slots, tiles, params_.head_dim);
    StateStack stack(kernels_, tiles, params_.head_dim);
    for (int64_t i = 0; i < item.num_leaves; ++i) {
      const State state =
          State::At(memory + stack.depth() * StateFloats(chunk), tiles, params_.head_dim);
      kernels_.attend(params_, chunk.rows, Leaf(chunk, item.first_leaf + i), scratch, state);
      stack.Push(state);
    }
    const State& done = stack.Reduce();
    if (chunk.num_items == 1) {
      kernels_.finish(params_, chunk.rows, done);
      return;
    }
    std::copy_n(done.acc, StateFloats(chunk), KeptMemory(item.chunk, index));
    if (unfinished_[item.chunk].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      FinishChunk(item.chunk);
    }
  }

  // The thread that completes a chunk merges what its items left.
  void FinishChunk(int32_t chunk_idx) {
    const Chunk& chunk = chunks_[chunk_idx];
    const int tiles = chunk.rows.tiles();
    StateStack stack(kernels_, tiles, params_.head_dim);
    for (int64_t i = 0; i < chunk.num_items; ++i) {
      stack.Push(State::At(KeptMemory(chunk_idx, chunk.first_item + i), tiles, params_.head_dim));
    }
    kernels_.finish(params_, chunk.rows, stack.Reduce());
  }

  static TokenRange Leaf(const Chunk& chunk, int64_t leaf) {
    TokenRange range;
    range.begin = std::min((chunk.first_leaf + leaf) * cpu::kLeafTokens, chunk.prefix_tokens);
    range.end = std::min(range.begin + cpu::kLeafTokens, chunk.prefix_tokens);
    range.then_rows = leaf + 1 == chunk.num_leaves;
    return range;
  }

  int64_t StateFloats(const Chunk& chunk) const {
    return State::Floats(chunk.rows.tiles(), params_.head_dim);
  }
  float* KeptMemory(int32_t chunk_idx, int64_t item) const {
    const Chunk& chunk = chunks_[chunk_idx];
    return kept_.get() + kept_offsets_[chunk_idx] + (item - chunk.first_item) * StateFloats(chunk);
  }

  const VerifyParams& params_;
  const Kernels& kernels_;
  std::vector<Chunk> chunks_;
  std::vector<Item> items_;
  std::vector<int64_t> kept_offsets_;
  int64_t total_leaves_ = 0;
  int64_t multiply_adds_ = 0;
  std::unique_ptr<float[]> kept_;  // states of items that share a chunk
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
