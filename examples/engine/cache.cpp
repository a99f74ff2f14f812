#include "cache.h"

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iostream>
#include <limits>

#include "base/check.h"

namespace engine {

PagedCache::PagedCache(const ModelConfig& model, int64_t num_pages, int64_t page_size,
                       at::Device device, at::ScalarType dtype, const nwor::NworConfig& config,
                       bool check_contract)
    : slots(num_pages, page_size), interceptor(config), device(device) {
  const std::vector<int64_t> sizes = {num_pages, page_size, model.num_kv_heads, model.head_dim};
  // Under check the cache starts as NaN: whoever reads a slot that was never written shows at once.
  const double fill = check_contract ? std::numeric_limits<double>::quiet_NaN() : 0.0;
  try {
    for (int64_t layer = 0; layer < model.num_layers; ++layer) {
      keys.push_back(at::full(sizes, fill, at::TensorOptions(device).dtype(dtype)));
      values.push_back(at::full_like(keys.back(), fill));
    }
  } catch (const c10::Error&) {
    const double bytes = 2.0 * model.num_layers * num_pages * page_size * model.num_kv_heads *
                         model.head_dim * static_cast<double>(c10::elementSize(dtype));
    throw nwor::Error(nwor::Concat("cache_tokens: got ", num_pages * page_size, ", which take ",
                                   bytes / (1 << 30), " GiB on ", device.str(),
                                   " that are not free; lower cache_tokens or max_batch_size"));
  }
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
