#pragma once

#include "attention/verify.h"

// In-flight rows and lengths as a FlashAttention kernel gets them when it has the prefills of a
// batch. Made on the device, waits for nothing.

namespace nwor {

// [rows] int64: the request each row belongs to; the last one for rows of none.
at::Tensor RequestOfRows(const at::Tensor& query_start, int64_t rows);

// [B] bool: the requests with more than kPrefillRows rows.
at::Tensor IsPrefill(const at::Tensor& query_start);

// K and V of the rows, apart.
struct SpacedRows {
  at::Tensor key, value;  // [rows, Hkv, D], zeros between requests
  at::Tensor start;       // [B + 1] int32
  at::Tensor lens;        // [B] int32
};

// FlashAttention-3 reads V in whole tiles, past a request's last row: what is not finite in the
// next request would reach this one. So zeros come behind each request; with `only_prefill` behind
// those alone, as the others' results are not used.
SpacedRows SpaceRows(const VerifyArguments& arguments, bool only_prefill);

}  // namespace nwor
