#pragma once

#include <cstdint>

// Plain types shared by every subsystem. No torch, no CUDA: kernels include this file.

namespace nwor {

// Element types of K/V rows and caches. kFloat8E4M3 is a cache type only: rows are staged in the
// model's own type and quantised when they enter the cache.
enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3 };

constexpr int ElementBytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat8E4M3:
      return 1;
  }
  return 0;
}

constexpr const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
  }
  return "unknown";
}

// A CUDA stream as kernels' launch functions take it: cudaStream_t without its header.
using StreamHandle = void*;

}  // namespace nwor
