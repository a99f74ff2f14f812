#include "metrics/process_stats.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <memory>

namespace nwor {
namespace {

TEST(ProcessStats, CountsTheFilesThatAreOpen) {
  const double before = ReadProcessStats().open_fds.value();
  const int first = open("/dev/null", O_RDONLY);
  const int second = open("/dev/null", O_RDONLY);
  EXPECT_EQ(ReadProcessStats().open_fds.value(), before + 2);
  close(first);
  close(second);
  EXPECT_EQ(ReadProcessStats().open_fds.value(), before);
}

TEST(ProcessStats, SeesMemoryThatIsTouched) {
  constexpr size_t kBytes = size_t{64} << 20;
  const double before = ReadProcessStats().resident_memory_bytes.value();
  const std::unique_ptr<char[]> block(new char[kBytes]);
  std::memset(block.get(), 1, kBytes);
  EXPECT_GE(ReadProcessStats().resident_memory_bytes.value(), before + 0.5 * kBytes);
}

TEST(ProcessStats, ReportsCpuTimeThatGrowsWithWork) {
  const double before = ReadProcessStats().cpu_seconds.value();
  volatile double sink = 0;
  while (ReadProcessStats().cpu_seconds.value() == before) sink = sink + 1;
  EXPECT_GT(ReadProcessStats().cpu_seconds.value(), before);
}

TEST(ProcessStats, StartsBeforeNowAndAfterTheMachineDid) {
  timespec uptime{};
  ASSERT_EQ(clock_gettime(CLOCK_BOOTTIME, &uptime), 0);
  const double now = static_cast<double>(time(nullptr));
  const double start = ReadProcessStats().start_time_seconds.value();
  EXPECT_LE(start, now + 2);
  EXPECT_GE(start, now - static_cast<double>(uptime.tv_sec) - 2);
  EXPECT_EQ(ReadProcessStats().start_time_seconds.value(), start);
}

}  // namespace
}  // namespace nwor
