#include "kv_interceptor/staging_buffer.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace nwor {

StagingBuffer::StagingBuffer(int num_kv_heads, int head_dim, at::ScalarType dtype,
                             at::Device device)
    : num_kv_heads_(num_kv_heads), head_dim_(head_dim), dtype_(dtype), device_(device) {}

int StagingBuffer::AddLayer() {
  staged_.emplace_back();
  num_staged_.push_back(0);
  ++num_layers_;
  // Memory for the new layer comes with the next Reserve.
  capacity_rows_ = 0;
  return num_layers_ - 1;
}

int64_t StagingBuffer::BytesFor(int64_t num_rows) const {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype_));
  const int64_t per_row = int64_t{2} * num_layers_ * num_kv_heads_ * head_dim_ * element;
  return num_rows * (per_row + static_cast<int64_t>(sizeof(int64_t)));
}

BypassReason StagingBuffer::Reserve(int64_t num_rows, int64_t max_bytes) {
  if (num_rows <= capacity_rows_) return BypassReason::kNone;
  if (BytesFor(num_rows) > max_bytes) return BypassReason::kCapacity;
  // Doubling keeps a slowly growing batch from allocating every round, as far as there is room.
  const int64_t doubled = 2 * capacity_rows_;
  const bool may_double = doubled > num_rows && BytesFor(doubled) <= max_bytes;
  if ((may_double && Allocate(doubled)) || Allocate(num_rows)) return BypassReason::kNone;
  return BypassReason::kOutOfMemory;
}

bool StagingBuffer::Allocate(int64_t num_rows) {
  // What was there goes first: there need not be room for both. When memory runs out half way
  // there is no staging, rather than keys and values of two sizes.
  keys_ = values_ = slots_ = at::Tensor();
  capacity_rows_ = 0;
  const auto options = at::TensorOptions().dtype(dtype_).device(device_);
  try {
    at::Tensor keys = at::empty({num_layers_, num_rows, num_kv_heads_, head_dim_}, options);
    at::Tensor values = at::empty(keys.sizes(), options);
    slots_ = at::empty({num_rows}, options.dtype(at::kLong));
    keys_ = std::move(keys);
    values_ = std::move(values);
  } catch (const c10::OutOfMemoryError&) {
    return false;
  } catch (const c10::Error&) {  // the CPU has no type of its own for it; a GPU may be broken
    if (!device_.is_cpu()) throw;
    return false;
  }
  capacity_rows_ = num_rows;
  return true;
}

void StagingBuffer::BeginRound(int64_t num_rows) {
  NWOR_CHECK(num_rows <= capacity_rows_, "num_rows: got ", num_rows, ", expected at most ",
             capacity_rows_, " (reserved)");
  round_rows_ = num_rows;
  slots_are_old_ = true;
  for (auto& layer : staged_) layer.assign(num_rows, false);
  std::fill(num_staged_.begin(), num_staged_.end(), 0);
}

bool StagingBuffer::ReplacesSlots(bool brings_every_row) {
  const bool old = std::exchange(slots_are_old_, false);
  // On a GPU filling is a launch, which a step of few microseconds feels.
  const bool replaces = old && brings_every_row && device_.is_cuda();
  if (old && !replaces) slots_.fill_(kNoSlot);
  return replaces;
}

int64_t StagingBuffer::MarkStaged(int layer, const std::vector<int32_t>& rows) {
  std::vector<bool>& staged = staged_[layer];
  int64_t fresh = 0;
  for (const int32_t row : rows) {
    if (!staged[row]) {
      staged[row] = true;
      ++fresh;
    }
  }
  num_staged_[layer] += fresh;
  return fresh;
}

int64_t StagingBuffer::MissingRows(int layer) const { return round_rows_ - num_staged_[layer]; }

void StagingBuffer::AddStagedRows(std::vector<bool>& rows) const {
  for (const std::vector<bool>& layer : staged_) {
    for (size_t row = 0; row < layer.size(); ++row) {
      if (layer[row]) rows[row] = true;
    }
  }
}

KvRowsView StagingBuffer::LayerView(int layer) const {
  KvRowsView view;
  const int64_t layer_bytes = keys_.stride(0) * static_cast<int64_t>(keys_.element_size());
  view.key = static_cast<std::byte*>(keys_.mutable_data_ptr()) + layer * layer_bytes;
  view.value = static_cast<std::byte*>(values_.mutable_data_ptr()) + layer * layer_bytes;
  view.key_row = view.value_row = keys_.stride(1);
  view.key_head = view.value_head = keys_.stride(2);
  return view;
}

int64_t StagingBuffer::memory_bytes() const {
  if (!keys_.defined()) return 0;
  return static_cast<int64_t>(keys_.nbytes() + values_.nbytes() + slots_.nbytes());
}

}  // namespace nwor
