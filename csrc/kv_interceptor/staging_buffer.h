#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "base/bypass_reason.h"
#include "base/export.h"
#include "kv_interceptor/stage/stage.h"

// Where draft rows wait for acceptance: [layer][row] K and V of one cache group in the model's
// dtype, and one slot buffer for all its layers.
//
// Rows are addressed explicitly and may arrive in any order; a (layer, row) that arrives twice
// holds the later bytes and is counted once. Memory grows between rounds only.
//
// Thread-safety: none; the Interceptor that owns it serialises.

namespace nwor {

class NWOR_EXPORT StagingBuffer {
 public:
  StagingBuffer(int num_kv_heads, int head_dim, at::ScalarType dtype, at::Device device);

  // Adds one layer and returns its index; it has memory after the next Reserve. REQUIRES: no round
  // is open.
  int AddLayer();

  // Makes room for num_rows rows in every layer. kCapacity: that would take more than max_bytes,
  // and nothing has changed. kOutOfMemory: memory ran out, and there is room for none.
  // REQUIRES: no round is open.
  BypassReason Reserve(int64_t num_rows, int64_t max_bytes);

  // Forgets what the last round staged. The memory stays, so a reader of old bytes is a bug that
  // the epoch check catches, not a crash.
  void BeginRound(int64_t num_rows);

  // Asked before a write of the round. True: slots of the last round still stand there, and the
  // write, which brings every row, replaces them. Otherwise they are gone by now.
  bool ReplacesSlots(bool brings_every_row);
  // Tells that a replayed graph has replaced them.
  void NoteSlots() { slots_are_old_ = false; }

  // Notes that `layer` staged these rows; returns how many it had not staged yet in this round.
  int64_t MarkStaged(int layer, const std::vector<int32_t>& rows);

  // Rows of the round that `layer` has not staged yet.
  int64_t MissingRows(int layer) const;
  // Sets rows[r] for every row that some layer has staged. REQUIRES: rows has round_rows entries.
  void AddStagedRows(std::vector<bool>& rows) const;

  KvRowsView LayerView(int layer) const;  // [M, H, D]

  const at::Tensor& keys() const { return keys_; }  // [L, M, H, D]
  const at::Tensor& values() const { return values_; }
  // [M] int64, kNoSlot until a layer records it; before the round's first write those of the last.
  const at::Tensor& slots() const { return slots_; }
  int num_layers() const { return num_layers_; }
  int64_t capacity_rows() const { return capacity_rows_; }
  int64_t round_rows() const { return round_rows_; }
  int64_t memory_bytes() const;
  // What num_rows rows would take, slots included.
  int64_t BytesFor(int64_t num_rows) const;
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }

 private:
  // Replaces what there is. False: memory ran out.
  bool Allocate(int64_t num_rows);

  int num_kv_heads_;
  int head_dim_;
  at::ScalarType dtype_;
  at::Device device_;
  int num_layers_ = 0;
  int64_t capacity_rows_ = 0;
  int64_t round_rows_ = 0;
  at::Tensor keys_, values_, slots_;
  bool slots_are_old_ = true;
  std::vector<std::vector<bool>> staged_;  // [layer][row]
  std::vector<int64_t> num_staged_;        // [layer]
};

}  // namespace nwor
