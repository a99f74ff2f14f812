#pragma once

#include <array>
#include <cstdint>

#include "attention/cpu/kernels.h"

namespace nwor::cpu {

// Merges a sequence of states by a binary tree whose shape depends only on their number. It works
// like a binary counter: equal-sized neighbours are merged as soon as both are there. A run of 2^k
// states that starts at a multiple of 2^k is merged in the same order whether it is pushed state by
// state or as the one state that another MergeTree made of it. So any thread may merge any such
// run.
class MergeTree {
 public:
  static constexpr int kMaxDepth = 40;

  MergeTree(const Kernels& kernels, int tiles, int head_dim)
      : kernels_(kernels), tiles_(tiles), head_dim_(head_dim) {}

  // Number of states held: at most 1 + log2 of those pushed.
  int depth() const { return depth_; }

  // Adds the next state. The caller owns its memory; merging may overwrite it.
  void Push(const State& state) {
    held_[depth_++] = state;
    ++pushed_;
    for (uint64_t run = pushed_; (run & 1) == 0; run >>= 1) {
      MergeTop();
    }
  }

  // Merges the states that are left. REQUIRES: at least one state was pushed.
  const State& Reduce() {
    while (depth_ > 1) {
      MergeTop();
    }
    return held_[0];
  }

 private:
  void MergeTop() {
    --depth_;
    kernels_.merge(held_[depth_ - 1], held_[depth_], tiles_, head_dim_);
  }

  const Kernels& kernels_;
  int tiles_;
  int head_dim_;
  int depth_ = 0;
  uint64_t pushed_ = 0;
  std::array<State, kMaxDepth> held_;
};

}  // namespace nwor::cpu
