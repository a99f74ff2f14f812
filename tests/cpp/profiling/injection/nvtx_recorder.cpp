// A profiler as NVTX sees one: a library named by NVTX_INJECTION64_PATH. It appends what arrives to
// the file named by NWOR_NVTX_LOG, one event a line:
//   domain <name> | push <domain> <message> | pop <domain>
// With NWOR_NVTX_CLOCK a line ends with the nanoseconds of CLOCK_REALTIME, and lines are kept until
// stdio is flushed, so that writing them takes no time of the ranges.

#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string>

namespace {

std::mutex log_mutex;

void LogWithTime(const std::string& line) {
  static std::FILE* const file = [] {
    const char* const path = std::getenv("NWOR_NVTX_LOG");
    std::FILE* const opened = path != nullptr ? std::fopen(path, "a") : nullptr;
    if (opened != nullptr) std::setvbuf(opened, nullptr, _IOFBF, 1 << 20);
    return opened;
  }();
  if (file == nullptr) return;
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  const long long ns = 1'000'000'000LL * now.tv_sec + now.tv_nsec;
  std::fprintf(file, "%s %lld\n", line.c_str(), ns);
}

void Log(const std::string& line) {
  std::lock_guard lock(log_mutex);
  static const bool with_time = std::getenv("NWOR_NVTX_CLOCK") != nullptr;
  if (with_time) {
    LogWithTime(line);
    return;
  }
  const char* const path = std::getenv("NWOR_NVTX_LOG");
  std::FILE* const file = path != nullptr ? std::fopen(path, "a") : nullptr;
  if (file == nullptr) return;
  std::fputs((line + "\n").c_str(), file);
  std::fclose(file);
}

// Handles are pointers to the names they stand for.
const char* Name(nvtxDomainHandle_t domain) {
  return domain != nullptr ? reinterpret_cast<const char*>(domain) : "default";
}

nvtxDomainHandle_t DomainCreate(const char* name) {
  Log(std::string("domain ") + name);
  return reinterpret_cast<nvtxDomainHandle_t>(strdup(name));
}

nvtxStringHandle_t RegisterString(nvtxDomainHandle_t, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(strdup(text));
}

int RangePush(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  const char* message = "an unregistered message";
  if (event->messageType == NVTX_MESSAGE_TYPE_REGISTERED) {
    message = reinterpret_cast<const char*>(event->message.registered);
  }
  Log(std::string("push ") + Name(domain) + " " + message);
  return 0;
}

int RangePop(nvtxDomainHandle_t domain) {
  Log(std::string("pop ") + Name(domain));
  return 0;
}

template <typename Function>
void Install(NvtxFunctionTable table, int id, Function* function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_export_table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  if (callbacks == nullptr) return 0;
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  if (size <= NVTX_CBID_CORE2_DomainRangePop) return 0;
  Install(table, NVTX_CBID_CORE2_DomainCreateA, &DomainCreate);
  Install(table, NVTX_CBID_CORE2_DomainRegisterStringA, &RegisterString);
  Install(table, NVTX_CBID_CORE2_DomainRangePushEx, &RangePush);
  Install(table, NVTX_CBID_CORE2_DomainRangePop, &RangePop);
  return 1;
}
