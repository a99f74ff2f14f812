#pragma once

#include <array>
#include <cstdint>

#include "attention/cpu/task.h"

namespace nwor::cpu {

// Merges a sequence of states by a binary tree whose shape depends on their number alone: like a
// binary counter, equal-sized neighbours are merged as soon as both are there. A run of 2^k states
// that starts at a multiple of 2^k is merged alike whether it is pushed here state by state or
// arrives as the one state another stack made of it, so any thread may do any such run.
class StateStack {
 public:
  static constexpr int kMaxDepth = 40;

  StateStack(const Kernels& kernels, int tiles, int head_dim)
      : kernels_(kernels), tiles_(tiles), head_dim_(head_dim) {}

  // How many states are held, unmerged: at most 1 + log2 of those pushed.
  int depth() const { return depth_; }

  // Takes the next state; its memory stays the caller's and may be overwritten by merging.
  void Push(const State& state) {
    held_[depth_++] = state;
    ++pushed_;
    for (uint64_t run = pushed_; (run & 1) == 0; run >>= 1) {
      MergeTop();
    }
  }

  // Merges what is left. REQUIRES: at least one state was pushed.
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
