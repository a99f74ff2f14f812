#include "attention/cpu/amx.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "attention/verify_step.h"
#include "test_seed.h"

#if defined(__x86_64__)

namespace nwor::cpu {
namespace {

uint16_t ToBFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float ToFloat(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

struct Shape {
  int rows, group, heads, head_dim, tokens;
  bool even;  // tokens lie one stride apart
};

// A chunk and the K and V of its heads, random.
class Block {
 public:
  Block(const Shape& shape, uint32_t seed) : shape_(shape), random_(seed) {
    chunk_.request_rows = chunk_.count = shape.rows;
    chunk_.group = shape.group;
    chunk_.num_heads = shape.heads;
    scratch_.Prepare(chunk_, shape.head_dim, true);
    const int rows = chunk_.tiles() * kTileRows, dim = shape.head_dim;
    for (int i = 0; i < rows * dim; ++i) scratch_.queries[i] = Draw();
    for (int i = 0; i < dim; ++i) scratch_.zeros[i] = 0.0f;
    Amx::PackQueries(chunk_, dim, scratch_);
    const int block = BlockTokens(dim);
    tokens_.resize(static_cast<size_t>(2 * block) * (dim + 8));
    for (uint16_t& word : tokens_) word = ToBFloat16(Draw());
    std::vector<int> order(block);
    for (int i = 0; i < block; ++i) order[i] = i;
    if (!shape.even) std::shuffle(order.begin(), order.end(), random_);
    for (int i = 0; i < block; ++i) {
      const auto* padding = reinterpret_cast<const std::byte*>(scratch_.zeros);
      rows_.push_back(i < shape.tokens ? At(order[i]) : padding);
    }
  }

  float Query(int head, int row, int channel) const {
    const int packed = head * chunk_.head_tiles() * kTileRows + row;
    return scratch_.queries[packed / kTileRows * kTileRows * shape_.head_dim +
                            channel / 16 * 16 * kTileRows + packed % kTileRows * 16 + channel % 16];
  }
  float Token(int token, int channel) const {
    uint16_t bits;
    std::memcpy(&bits, rows_[token] + 2 * channel, 2);
    return ToFloat(bits);
  }
  float& Score(int token, int row) {
    return scratch_.scores[(row / kTileRows * BlockTokens(shape_.head_dim) + token) * kTileRows +
                           row % kTileRows];
  }
  int head_rows() const { return chunk_.head_tiles() * kTileRows; }
  float Draw() {
    return ToFloat(ToBFloat16(std::uniform_real_distribution<float>(-1, 1)(random_)));
  }

  const Shape shape_;
  std::mt19937 random_;
  RowChunk chunk_;
  Scratch scratch_;
  std::vector<uint16_t> tokens_;
  std::vector<const std::byte*> rows_;

 private:
  const std::byte* At(int token) const {
    return reinterpret_cast<const std::byte*>(tokens_.data() + token * (shape_.head_dim + 8));
  }
};

Shape RandomShape(std::mt19937& random) {
  const auto draw = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  const int head_dims[] = {32, 64, 96, 128, 192, 256, 320, 512};
  Shape shape{};
  shape.head_dim = head_dims[draw(0, 7)];
  shape.rows = draw(1, 20);
  shape.group = draw(1, 6);
  shape.heads = draw(1, 3);
  shape.tokens = draw(1, BlockTokens(shape.head_dim));
  shape.even = draw(0, 1) == 1;
  return shape;
}

class AmxTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!Amx::IsAvailable()) GTEST_SKIP() << "this processor has no AMX";
  }
};

TEST_F(AmxTest, ScoresAreProductsOfEveryRowAndToken) {
  std::mt19937 random(TestSeed());
  for (int run = 0; run < 60; ++run) {
    const Shape shape = RandomShape(random);
    Block block(shape, random());
    Amx amx(block.chunk_, shape.head_dim, BlockTokens(shape.head_dim), block.scratch_);
    for (int head = 0; head < shape.heads; ++head) {
      amx.Scores(head, block.rows_.data(), shape.tokens, nullptr);
      for (int row = 0; row < block.head_rows(); ++row) {
        for (int token = 0; token < shape.tokens; ++token) {
          double expected = 0;
          for (int d = 0; d < shape.head_dim; ++d) {
            expected += double{block.Query(head, row, d)} * block.Token(token, d);
          }
          ASSERT_NEAR(block.Score(token, row), expected, 2e-5)
              << "D " << shape.head_dim << ", row " << row << ", token " << token;
        }
      }
    }
  }
}

// Weights keep sixteen bits, and rows past the chunk are not written.
TEST_F(AmxTest, SumsAreWeightedAndKeepWhatTheyHad) {
  std::mt19937 random(TestSeed());
  constexpr float kGuard = 12345.0f;
  for (int run = 0; run < 60; ++run) {
    const Shape shape = RandomShape(random);
    Block block(shape, random());
    const int rows = block.head_rows(), dim = shape.head_dim;
    std::uniform_real_distribution<float> weight(0, 1);
    std::fill_n(block.scratch_.scores, rows * BlockTokens(dim), NAN);
    for (int row = 0; row < rows; ++row) {
      for (int token = 0; token < (shape.tokens + 3) / 4 * 4; ++token) {
        block.Score(token, row) = token < shape.tokens ? weight(random) : 0.0f;
      }
      block.scratch_.decay[row] = run % 3 == 0 ? 1.0f : weight(random);
    }
    std::vector<float> acc(static_cast<size_t>(rows + 32) * dim, kGuard);
    std::vector<double> expected(static_cast<size_t>(rows) * dim);
    for (int row = 0; row < rows; ++row) {
      for (int d = 0; d < dim; ++d) {
        double& sum = expected[row * dim + d];
        sum = double{acc[row * dim + d] = block.Draw()} * block.scratch_.decay[row];
        for (int token = 0; token < shape.tokens; ++token) {
          sum += double{block.Score(token, row)} * block.Token(token, d);
        }
      }
    }
    Amx amx(block.chunk_, dim, BlockTokens(dim), block.scratch_);
    amx.Sums(block.rows_.data(), shape.tokens, block.rows_.data(), acc.data());
    for (int i = 0; i < rows * dim; ++i) ASSERT_NEAR(acc[i], expected[i], 64 * 0x1p-15) << i;
    double mean = 0;
    for (int i = 0; i < rows * dim; ++i) mean += std::abs(acc[i] - expected[i]) / (rows * dim);
    EXPECT_LT(mean, 0x1p-15);
    for (size_t i = static_cast<size_t>(rows) * dim; i < acc.size(); ++i) {
      ASSERT_EQ(acc[i], kGuard);
    }
  }
}

TEST_F(AmxTest, RestoresTheTileConfiguration) {
  const Shape shape{.rows = 5, .group = 4, .heads = 1, .head_dim = 64, .tokens = 40, .even = true};
  Block block(shape, 4);
  const auto use = [&] {
    Amx amx(block.chunk_, 64, BlockTokens(64), block.scratch_);
    amx.Scores(0, block.rows_.data(), 40, nullptr);
  };
  alignas(64) uint8_t own[64] = {}, after[64] = {}, nothing[64] = {};
  own[0] = 1;                  // the palette
  own[16] = 24, own[48] = 7;   // register 0: bytes of a row, rows
  own[18] = 64, own[49] = 16;  // register 1
  asm volatile("ldtilecfg %0" ::"m"(own));
  use();
  asm volatile("sttilecfg %0" : "=m"(after));
  EXPECT_EQ(std::memcmp(own, after, 64), 0);
  asm volatile("tilerelease" ::);
  use();
  asm volatile("sttilecfg %0" : "=m"(after));
  EXPECT_EQ(std::memcmp(nothing, after, 64), 0);
}

TEST_F(AmxTest, NaNAndInfinityReachTheRowsAndChannelsTheyMust) {
  const Shape shape{.rows = 5, .group = 4, .heads = 1, .head_dim = 64, .tokens = 40, .even = true};
  Block block(shape, 3);
  const int rows = block.head_rows();
  for (int row = 0; row < rows; ++row) {
    for (int token = 0; token < 40; ++token) block.Score(token, row) = 0.5f;
    block.scratch_.decay[row] = 1.0f;
  }
  block.tokens_[17 * (64 + 8) + 9] = 0x7fc0;   // token 17, channel 9
  block.tokens_[20 * (64 + 8) + 30] = 0x7f80;  // token 20, channel 30: infinite
  block.Score(3, 6) = NAN;
  std::vector<float> acc(static_cast<size_t>(rows + 16) * 64, 0.0f);
  Amx amx(block.chunk_, 64, BlockTokens(64), block.scratch_);
  amx.Sums(block.rows_.data(), 40, nullptr, acc.data());
  for (int row = 0; row < rows; ++row) {
    for (int d = 0; d < 64; ++d) {
      EXPECT_EQ(std::isnan(acc[row * 64 + d]), row == 6 || d == 9) << row << " " << d;
      EXPECT_EQ(std::isinf(acc[row * 64 + d]), row != 6 && d == 30) << row << " " << d;
    }
  }
}

}  // namespace
}  // namespace nwor::cpu

#endif
