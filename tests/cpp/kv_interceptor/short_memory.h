#pragma once

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstddef>

// Makes memory run out: while one lives, no tensor on the CPU gets more than so many bytes.

namespace nwor {

class ShortMemory final : public c10::Allocator {
 public:
  explicit ShortMemory(size_t most_bytes) : most_bytes_(most_bytes) { c10::SetCPUAllocator(this); }
  ~ShortMemory() override { c10::SetCPUAllocator(real_); }
  ShortMemory(const ShortMemory&) = delete;
  ShortMemory& operator=(const ShortMemory&) = delete;

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes > most_bytes_) {
      ++num_refused_;
      C10_THROW_ERROR(Error, "injected: no memory");
    }
    return real_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  int num_refused() const { return num_refused_; }

 private:
  size_t most_bytes_;
  c10::Allocator* real_ = c10::GetCPUAllocator();
  int num_refused_ = 0;
};

}  // namespace nwor
