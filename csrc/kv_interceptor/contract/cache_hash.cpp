#include "kv_interceptor/contract/cache_hash.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "base/tensor_layout.h"
#include "kv_interceptor/stage/stage.h"

namespace nwor {
namespace {

// Pages copied from a GPU at once: bounded host memory, few copies.
constexpr int64_t kBytesPerCopy = 64 << 20;

uint64_t Mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9fb21c651e98df25ULL;
  return hash ^ (hash >> 29);
}

// The bytes of some pages of K or V, [page, token, head, byte], where they lie.
at::Tensor PageBytes(const at::Device& device, const void* base, const CacheGeometry& geometry,
                     const KvStrides& strides, int64_t first_page, int64_t num_pages) {
  const int64_t bytes = ElementBytes(geometry.dtype);
  const auto* first = static_cast<const std::byte*>(base) + first_page * strides.page * bytes;
  return at::from_blob(
      const_cast<std::byte*>(first),
      {num_pages, geometry.page_size, geometry.num_heads, geometry.head_dim * bytes},
      {strides.page * bytes, strides.token * bytes, strides.head * bytes, 1},
      at::TensorOptions().dtype(at::kByte).device(device));
}

// Some pages of K or V, readable on the host.
struct HostPages {
  at::Tensor owner;  // keeps a copy alive
  const std::byte* data = nullptr;
  KvStrides strides;  // in elements
};

HostPages ReadPages(const at::Device& device, const void* base, const CacheGeometry& geometry,
                    const KvStrides& strides, int64_t first_page, int64_t num_pages) {
  const at::Tensor view = PageBytes(device, base, geometry, strides, first_page, num_pages);
  if (device.is_cpu()) return {{}, static_cast<const std::byte*>(view.const_data_ptr()), strides};
  const int64_t tokens = geometry.page_size, heads = geometry.num_heads, dim = geometry.head_dim;
  at::Tensor copy = view.contiguous().cpu();
  const auto* data = static_cast<const std::byte*>(copy.const_data_ptr());
  return {std::move(copy), data, {tokens * heads * dim, heads * dim, dim}};
}

// Reads one side of a run of pages: K's strides for K, V's for V.
class PageReader {
 public:
  PageReader(const Interceptor::LayerInfo& layer, int64_t first_page, int64_t num_pages)
      : geometry_(layer.layout.geometry), first_page_(first_page) {
    const at::Device device = layer.key_cache.device();
    key_ = ReadPages(device, layer.layout.key, geometry_, geometry_.key, first_page, num_pages);
    value_ =
        ReadPages(device, layer.layout.value, geometry_, geometry_.value, first_page, num_pages);
  }

  SlotHash Hash(int64_t slot) const { return {HashSide(key_, slot), HashSide(value_, slot)}; }

 private:
  uint64_t HashSide(const HostPages& side, int64_t slot) const {
    const int64_t bytes = ElementBytes(geometry_.dtype);
    const int64_t page = slot / geometry_.page_size - first_page_;
    const int64_t token = slot % geometry_.page_size;
    return HashRuns(side.data + (page * side.strides.page + token * side.strides.token) * bytes,
                    geometry_.num_heads, geometry_.head_dim * bytes, side.strides.head * bytes);
  }

  const CacheGeometry& geometry_;
  int64_t first_page_;
  HostPages key_, value_;
};

std::vector<SlotHash> HashContiguousRows(const at::Tensor& key, const at::Tensor& value) {
  const int64_t heads = key.size(1), run_bytes = key.size(2) * key.element_size();
  const auto* k = static_cast<const std::byte*>(key.const_data_ptr());
  const auto* v = static_cast<const std::byte*>(value.const_data_ptr());
  std::vector<SlotHash> hashes(key.size(0));
  for (size_t row = 0; row < hashes.size(); ++row) {
    const int64_t offset = static_cast<int64_t>(row) * heads * run_bytes;
    hashes[row] = {HashRuns(k + offset, heads, run_bytes, run_bytes),
                   HashRuns(v + offset, heads, run_bytes, run_bytes)};
  }
  return hashes;
}

at::Tensor ScalesOnHost(const float* scales, int32_t count, const at::Device& device) {
  if (scales == nullptr) return {};
  return at::from_blob(const_cast<float*>(scales), {count},
                       at::TensorOptions().dtype(at::kFloat).device(device))
      .cpu();
}

}  // namespace

uint64_t HashRuns(const std::byte* data, int64_t num_runs, int64_t run_bytes,
                  int64_t stride_bytes) {
  // Four chains side by side: one alone waits for its own multiplications most of the time.
  constexpr int64_t kLanes = 4, kWordBytes = 8;
  std::array<uint64_t, kLanes> lanes = {0x243f6a8885a308d3ULL, 0x13198a2e03707344ULL,
                                        0xa4093822299f31d0ULL, 0x082efa98ec4e6c89ULL};
  for (int64_t run = 0; run < num_runs; ++run) {
    const std::byte* at = data + run * stride_bytes;
    int64_t done = 0;
    for (; done + kLanes * kWordBytes <= run_bytes; done += kLanes * kWordBytes) {
      std::array<uint64_t, kLanes> words;
      std::memcpy(words.data(), at + done, sizeof(words));
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = Mix(lanes[lane], words[lane]);
    }
    for (; done < run_bytes; done += kWordBytes) {
      uint64_t word = 0;
      std::memcpy(&word, at + done, static_cast<size_t>(std::min(kWordBytes, run_bytes - done)));
      lanes[0] = Mix(lanes[0], word);
    }
  }
  return Mix(Mix(Mix(lanes[0], lanes[1]), lanes[2]), lanes[3]);
}

CacheHashes HashCache(const Interceptor::LayerInfo& layer) {
  const CacheGeometry& geometry = layer.layout.geometry;
  const int64_t page_bytes =
      std::max<int64_t>(1, int64_t{geometry.page_size} * geometry.num_heads * geometry.head_dim *
                               ElementBytes(geometry.dtype));
  const int64_t pages_per_copy = std::max<int64_t>(1, kBytesPerCopy / page_bytes);
  CacheHashes hashes;
  hashes.slots.reserve(geometry.num_slots());
  hashes.pages.reserve(geometry.num_pages);
  for (int64_t first = 0; first < geometry.num_pages; first += pages_per_copy) {
    const int64_t num_pages = std::min(pages_per_copy, geometry.num_pages - first);
    const PageReader pages(layer, first, num_pages);
    for (int64_t page = first; page < first + num_pages; ++page) {
      uint64_t page_hash = 0;
      for (int64_t token = 0; token < geometry.page_size; ++token) {
        const SlotHash slot = pages.Hash(page * geometry.page_size + token);
        page_hash = Mix(Mix(page_hash, slot.key), slot.value);
        hashes.slots.push_back(slot);
      }
      hashes.pages.push_back(page_hash);
    }
  }
  return hashes;
}

std::vector<SlotHash> HashSlots(const Interceptor::LayerInfo& layer,
                                const std::vector<int64_t>& slots) {
  if (slots.empty()) return {};
  const CacheGeometry& geometry = layer.layout.geometry;
  const at::Device device = layer.key_cache.device();
  const at::Tensor slot = at::tensor(slots, at::kLong).to(device);
  const at::Tensor page = at::floor_divide(slot, geometry.page_size);
  const at::Tensor token = at::remainder(slot, geometry.page_size);
  // Gathered where they lie: a copy for every slot would wait for the device as often.
  const auto rows = [&](const void* base, const KvStrides& strides) {
    return PageBytes(device, base, geometry, strides, 0, geometry.num_pages)
        .index({page, token})
        .cpu();
  };
  return HashContiguousRows(rows(layer.layout.key, geometry.key),
                            rows(layer.layout.value, geometry.value));
}

RowHashes HashRows(const Interceptor::LayerInfo& layer, const at::Tensor& key,
                   const at::Tensor& value) {
  const at::Tensor k = key.cpu().contiguous(), v = value.cpu().contiguous();
  RowHashes hashes;
  hashes.staged = HashContiguousRows(k, v);
  CacheGeometry geometry = layer.layout.geometry;
  const DType row_dtype = RowDType(k, "key");
  if (row_dtype == geometry.dtype) {
    hashes.cached = hashes.staged;
    return hashes;
  }
  // A small contiguous cache of one token per page takes the rows as a direct write would.
  const int64_t num_rows = k.size(0), row_size = k.size(1) * k.size(2);
  const auto options = at::TensorOptions().dtype(ToScalarType(geometry.dtype));
  const at::Tensor cached_key = at::empty(k.sizes(), options);
  const at::Tensor cached_value = at::empty(v.sizes(), options);
  const at::Device device = layer.key_cache.device();
  const KvScales& scales = layer.layout.scales;
  const at::Tensor k_scale = ScalesOnHost(scales.key, scales.key_count, device);
  const at::Tensor v_scale = ScalesOnHost(scales.value, scales.value_count, device);
  std::vector<int64_t> slots(num_rows);
  std::iota(slots.begin(), slots.end(), int64_t{0});
  const std::vector<int32_t> not_staged(num_rows, -1);

  StageParams params;
  params.rows = {k.data_ptr(), v.data_ptr(), row_size, k.size(2), row_size, k.size(2)};
  geometry.num_pages = num_rows;
  geometry.page_size = 1;
  geometry.key = geometry.value = {row_size, row_size, k.size(2)};
  params.cache = {cached_key.data_ptr(), cached_value.data_ptr(), geometry, {}};
  params.cache.scales = {k_scale.defined() ? k_scale.const_data_ptr<float>() : nullptr,
                         v_scale.defined() ? v_scale.const_data_ptr<float>() : nullptr,
                         scales.key_count, scales.value_count};
  params.slot_mapping = slots.data();
  params.stage_rows = not_staged.data();
  params.num_rows = static_cast<int32_t>(num_rows);
  params.dtype = row_dtype;
  StageCpu(params);
  hashes.cached = HashContiguousRows(cached_key, cached_value);
  return hashes;
}

}  // namespace nwor
