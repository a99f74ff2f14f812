#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/export.h"

// Work on a GPU that is captured once and started by one call from then on: CUDA graphs, for
// engines that include no CUDA header.

namespace nwor {

// Graphs of one device that share their memory. Replayed in the order of their capture, each finds
// what those before it returned. A graph that is replayed again ends the results of all that were
// captured after it, and its own.
//
// Thread-safety: none; use by one thread at a time. Other threads may use the device meanwhile.
class NWOR_EXPORT DeviceGraphs {
 public:
  // Results are read, and may be kept; their values change as above.
  using Work = std::function<std::vector<at::Tensor>()>;

  // Throws Error when this is no CUDA device, or the library was built without CUDA.
  explicit DeviceGraphs(at::Device device);
  ~DeviceGraphs();
  DeviceGraphs(const DeviceGraphs&) = delete;
  DeviceGraphs& operator=(const DeviceGraphs&) = delete;

  // Captures what `work` enqueues on the current stream; nothing of it runs. Returns the graph's
  // number, counted from 0. Throws what `work` throws, and when something cannot be captured.
  // REQUIRES: the same work has run before, which loads its kernels; it waits for nothing and draws
  // no random numbers; the tensors it reads stay where they are as long as the graph is replayed.
  int64_t Capture(const Work& work);

  // Enqueues a graph on the current stream. Returns the tensors its work returned, with the values
  // of this replay.
  const std::vector<at::Tensor>& Replay(int64_t graph) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nwor
