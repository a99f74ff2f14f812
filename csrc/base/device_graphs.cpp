#include "base/device_graphs.h"

#include <exception>
#include <utility>

#include "base/check.h"

#ifdef NWOR_WITH_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace nwor {

#ifdef NWOR_WITH_CUDA

namespace {

// After an error in a capture, which is the one to tell: the stream must not stay in it.
void EndCapture(at::cuda::CUDAGraph& graph) noexcept {
  try {
    graph.capture_end();
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace

struct DeviceGraphs::Impl {
  struct Captured {
    std::unique_ptr<at::cuda::CUDAGraph> graph;
    std::vector<at::Tensor> results;
  };

  // The default stream cannot be captured. One for all graphs: cuBLAS keeps memory for each.
  c10::cuda::CUDAStream stream;
  c10::MempoolId_t pool{};
  std::vector<Captured> graphs;
};

DeviceGraphs::DeviceGraphs(at::Device device) {
  NWOR_CHECK(device.is_cuda(), "device: got ", device.str(), ", expected a CUDA device");
  impl_ = std::make_unique<Impl>(
      Impl{.stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()),
           .pool = {},
           .graphs = {}});
}

int64_t DeviceGraphs::Capture(const Work& work) {
  const c10::cuda::CUDAStreamGuard guard(impl_->stream);
  // Memory goes with the last of its graphs, and so does its name.
  if (impl_->graphs.empty()) impl_->pool = at::cuda::graph_pool_handle();
  Impl::Captured captured{std::make_unique<at::cuda::CUDAGraph>(), {}};
  captured.graph->capture_begin(impl_->pool, cudaStreamCaptureModeThreadLocal);
  try {
    captured.results = work();
  } catch (...) {
    EndCapture(*captured.graph);
    throw;
  }
  captured.graph->capture_end();
  impl_->graphs.push_back(std::move(captured));
  return static_cast<int64_t>(impl_->graphs.size()) - 1;
}

const std::vector<at::Tensor>& DeviceGraphs::Replay(int64_t graph) const {
  const auto count = static_cast<int64_t>(impl_->graphs.size());
  NWOR_CHECK(graph >= 0 && graph < count, "graph: got ", graph, ", expected one of ", count);
  const Impl::Captured& captured = impl_->graphs[graph];
  captured.graph->replay();
  return captured.results;
}

#else

struct DeviceGraphs::Impl {};

DeviceGraphs::DeviceGraphs(at::Device device) {
  NWOR_CHECK(false, "device: got ", device.str(),
             ", expected a CUDA device and a library that was built with CUDA");
}

int64_t DeviceGraphs::Capture(const Work&) { return -1; }

const std::vector<at::Tensor>& DeviceGraphs::Replay(int64_t) const {
  static const std::vector<at::Tensor> none;
  return none;
}

#endif

DeviceGraphs::~DeviceGraphs() = default;

}  // namespace nwor
