#pragma once

#include <cstdint>

#include "attention/cpu/amx.h"
#include "attention/cpu/kernels.h"
#include "base/simd/simd.h"

// Packs a chunk's queries as float, interleaved for tiles as tile.h describes. Compiled once per
// instruction set, see kernel.h.

namespace nwor::NWOR_SIMD_NAMESPACE {

template <typename T>
void PackQueriesAs(const VerifyParams& params, const cpu::RowChunk& rows, cpu::Scratch& scratch) {
  const int head_dim = params.head_dim;
  const int head_rows = rows.head_tiles() * cpu::kTileRows;
  for (int i = 0; i < rows.num_heads * head_rows; ++i) {
    const int tile = i / cpu::kTileRows;
    float* to = scratch.queries + static_cast<int64_t>(tile) * cpu::kTileRows * head_dim +
                i % cpu::kTileRows * kLanes;
    const int packed = i % head_rows;
    if (packed >= rows.packed()) {
      for (int d = 0; d < head_dim; d += kLanes) {
        Store(to + d * cpu::kTileRows, Vec{});
      }
      continue;
    }
    const int64_t row = rows.request_row + rows.first + packed / rows.group;
    const int64_t head = (rows.first_head + i / head_rows) * rows.group + packed % rows.group;
    const T* from = static_cast<const T*>(params.query) + row * params.query_strides.row +
                    head * params.query_strides.head;
    for (int d = 0; d < head_dim; d += kLanes) {
      Store(to + d * cpu::kTileRows, LoadAs(from + d));
    }
  }
}

void PackQueries(const VerifyParams& params, const cpu::RowChunk& rows, cpu::Scratch& scratch) {
  switch (params.dtype) {
    case DType::kFloat16:
      return PackQueriesAs<Half>(params, rows, scratch);
    case DType::kBFloat16:
      return PackQueriesAs<BFloat16>(params, rows, scratch);
    default:
      return PackQueriesAs<float>(params, rows, scratch);
  }
}

#if NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
void PackQueriesAndPairs(const VerifyParams& params, const cpu::RowChunk& rows,
                         cpu::Scratch& scratch) {
  PackQueries(params, rows, scratch);
  if (params.dtype == DType::kBFloat16) {
    cpu::Amx::PackQueries(rows, params.head_dim, scratch);
  }
}
#endif

}  // namespace nwor::NWOR_SIMD_NAMESPACE
