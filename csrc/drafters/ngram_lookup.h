#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "base/export.h"

// Guesses from texts that lie on the device: what followed a text's last tokens the last time they
// stood in it. Nothing is kept between two lookups, and nothing is read on the host.

namespace nwor {

struct NgramLengths {
  int64_t min_tokens = 2;  // fewer tokens in common are no match
  int64_t max_tokens = 5;  // more are not told apart
};

// guesses [B, count] int64 and tokens in common [B] int32. The longest match counts, of equal ones
// the latest. Guesses that run into the text's end go on with what follows the match. Where nothing
// matches (0 tokens in common) they are the text's last token, and 0 where there is no text.
//   text [R, capacity] int32, tokens next to each other
//   rows [B] int32: the row of each request; outside of 0 .. R-1 it has no text
//   lens [B] int32: tokens of its text, cut to the capacity
// Throws Error unless 1 <= min_tokens <= max_tokens <= 16, count >= 1, capacity < 2^27.
NWOR_EXPORT std::pair<at::Tensor, at::Tensor> NgramLookup(const at::Tensor& text,
                                                          const at::Tensor& rows,
                                                          const at::Tensor& lens,
                                                          const NgramLengths& lengths,
                                                          int64_t count);

}  // namespace nwor
