#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/params.h"

// Finds the prefix tokens of a request: in pages, in a partial view's blocks of pages, or in a
// compact view. Reads only the table entries that it needs.

namespace nwor::cpu {

enum class PrefixKind : uint8_t { kPages, kBlocks, kCompact };

// Decided by the lengths: a view of size 0 has no memory but is still a view.
inline PrefixKind KindOfPrefix(const VerifyParams& params, int request) {
  if (params.compact.lens != nullptr && params.compact.lens[request] >= 0) {
    return PrefixKind::kCompact;
  }
  if (params.view.num_blocks != nullptr && params.view.num_blocks[request] >= 0) {
    return PrefixKind::kBlocks;
  }
  return PrefixKind::kPages;
}

inline int64_t PrefixTokens(const VerifyParams& params, int request) {
  switch (KindOfPrefix(params, request)) {
    case PrefixKind::kCompact:
      return params.compact.lens[request];
    case PrefixKind::kBlocks:
      return params.view.view_lens[request];
    case PrefixKind::kPages:
      break;
  }
  return params.prefix_lens[request];
}

class PrefixReader {
 public:
  PrefixReader(const VerifyParams& params, int request)
      : params_(params), kind_(KindOfPrefix(params, request)), request_(request) {
    const CacheGeometry& cache = params.cache.geometry;
    run_tokens_ = kind_ == PrefixKind::kBlocks ? params.view.block_size : cache.page_size;
  }

  DType dtype() const {
    return kind_ == PrefixKind::kCompact ? params_.dtype : params_.cache.geometry.dtype;
  }

  // Addresses of a KV head's K and V for tokens first .. first + count - 1.
  void Read(int head, int64_t first, int count, const std::byte** keys,
            const std::byte** values) const {
    if (kind_ == PrefixKind::kCompact) {
      ReadCompact(head, first, count, keys, values);
      return;
    }
    int done = 0;
    while (done < count) {
      const int64_t token = first + done;
      const int64_t run = token / run_tokens_;
      const int offset = static_cast<int>(token - run * run_tokens_);
      const int left = run_tokens_ - offset;
      const int take = left < count - done ? left : count - done;
      ReadRun(head, run, offset, take, keys + done, values + done);
      done += take;
    }
  }

 private:
  // `count` tokens of one page or view block, from its token `offset` on.
  void ReadRun(int head, int64_t run, int offset, int count, const std::byte** keys,
               const std::byte** values) const {
    const CacheGeometry& cache = params_.cache.geometry;
    int64_t page = 0;
    int64_t token = offset;
    if (kind_ == PrefixKind::kBlocks) {
      const int64_t row = static_cast<int64_t>(request_) * params_.num_kv_heads + head;
      const int64_t block = params_.view.blocks[row * params_.view.max_blocks + run];
      const int64_t parts = cache.page_size / run_tokens_;
      page = block / parts;
      token += (block - page * parts) * run_tokens_;
    } else {
      page = params_.block_table[request_ * params_.table_stride + run];
    }
    const int64_t bytes = ElementBytes(cache.dtype);
    const std::byte* key = static_cast<const std::byte*>(params_.cache.key) +
                           Offset(cache.key, page, token, head) * bytes;
    const std::byte* value = static_cast<const std::byte*>(params_.cache.value) +
                             Offset(cache.value, page, token, head) * bytes;
    for (int i = 0; i < count; ++i) {
      keys[i] = key + i * cache.key.token * bytes;
      values[i] = value + i * cache.value.token * bytes;
    }
  }

  static int64_t Offset(const KvStrides& strides, int64_t page, int64_t token, int64_t head) {
    return page * strides.page + token * strides.token + head * strides.head;
  }

  void ReadCompact(int head, int64_t first, int count, const std::byte** keys,
                   const std::byte** values) const {
    const CompactViewParams& view = params_.compact;
    const int64_t bytes = ElementBytes(params_.dtype);
    const int64_t base =
        request_ * view.batch_stride + head * view.head_stride + first * view.token_stride;
    for (int i = 0; i < count; ++i) {
      const int64_t offset = (base + i * view.token_stride) * bytes;
      keys[i] = static_cast<const std::byte*>(view.keys) + offset;
      values[i] = static_cast<const std::byte*>(view.values) + offset;
    }
  }

  const VerifyParams& params_;
  PrefixKind kind_;
  int request_;
  int run_tokens_ = 0;
};

}  // namespace nwor::cpu
