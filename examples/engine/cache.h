#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "kv_interceptor/contract/contract_checker.h"
#include "kv_interceptor/interceptor.h"
#include "model.h"
#include "session/slot_allocator.h"

// K/V of all requests in pages. Three parts of the library share it: the SlotAllocator says which
// request has which page, the Interceptor is the only one that writes, and the ContractChecker, if
// asked for, compares every byte before and after each round.

namespace engine {

class PagedCache {
 public:
  // Throws nwor::Error when the memory is not there.
  PagedCache(const ModelConfig& model, int64_t num_pages, int64_t page_size, at::Device device,
             at::ScalarType dtype, const nwor::NworConfig& config, bool check_contract);

  // [requests, pages] int32 on the device. `requests`: keys of the allocator; none: a row of zeros.
  at::Tensor BlockTable(const std::vector<std::optional<int64_t>>& requests) const;

  std::vector<at::Tensor> keys, values;  // of each layer, [P, S, Hkv, D]
  std::vector<std::string> names;        // of each layer
  nwor::SlotAllocator slots;
  nwor::Interceptor interceptor;
  std::optional<nwor::ContractChecker> checker;
  const at::Device device;
};

}  // namespace engine
