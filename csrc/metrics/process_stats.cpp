#include "metrics/process_stats.h"

#include <dirent.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace nwor {
namespace {

std::optional<double> ResidentMemoryBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total_pages = 0;
  int64_t resident_pages = 0;
  if (!(file >> total_pages >> resident_pages)) return std::nullopt;
  return static_cast<double>(resident_pages) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

std::optional<double> CpuSeconds() {
  timespec time{};
  if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) != 0) return std::nullopt;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

std::optional<double> OpenFds() {
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return std::nullopt;
  int count = 0;
  while (const dirent* entry = readdir(folder)) count += entry->d_name[0] != '.';
  closedir(folder);
  return count - 1;  // without the one that opendir has opened
}

std::optional<double> BootTimeSeconds() {
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string name;
    double seconds = 0;
    if (fields >> name >> seconds && name == "btime") return seconds;
  }
  return std::nullopt;
}

std::optional<double> StartTimeSeconds() {
  std::ifstream file("/proc/self/stat");
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  // The second field is the program's name in brackets and may hold spaces and brackets itself.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  constexpr int kFieldsBeforeStartTime = 19;  // fields 3..21 of proc(5)
  std::string skipped;
  for (int i = 0; i < kFieldsBeforeStartTime; ++i) fields >> skipped;
  double ticks_after_boot = 0;
  const std::optional<double> boot = BootTimeSeconds();
  if (!(fields >> ticks_after_boot) || !boot) return std::nullopt;
  return *boot + ticks_after_boot / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

ProcessStats ReadProcessStats() noexcept {
  try {
    return {ResidentMemoryBytes(), CpuSeconds(), OpenFds(), StartTimeSeconds()};
  } catch (...) {
    return {};  // out of memory
  }
}

}  // namespace nwor
