#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"
#include "kv_interceptor/contract/contract_checker.h"

// An interceptor over three small layers with a checker on it, and the tools to break its rules
// from outside: in the caches' memory, in the cache writer that the commit uses, or between the
// interceptor and the checker, which then sees what a faulty interceptor would do.

namespace nwor {
inline constexpr int64_t kPages = 6, kPageSize = 4, kHeads = 2, kDim = 8;

inline std::string Text(const std::vector<Violation>& violations) {
  std::string text;
  for (const Violation& v : violations) {
    text += v.rule + " " + v.layer + " " + std::to_string(v.slot) + ": " + v.detail + "\n";
  }
  return text;
}

inline bool Has(const std::vector<Violation>& violations, const std::string& rule,
                const std::string& layer = "", int64_t slot = -2) {
  return std::any_of(violations.begin(), violations.end(), [&](const Violation& v) {
    return v.rule == rule && (layer.empty() || v.layer == layer) && (slot == -2 || v.slot == slot);
  });
}

// Passes events on to the checker, changed as a test wishes.
class Tamper final : public InterceptorObserver {
 public:
  explicit Tamper(ContractChecker& checker) : checker_(checker) {}

  std::function<void(Decision&)> on_begin;
  std::function<void(Outcome&)> on_write;  // runs as if it were part of the write itself
  std::function<void(Receipt&)> on_commit;
  const at::Tensor* path = nullptr;                // replaces what was committed
  const std::vector<at::Tensor>* slots = nullptr;  // replaces where it went
  const at::Tensor* slot_mapping = nullptr;        // replaces what was written

  void AfterBegin(const RoundPlan& plan, const Decision& decision) override {
    Decision changed = decision;
    if (on_begin) on_begin(changed);
    checker_.AfterBegin(plan, changed);
  }
  void BeforeWrite(const WriteCall& call) override { checker_.BeforeWrite(call); }
  void AfterWrite(const WriteCall& call, const Outcome& outcome) override {
    Outcome changed = outcome;
    if (on_write) on_write(changed);
    checker_.AfterWrite({call.layer, call.key, call.value,
                         slot_mapping != nullptr ? *slot_mapping : call.slot_mapping, call.rows},
                        changed);
  }
  void AfterCommit(const CommitCall& call, const Receipt& receipt) override {
    Receipt changed = receipt;
    changed.status = receipt.status.clone();
    if (on_commit) on_commit(changed);
    checker_.AfterCommit({path != nullptr ? *path : call.path, call.counts,
                          slots != nullptr ? *slots : call.slots, call.rows, call.last, call.tail},
                         changed);
  }
  void AfterAbort() override { checker_.AfterAbort(); }

 private:
  ContractChecker& checker_;
};

// A commit's writer with one fault.
class FaultyWriter final : public CacheWriter {
 public:
  std::function<void(CacheLayout&, int64_t&, KvRowsView&)> change;  // before each row
  const void* dropped_layer = nullptr;
  bool fails = false;

  void WriteRow(const CacheLayout& cache, int64_t slot, const KvRowsView& row,
                DType row_dtype) override {
    if (fails) throw std::runtime_error("injected");
    if (cache.key == dropped_layer) return;
    CacheLayout layout = cache;
    KvRowsView view = row;
    if (change) change(layout, slot, view);
    PlainCacheWriter().WriteRow(layout, slot, view, row_dtype);
  }
};

// Two requests: one root and three drafts in a chain, three prefill rows. Rows 1, 2, 3 are drafts.
inline const RoundPlan kPlan{{4, 3}, {3, 0}, {}};
inline const std::vector<int64_t> kSlots = {5, 6, 7, 8, 12, 13, 14};

class ContractCheckerTest : public ::testing::Test {
 protected:
  explicit ContractCheckerTest(at::ScalarType dtype = at::kFloat, int num_layers = 3)
      : dtype_(dtype) {
    at::manual_seed(7);
    for (int layer = 0; layer < num_layers; ++layer) {
      keys_.push_back(at::randn({kPages, kPageSize, kHeads, kDim}).to(dtype));
      values_.push_back(at::randn({kPages, kPageSize, kHeads, kDim}).to(dtype));
      interceptor_.BindLayer(Name(layer), keys_.back(), values_.back());
    }
    checker_.Snapshot();
  }

  static std::string Name(int layer) { return "layer" + std::to_string(layer); }
  at::Tensor Rows(int64_t num_rows) const { return at::randn({num_rows, kHeads, kDim}).to(dtype_); }
  static at::Tensor Slots(const std::vector<int64_t>& slots) { return at::tensor(slots); }

  void WriteAll(const std::vector<int64_t>& slots = kSlots) {
    const auto num_rows = static_cast<int64_t>(slots.size());
    for (size_t layer = 0; layer < keys_.size(); ++layer) {
      written_keys_.push_back(Rows(num_rows));
      interceptor_.Write(Name(layer), written_keys_.back(), Rows(num_rows), Slots(slots));
    }
  }
  void BeginAndWrite(bool ascending = false) {
    RoundPlan plan = kPlan;
    plan.ascending = ascending;
    ASSERT_TRUE(interceptor_.Begin(plan).stage);
    WriteAll();
  }
  // Accepts `count` drafts of the chain.
  Receipt Accept(int count, bool last = true, int first = 1) {
    at::Tensor path = at::full({2, 3}, -1, at::kInt);
    for (int i = 0; i < count; ++i) path[0][i] = first + i;
    const at::Tensor counts = at::tensor({count, 0}, at::kInt);
    return interceptor_.Commit(path, counts, {}, RowSpace::kBatch, last);
  }
  at::Tensor Slot(const std::vector<at::Tensor>& caches, int layer, int64_t slot) const {
    return caches[layer][slot / kPageSize][slot % kPageSize];
  }
  void FlipByte(int layer, int64_t slot) {
    auto* byte = static_cast<uint8_t*>(Slot(values_, layer, slot).mutable_data_ptr()) + 5;
    *byte ^= 1;
  }

  at::ScalarType dtype_;
  std::vector<at::Tensor> keys_, values_, written_keys_;
  Interceptor interceptor_{NworConfig{}};
  ContractChecker checker_{interceptor_};
};

#define EXPECT_SILENT(violations)                       \
  do {                                                  \
    const std::vector<Violation> found_ = (violations); \
    EXPECT_TRUE(found_.empty()) << Text(found_);        \
  } while (false)
#define EXPECT_CAUGHT(violations, ...)                     \
  do {                                                     \
    const std::vector<Violation> found_ = (violations);    \
    EXPECT_TRUE(Has(found_, __VA_ARGS__)) << Text(found_); \
  } while (false)

}  // namespace nwor
