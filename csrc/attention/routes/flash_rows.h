#pragma once

#include "attention/verify.h"

// Arranges the in-flight rows of a batch for FlashAttention's kernels, on the device. Nothing waits
// for it.

namespace nwor {

// [rows] int64: the request of each row; the last request for rows that belong to none.
at::Tensor RequestOfRows(const at::Tensor& query_start, int64_t rows);

// [B] bool: the requests with more than kPrefillRows rows.
at::Tensor IsPrefill(const at::Tensor& query_start);

// K and V of the rows, with padding between requests.
struct PaddedRows {
  at::Tensor key, value;  // [rows, Hkv, D], zeros between requests
  at::Tensor start;       // [B + 1] int32
  at::Tensor lens;        // [B] int32
};

// Pads every request's K and V with zero rows. FlashAttention-3 reads V in whole tiles, past a
// request's last row: values of the next request that are not finite would otherwise reach this
// one. With `only_prefill` only prefills are padded, because the other results are not used.
PaddedRows PadRows(const VerifyArguments& arguments, bool only_prefill);

}  // namespace nwor
