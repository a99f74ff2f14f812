#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "base/export.h"
#include "kv_interceptor/round_plan.h"

// A round's row tables: which batch row waits in which staging row, and how drafts hang together.
// Made on the host from the plan, sent to the device in one copy.

namespace nwor {

class NWOR_EXPORT RoundTables {
 public:
  RoundTables() = default;
  // With stage = false every row is direct. Throws Error when the plan contradicts itself.
  // `fixed`: memory of FixedWords(fixed_rows) on the device that every round uses, so that a
  // captured graph finds its table where it was; rows beyond the round's stand there as direct. A
  // round of more than fixed_rows rows has memory of its own, as every round without it.
  RoundTables(const RoundPlan& plan, bool stage, at::Device device, const at::Tensor& fixed = {},
              int64_t fixed_rows = 0);

  static int64_t FixedWords(int64_t fixed_rows) { return 5 * fixed_rows + 1; }

  // On the host.
  const std::vector<int32_t>& stage_rows() const { return stage_rows_; }  // [T] staging row or -1
  int32_t num_requests() const { return num_requests_; }
  int32_t num_rows() const { return static_cast<int32_t>(stage_rows_.size()); }
  int32_t num_staging_rows() const { return num_staging_rows_; }
  bool in_place() const {
    return in_place_;
  }  // in `fixed`, where the next round's may overwrite it

  // On the caches' device.
  const int32_t* device_stage_rows() const { return At(0); }                          // [T]
  const int32_t* row_base() const { return At(table_rows_); }                         // [B]
  const int32_t* request_rows() const { return At(table_rows_ + num_requests_); }     // [B + 1]
  const int32_t* parents() const { return At(table_rows_ + 2 * num_requests_ + 1); }  // [M]
  int32_t* tips() const {
    return At(table_rows_ + 2 * num_requests_ + 1 + num_staging_rows_);
  }  // [B]

 private:
  int32_t* At(int64_t offset) const;

  std::vector<int32_t> stage_rows_;
  int32_t num_requests_ = 0;
  int32_t num_staging_rows_ = 0;
  bool in_place_ = false;
  int64_t table_rows_ = 0;  // entries of the first table, at least num_rows()
  at::Tensor device_;       // all tables one after another, int32
};

// Sends a host vector to `device` without waiting for it.
at::Tensor ToDevice(const std::vector<int32_t>& values, at::Device device);

// Throws Error naming the request when the plan contradicts itself.
void CheckPlan(const RoundPlan& plan);

}  // namespace nwor
