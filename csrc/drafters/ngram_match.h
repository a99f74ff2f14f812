#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "base/types.h"

// What one lookup looks for, as plain pointers; shared by the CPU's way and the GPU's.

namespace nwor {

constexpr int32_t kMaxNgramTokens = 16;
// Texts are shorter, so that a match fits a word: tokens in common above, its end below.
constexpr int32_t kNgramPositionBits = 27;

struct NgramLookupParams {
  const int32_t* text = nullptr;  // [num_rows, capacity], rows text_stride apart
  int64_t text_stride = 0;
  int32_t num_rows = 0;
  int32_t capacity = 0;
  const int32_t* rows = nullptr;  // [num_requests]
  const int32_t* lens = nullptr;  // [num_requests]
  int32_t num_requests = 0;
  int32_t min_tokens = 0;
  int32_t max_tokens = 0;
  int32_t count = 0;           // guesses of a request
  int64_t* guesses = nullptr;  // [num_requests, count]
  int32_t* matched = nullptr;  // [num_requests]
  uint32_t* best = nullptr;    // [num_requests], of 0: scratch of the GPU's way
  StreamHandle stream = nullptr;
};

struct NgramText {
  const int32_t* tokens = nullptr;
  int32_t size = 0;  // 0: there is none
};

NWOR_HOST_DEVICE inline NgramText TextOf(const NgramLookupParams& params, int32_t request) {
  const int32_t row = params.rows[request];
  if (row < 0 || row >= params.num_rows) return {};
  const int32_t size = params.lens[request];
  const int32_t kept = size < params.capacity ? size : params.capacity;
  return {params.text + row * params.text_stride, kept > 0 ? kept : 0};
}

// Tokens that end at `end` and are the text's last ones as well, at most `max_tokens`.
NWOR_HOST_DEVICE inline int32_t TokensInCommon(const NgramText& text, int32_t end,
                                               int32_t max_tokens) {
  int32_t common = 0;
  while (common < max_tokens && common <= end &&
         text.tokens[end - common] == text.tokens[text.size - 1 - common]) {
    ++common;
  }
  return common;
}

// The larger word is the better match: more tokens in common, then the later one. 0: no match.
NWOR_HOST_DEVICE inline uint32_t MatchWord(int32_t common, int32_t end) {
  return static_cast<uint32_t>(common) << kNgramPositionBits | static_cast<uint32_t>(end);
}

NWOR_HOST_DEVICE inline int32_t CommonOf(uint32_t word) {
  return static_cast<int32_t>(word >> kNgramPositionBits);
}

// Guess `i` after the text. What follows the match runs into the text's end and goes on with
// itself, so that a text that repeats is repeated further. Without a match it is the last token.
NWOR_HOST_DEVICE inline int64_t GuessAt(const NgramText& text, uint32_t word, int32_t i) {
  if (text.size == 0) return 0;
  const int32_t last = text.size - 1;
  if (word == 0) return text.tokens[last];
  const auto end = static_cast<int32_t>(word & ((uint32_t{1} << kNgramPositionBits) - 1));
  return text.tokens[end + 1 + i % (last - end)];
}

void LaunchNgramLookup(const NgramLookupParams& params);  // CUDA builds only

}  // namespace nwor
