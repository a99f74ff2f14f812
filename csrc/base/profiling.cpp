#include "base/profiling.h"

#if __has_include(<nvtx3/nvToolsExt.h>)

#include <nvtx3/nvToolsExt.h>

#include <array>
#include <atomic>

namespace nwor {
namespace {

constexpr std::array kRangeNames = {"nwor.stage", "nwor.commit", "nwor.attend", "nwor.refresh"};
static_assert(kRangeNames.size() == static_cast<size_t>(ProfileRange::kRefresh) + 1);

struct Domain {
  nvtxDomainHandle_t handle = nvtxDomainCreateA("nwor_specpv");
  std::array<nvtxEventAttributes_t, kRangeNames.size()> attributes{};

  Domain() {
    for (size_t i = 0; i < kRangeNames.size(); ++i) {
      attributes[i].version = NVTX_VERSION;
      attributes[i].size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
      attributes[i].messageType = NVTX_MESSAGE_TYPE_REGISTERED;
      attributes[i].message.registered = nvtxDomainRegisterStringA(handle, kRangeNames[i]);
    }
  }
};

// Null until the first range asks, then the domain, or kNoProfiler: one load tells the hot path.
const Domain* const kNoProfiler = reinterpret_cast<const Domain*>(1);
std::atomic<const Domain*> profiler{nullptr};

const Domain* FindProfiler() {
  // NVTX hands out a null domain when no tool is attached; tools attach at a process' first NVTX
  // call or never.
  static const Domain* const domain = new Domain;
  const Domain* const found = domain->handle != nullptr ? domain : kNoProfiler;
  profiler.store(found, std::memory_order_release);
  return found;
}

}  // namespace

ScopedProfileRange::ScopedProfileRange(ProfileRange range) {
  const Domain* domain = profiler.load(std::memory_order_acquire);
  if (domain == kNoProfiler) [[likely]] {
    return;
  }
  if (domain == nullptr) domain = FindProfiler();
  if (domain == kNoProfiler) return;
  nvtxDomainRangePushEx(domain->handle, &domain->attributes[static_cast<size_t>(range)]);
}

ScopedProfileRange::~ScopedProfileRange() {
  // The constructor decided already, and the decision is never taken back.
  const Domain* const domain = profiler.load(std::memory_order_acquire);
  if (domain != kNoProfiler) [[unlikely]] {
    nvtxDomainRangePop(domain->handle);
  }
}

}  // namespace nwor

#else  // a build without the CUDA toolkit has no profiler to talk to

namespace nwor {

ScopedProfileRange::ScopedProfileRange(ProfileRange range) {}
ScopedProfileRange::~ScopedProfileRange() {}

}  // namespace nwor

#endif
