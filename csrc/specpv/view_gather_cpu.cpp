#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"
#include "specpv/view_gather_params.h"

namespace nwor {
namespace {

// One list of one request: the blocks that hold tokens yet to be copied.
struct List {
  int32_t layer, request, head;
};

const int32_t* BlocksOf(const GatherParams& params, const List& list) {
  const int64_t row =
      (int64_t{list.layer} * params.num_requests + list.request) * params.geometry.num_heads +
      list.head;
  return params.blocks + row * params.max_blocks;
}

void CheckList(const GatherParams& params, const List& list) {
  const int32_t parts = params.geometry.page_size / params.block_size;
  const int32_t* blocks = BlocksOf(params, list);
  const int32_t begin = params.held[list.request] / params.block_size;
  const int32_t end = (params.lens[list.request] + params.block_size - 1) / params.block_size;
  for (int32_t i = begin; i < end; ++i) {
    NWOR_CHECK(blocks[i] >= 0 && blocks[i] < params.geometry.num_pages * parts, "blocks[",
               params.first_layer + list.layer, ", ", list.request, ", ", list.head, ", ", i,
               "]: got ", blocks[i], ", expected 0 to ", params.geometry.num_pages * parts - 1);
  }
}

// A request without a length is left alone, whatever it holds.
bool HasTokensToCopy(const GatherParams& params, int32_t request) {
  return params.lens[request] >= 0 && params.lens[request] > params.held[request];
}

void CopyList(const GatherParams& params, const List& list) {
  if (!HasTokensToCopy(params, list.request)) return;
  const CacheGeometry& geometry = params.geometry;
  const GatherLayer& layer = params.layers[list.layer];
  const int32_t parts = geometry.page_size / params.block_size;
  const int32_t* blocks = BlocksOf(params, list);
  const int64_t bytes = ElementBytes(geometry.dtype);
  for (int32_t token = params.held[list.request]; token < params.lens[list.request]; ++token) {
    const int32_t block = blocks[token / params.block_size];
    const int64_t page = block / parts;
    const int64_t offset = block % parts * params.block_size + token % params.block_size;
    const int64_t at = list.layer * params.layer_stride + list.request * params.request_stride +
                       list.head * params.head_stride + token * params.token_stride;
    const auto copy = [&](const void* cache, const KvStrides& strides, void* view) {
      const int64_t from = page * strides.page + offset * strides.token + list.head * strides.head;
      std::memcpy(static_cast<std::byte*>(view) + at * bytes,
                  static_cast<const std::byte*>(cache) + from * bytes,
                  static_cast<size_t>(geometry.head_dim * bytes));
    };
    copy(layer.key, geometry.key, params.keys);
    copy(layer.value, geometry.value, params.values);
  }
}

int64_t NumLists(const GatherParams& params) {
  return int64_t{params.num_layers} * params.num_requests * params.geometry.num_heads;
}

List ListAt(const GatherParams& params, int64_t index) {
  const int32_t heads = params.geometry.num_heads;
  return {static_cast<int32_t>(index / heads / params.num_requests),
          static_cast<int32_t>(index / heads % params.num_requests),
          static_cast<int32_t>(index % heads)};
}

}  // namespace

void CheckGatherCpu(const GatherParams& params) {
  for (int32_t b = 0; b < params.num_requests; ++b) {
    if (params.lens[b] < 0) continue;
    const int32_t most =
        std::min<int64_t>(params.capacity, int64_t{params.max_blocks} * params.block_size);
    NWOR_CHECK(params.lens[b] <= most, "lens[", b, "]: got ", params.lens[b], ", expected at most ",
               most, ", the tokens that blocks and keys have room for");
    NWOR_CHECK(params.held[b] >= 0, "held[", b, "]: got ", params.held[b], ", expected 0 or more");
  }
  for (int64_t i = 0; i < NumLists(params); ++i) {
    const List list = ListAt(params, i);
    if (HasTokensToCopy(params, list.request)) CheckList(params, list);
  }
}

void GatherViewCpu(const GatherParams& params) {
  const int64_t num_lists = NumLists(params);
  std::atomic<int64_t> next{0};
  RunOnTorchThreads(num_lists, [&] {
    for (int64_t i = next.fetch_add(1); i < num_lists; i = next.fetch_add(1)) {
      CopyList(params, ListAt(params, i));
    }
  });
  for (int32_t b = 0; params.last && b < params.num_requests; ++b) {
    if (params.lens[b] >= 0) params.held[b] = params.lens[b];
  }
}

}  // namespace nwor
