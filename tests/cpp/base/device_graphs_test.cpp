#include "base/device_graphs.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "message_of.h"

namespace nwor {
namespace {

using Tensors = std::vector<at::Tensor>;

TEST(DeviceGraphs, AreOfACudaDevice) {
  const std::string said = MessageOf([] { const DeviceGraphs graphs{at::Device(at::kCPU)}; });
  EXPECT_EQ(said.find("device: got cpu, expected a CUDA device"), 0) << said;
}

// The second graph reads what the first one returned, and both what is there at each replay.
TEST(DeviceGraphs, AReplayReadsWhatIsThereNow) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Device device(at::kCUDA, 0);
  at::Tensor given = at::ones({4, 64}, device), twice;
  const at::Tensor weight = at::eye(64, device);
  const DeviceGraphs::Work first = [&] { return Tensors{twice = given * 2}; };
  const DeviceGraphs::Work second = [&] { return Tensors{at::matmul(twice, weight) + given}; };
  first();
  second();
  DeviceGraphs graphs(device);
  EXPECT_EQ(graphs.Capture(first), 0);
  EXPECT_EQ(graphs.Capture(second), 1);
  for (const int value : {3, 5}) {
    given.fill_(value);
    EXPECT_TRUE(graphs.Replay(0)[0].eq(2 * value).all().item<bool>());
    EXPECT_TRUE(graphs.Replay(1)[0].eq(3 * value).all().item<bool>());
  }
  EXPECT_EQ(MessageOf([&] { graphs.Replay(2); }), "graph: got 2, expected one of 2");
}

TEST(DeviceGraphs, GoOnAfterWorkThatThrows) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Tensor given = at::ones({4}, at::Device(at::kCUDA, 0));
  DeviceGraphs graphs(given.device());
  const DeviceGraphs::Work fails = [&]() -> Tensors {
    const at::Tensor lost = given + 1;
    throw std::runtime_error("no");
  };
  EXPECT_THROW(graphs.Capture(fails), std::runtime_error);
  const int64_t graph = graphs.Capture([&] { return Tensors{given + 1}; });
  EXPECT_TRUE(graphs.Replay(graph)[0].eq(2).all().item<bool>());
}

}  // namespace
}  // namespace nwor
