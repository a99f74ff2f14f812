#include "cache.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <limits>

#include "base/check.h"

namespace engine {
namespace {

// One side, K or V, of every layer. Under check it starts as NaN: whoever reads a slot that was
// never written shows at once.
std::vector<at::Tensor> Allocate(const ModelConfig& model, int64_t num_pages, int64_t page_size,
                                 at::TensorOptions options, bool check_contract) {
  const double fill = check_contract ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  const std::vector<int64_t> sizes = {num_pages, page_size, model.num_kv_heads, model.head_dim};
  // Linux hands out more memory than there is, and kills who uses it: so it is counted first.
  const double bytes = 2.0 * static_cast<double>(model.num_layers * model.num_kv_heads) *
                       static_cast<double>(model.head_dim * num_pages * page_size) *
                       static_cast<double>(options.dtype().itemsize());
  const double memory =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  std::vector<at::Tensor> layers;
  try {
    NWOR_CHECK(!options.device().is_cpu() || bytes < memory, "beyond the memory of the machine");
    for (int64_t i = 0; i < model.num_layers; ++i) layers.push_back(at::full(sizes, fill, options));
  } catch (const std::exception&) {
    throw nwor::Error(nwor::Concat("cache_tokens: got ", num_pages * page_size, ", which take ",
                                   bytes / (1 << 30), " GiB, more than is free on ",
                                   options.device().str(),
                                   "; lower cache_tokens or max_batch_size"));
  }
  return layers;
}

}  // namespace

PagedCache::PagedCache(const ModelConfig& model, int64_t num_pages, int64_t page_size,
                       at::Device device, at::ScalarType dtype, const nwor::NworConfig& config,
                       bool check_contract)
    : keys(Allocate(model, num_pages, page_size, at::TensorOptions(device).dtype(dtype),
                    check_contract)),
      values(Allocate(model, num_pages, page_size, keys[0].options(), check_contract)),
      slots(num_pages, page_size),
      interceptor(config),
      device(device) {
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    names.push_back(std::to_string(layer));
    interceptor.BindLayer(names.back(), keys[layer], values[layer]);
  }
  // What falls back is told once for each reason.
  interceptor.SetLogSink([](nwor::BypassReason reason, std::string_view detail) {
    std::cerr << "engine: staging fell back: " << nwor::Label(reason) << ": " << detail << "\n";
  });
  if (check_contract) checker.emplace(interceptor);
}

at::Tensor PagedCache::BlockTable(const std::vector<std::optional<int64_t>>& requests) const {
  std::vector<std::vector<int32_t>> pages;
  size_t longest = 1;
  for (const auto& request : requests) {
    pages.push_back(request ? slots.Pages(*request) : std::vector<int32_t>());
    longest = std::max(longest, pages.back().size());
  }
  const at::Tensor table =
      at::zeros({static_cast<int64_t>(pages.size()), static_cast<int64_t>(longest)},
                at::TensorOptions(at::kInt));
  for (size_t row = 0; row < pages.size(); ++row) {
    std::copy(pages[row].begin(), pages[row].end(), table.data_ptr<int32_t>() + row * longest);
  }
  return table.to(device);
}

}  // namespace engine
