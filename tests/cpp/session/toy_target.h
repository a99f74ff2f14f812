#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kv_interceptor/interceptor.h"
#include "session/session_batch.h"
#include "session/session_store.h"

// A target whose next token depends on every token before it, and which knows those only from the
// cache pages and the mask it is given: K holds a token and its position, V the same negated. A
// wrong slot, page, mask or position shows as a failure or as another token.

namespace nwor {

using Tokens = std::vector<int64_t>;

class ToyTarget {
 public:
  static constexpr int64_t kVocab = 50;
  static constexpr int kLayers = 2;

  explicit ToyTarget(int64_t num_pages = 64, int64_t page_size = 4, NworConfig config = {})
      : page_size_(page_size), interceptor_(std::move(config)) {
    for (int layer = 0; layer < kLayers; ++layer) {
      // Poisoned: nobody may read what was never written.
      keys_.push_back(at::full({num_pages, page_size, 1, 64}, NAN));
      values_.push_back(at::full({num_pages, page_size, 1, 64}, NAN));
      interceptor_.BindLayer(Concat("layer.", layer), keys_[layer], values_[layer]);
    }
  }

  // The reference: plain decoding.
  static int64_t Next(const Tokens& sequence) {
    uint64_t hash = 1469598103934665603u;
    for (const int64_t token : sequence) {
      hash = (hash ^ static_cast<uint64_t>(token + 1)) * 1099511628211u;
    }
    return static_cast<int64_t>((hash >> 32) % kVocab);
  }

  Interceptor& interceptor() { return interceptor_; }
  int64_t bytes_per_page() const { return kLayers * 2 * page_size_ * 64 * 4; }

  at::Tensor Forward(const SessionBatch& batch) {
    const at::Tensor rows = at::zeros({batch.tokens.size(0), 1, 64});
    rows.select(1, 0).select(1, 0).copy_(batch.tokens);
    rows.select(1, 0).select(1, 1).copy_(batch.positions);
    for (int layer = 0; layer < kLayers; ++layer) {
      interceptor_.Write(Concat("layer.", layer), rows, -rows, batch.slot_mapping, std::nullopt,
                         batch.epoch);
    }
    at::Tensor out = at::empty({batch.tokens.size(0)}, at::kLong);
    const auto starts = batch.query_start.accessor<int32_t, 1>();
    const auto prefix = batch.prefix_lens.accessor<int32_t, 1>();
    for (int64_t b = 0; b < batch.prefix_lens.size(0); ++b) {
      Tokens cached;
      for (int64_t i = 0; i < prefix[b]; ++i) cached.push_back(ReadCached(batch, b, i));
      for (int64_t row = starts[b]; row < starts[b + 1]; ++row) {
        Tokens seen = cached;
        for (int64_t other = starts[b]; other < starts[b + 1]; ++other) {
          if (!Visible(batch, row, other - starts[b], other)) continue;
          const auto position = batch.positions[other].item<int64_t>();
          EXPECT_EQ(position, static_cast<int64_t>(seen.size())) << "row " << other;
          seen.push_back(batch.tokens[other].item<int64_t>());
        }
        out[row] = Next(seen);
      }
    }
    return out;
  }

  SessionForward AsForward() {
    return [this](const SessionBatch& batch) { return Forward(batch); };
  }

 private:
  int64_t ReadCached(const SessionBatch& batch, int64_t b, int64_t position) const {
    const int64_t page = batch.block_table[b][position / page_size_].item<int32_t>();
    int64_t token = -1;
    for (int layer = 0; layer < kLayers; ++layer) {
      const float* key = keys_[layer][page][position % page_size_][0].const_data_ptr<float>();
      const float* value = values_[layer][page][position % page_size_][0].const_data_ptr<float>();
      EXPECT_EQ(key[1], static_cast<float>(position)) << "layer " << layer;
      EXPECT_EQ(value[0], -key[0]);
      if (layer > 0) {
        EXPECT_EQ(static_cast<int64_t>(key[0]), token);
      }
      token = static_cast<int64_t>(key[0]);
    }
    return token;
  }

  static bool Visible(const SessionBatch& batch, int64_t row, int64_t bit, int64_t other) {
    if (!batch.tree_mask.defined()) return other <= row;
    const auto word = batch.tree_mask[row][bit / 64].item<int64_t>();
    return ((static_cast<uint64_t>(word) >> (bit % 64)) & 1) != 0;
  }

  const int64_t page_size_;
  Interceptor interceptor_;
  std::vector<at::Tensor> keys_, values_;
};

// A client that keeps its own sequence and never looks at the server's.
struct ToyClient {
  std::string session;
  Tokens sequence;         // all tokens, the last one not cached
  int64_t cached_len = 0;  // as the last result said

  VerifyRequest Ask(const DraftTree& tree) const {
    return {session, tree, {sequence.begin() + cached_len, sequence.end()}, cached_len, 0};
  }
  VerifyRequest Ask(const Tokens& drafts) const {
    DraftTree tree{{sequence.back()}, {}};
    tree.tokens.insert(tree.tokens.end(), drafts.begin(), drafts.end());
    return Ask(tree);
  }
  void Take(const VerifyResult& result) {
    sequence.insert(sequence.end(), result.tokens.begin(), result.tokens.end());
    EXPECT_EQ(result.length, static_cast<int64_t>(sequence.size()));
    cached_len = result.length;
    sequence.push_back(result.next_token);
  }
  // The first `count` tokens that plain decoding would give.
  Tokens RightDrafts(int64_t count) const {
    Tokens all = sequence;
    for (int64_t i = 0; i < count; ++i) all.push_back(ToyTarget::Next(all));
    return {all.end() - count, all.end()};
  }
  // Every token behind the prompt must be what plain decoding gives.
  void ExpectPlainDecoding(int64_t prompt_len) const {
    Tokens plain(sequence.begin(), sequence.begin() + prompt_len);
    while (plain.size() < sequence.size()) plain.push_back(ToyTarget::Next(plain));
    EXPECT_EQ(sequence, plain) << "session " << session;
  }
};

}  // namespace nwor
