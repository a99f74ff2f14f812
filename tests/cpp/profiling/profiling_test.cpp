#include "base/profiling.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace nwor {
namespace {

void OpenEveryRange() {
  const ScopedProfileRange commit(ProfileRange::kCommit);
  { const ScopedProfileRange stage(ProfileRange::kStage); }
  { const ScopedProfileRange attend(ProfileRange::kAttend); }
  { const ScopedProfileRange refresh(ProfileRange::kRefresh); }
}

// The tests below run this one again in a process of its own, and read what a profiler saw there:
// NVTX looks for a tool once in a process' life.
TEST(ProfileRangeChild, OpensEveryRange) { OpenEveryRange(); }

std::vector<std::string> RecordChild(const std::string& recorder) {
  std::string log = ::testing::TempDir() + "nwor_nvtx_" + std::string(6, 'X');  // mkstemp's to fill
  const int fd = mkstemp(log.data());
  if (fd < 0) return {"no temporary file"};
  close(fd);
  const pid_t child = fork();
  if (child == 0) {
    setenv("NVTX_INJECTION64_PATH", recorder.c_str(), 1);
    setenv("NWOR_NVTX_LOG", log.c_str(), 1);
    execl("/proc/self/exe", "profiling_test", "--gtest_filter=ProfileRangeChild.*",
          "--gtest_brief=1", nullptr);
    _exit(127);
  }
  int status = -1;
  waitpid(child, &status, 0);
  std::vector<std::string> lines;
  if (status != 0) lines.push_back("the child failed");
  std::ifstream file(log);
  for (std::string line; std::getline(file, line);) {
    // Other libraries of the process have domains of their own.
    if (line.find("nwor") != std::string::npos) lines.push_back(line);
  }
  std::remove(log.c_str());
  return lines;
}

TEST(ProfileRange, ArrivesNestedAndByNameInItsOwnDomain) {
#ifdef NWOR_NVTX_RECORDER
  EXPECT_EQ(RecordChild(NWOR_NVTX_RECORDER),
            (std::vector<std::string>{
                "domain nwor_specpv", "push nwor_specpv nwor.commit", "push nwor_specpv nwor.stage",
                "pop nwor_specpv", "push nwor_specpv nwor.attend", "pop nwor_specpv",
                "push nwor_specpv nwor.refresh", "pop nwor_specpv", "pop nwor_specpv"}));
#else
  GTEST_SKIP() << "built without the CUDA toolkit: no NVTX";
#endif
}

TEST(ProfileRange, DoesNothingWithoutAProfiler) {
  EXPECT_EQ(RecordChild("/nonexistent/profiler.so"), std::vector<std::string>{});
}

TEST(ProfileRange, OpensFromManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) OpenEveryRange();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace nwor
