#include "drafters/eagle3_head.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"
#include "test_seed.h"

namespace nwor {
namespace {

using Tokens = std::vector<int64_t>;
using Vector = std::vector<double>;

const Eagle3Shape& Shape() {
  static const Eagle3Shape shape = {.hidden = 16,
                                    .intermediate = 24,
                                    .num_heads = 4,
                                    .num_kv_heads = 2,
                                    .head_dim = 6,
                                    .target_vocabulary = 30,
                                    .feature_layers = {0, 2},
                                    .window = 5,
                                    .rope_theta = 100.0,
                                    .norm_epsilon = 1e-5};
  return shape;
}
constexpr int64_t kDraftVocabulary = 20;

std::map<std::string, at::Tensor> RandomWeights() {
  const auto& s = Shape();
  const auto random = [](at::IntArrayRef sizes) { return 0.5 * at::randn(sizes); };
  return {
      {"feature_norm", 1 + 0.1 * random({2, s.hidden})},
      {"fuse", random({s.hidden, 2 * s.hidden})},
      {"norm", 1 + 0.1 * random({s.hidden})},
      {"token_norm", 1 + 0.1 * random({s.hidden})},
      {"hidden_norm", 1 + 0.1 * random({s.hidden})},
      {"query_key_value", random({(s.num_heads + 2 * s.num_kv_heads) * s.head_dim, 2 * s.hidden})},
      {"attention_output", random({s.hidden, s.num_heads * s.head_dim})},
      {"mlp_norm", 1 + 0.1 * random({s.hidden})},
      {"gate_up", random({2 * s.intermediate, s.hidden})},
      {"down", random({s.hidden, s.intermediate})},
      {"draft_to_target", at::randperm(s.target_vocabulary).slice(0, 0, kDraftVocabulary)}};
}

// The head once more, in double and loops, one entry at a time.
class SlowHead {
 public:
  struct Entry {
    int64_t position;
    Vector key, value;
  };
  struct Row {
    Entry entry;
    Vector query, hidden;
  };

  SlowHead(std::map<std::string, at::Tensor> weights, at::Tensor embedding, at::Tensor output)
      : weights_(std::move(weights)), embedding_(embedding), output_(output) {}

  Vector Fuse(const at::Tensor& features) const {
    Vector all;
    for (int64_t layer = 0; layer < 2; ++layer) {
      const at::Tensor part =
          features.slice(0, layer * Shape().hidden, (layer + 1) * Shape().hidden);
      const Vector normed = Norm(Plain(part), weights_.at("feature_norm")[layer]);
      all.insert(all.end(), normed.begin(), normed.end());
    }
    return Times(weights_.at("fuse"), all);
  }

  Row Project(int64_t token, const Vector& hidden, int64_t position) const {
    Vector input = Norm(Plain(embedding_[token]), weights_.at("token_norm"));
    const Vector second = Norm(hidden, weights_.at("hidden_norm"));
    input.insert(input.end(), second.begin(), second.end());
    const Vector all = Times(weights_.at("query_key_value"), input);
    const int64_t queries = Shape().num_heads * Shape().head_dim;
    const int64_t keys = Shape().num_kv_heads * Shape().head_dim;
    const auto begin = all.begin();
    return {{position,
             Rotated({begin + queries, begin + queries + keys}, position),
             {begin + queries + keys, all.end()}},
            Rotated({begin, begin + queries}, position),
            hidden};
  }

  Vector Output(const Row& row, const std::vector<Entry>& seen) const {
    const int64_t dim = Shape().head_dim, groups = Shape().num_heads / Shape().num_kv_heads;
    Vector attended;
    for (int64_t head = 0; head < Shape().num_heads; ++head) {
      const int64_t first = head / groups * dim;
      Vector chances;
      for (const Entry& entry : seen) {
        double score = 0;
        for (int64_t i = 0; i < dim; ++i) score += row.query[head * dim + i] * entry.key[first + i];
        chances.push_back(std::exp(score / std::sqrt(static_cast<double>(dim))));
      }
      const double sum = std::accumulate(chances.begin(), chances.end(), 0.0);
      for (int64_t i = 0; i < dim; ++i) {
        double value = 0;
        for (size_t e = 0; e < seen.size(); ++e) value += chances[e] * seen[e].value[first + i];
        attended.push_back(value / sum);
      }
    }
    const Vector middle = Plus(row.hidden, Times(weights_.at("attention_output"), attended));
    const Vector both = Times(weights_.at("gate_up"), Norm(middle, weights_.at("mlp_norm")));
    Vector gated;
    for (int64_t i = 0; i < Shape().intermediate; ++i) {
      gated.push_back(both[i] / (1 + std::exp(-both[i])) * both[Shape().intermediate + i]);
    }
    return Plus(middle, Times(weights_.at("down"), gated));
  }

  // Logarithms of the probabilities of the head's tokens.
  Vector Scores(const Vector& hidden) const {
    const Vector normed = Norm(hidden, weights_.at("norm"));
    Vector scores;
    for (int64_t i = 0; i < kDraftVocabulary; ++i) {
      const Vector row = Plain(output_[Target(i)]);
      scores.push_back(std::inner_product(row.begin(), row.end(), normed.begin(), 0.0));
    }
    double sum = 0;
    for (const double score : scores) sum += std::exp(score);
    for (double& score : scores) score -= std::log(sum);
    return scores;
  }

  int64_t Target(int64_t id) const { return weights_.at("draft_to_target")[id].item<int64_t>(); }

 private:
  static Vector Plain(const at::Tensor& tensor) {
    const at::Tensor all = tensor.to(at::kDouble).contiguous();
    return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
  }
  static Vector Times(const at::Tensor& matrix, const Vector& vector) {
    Vector result;
    for (int64_t row = 0; row < matrix.size(0); ++row) {
      const Vector weights = Plain(matrix[row]);
      result.push_back(std::inner_product(weights.begin(), weights.end(), vector.begin(), 0.0));
    }
    return result;
  }
  static Vector Plus(Vector one, const Vector& other) {
    for (size_t i = 0; i < one.size(); ++i) one[i] += other[i];
    return one;
  }
  static Vector Norm(Vector values, const at::Tensor& weight) {
    double sum = 0;
    for (const double value : values) sum += value * value;
    const double scale = 1 / std::sqrt(sum / values.size() + Shape().norm_epsilon);
    const Vector weights = Plain(weight);
    for (size_t i = 0; i < values.size(); ++i) values[i] *= scale * weights[i];
    return values;
  }
  static Vector Rotated(const Vector& values, int64_t position) {
    const size_t dim = Shape().head_dim, half = dim / 2;
    Vector rotated = values;
    for (size_t head = 0; head < values.size(); head += dim) {
      for (size_t i = 0; i < half; ++i) {
        const double angle =
            position * std::pow(Shape().rope_theta, -2.0 * static_cast<double>(i) / dim);
        const double low = values[head + i], high = values[head + half + i];
        rotated[head + i] = low * std::cos(angle) - high * std::sin(angle);
        rotated[head + half + i] = high * std::cos(angle) + low * std::sin(angle);
      }
    }
    return rotated;
  }

  std::map<std::string, at::Tensor> weights_;
  at::Tensor embedding_, output_;
};

struct Candidate {
  Tokens path;
  double score;
  std::vector<SlowHead::Entry> above;  // its ancestors' entries
  Vector hidden;                       // its parent's output

  bool operator<(const Candidate& other) const { return score > other.score; }
};

// The token paths of the tree, and in `margin` how far the closest choice was from another one.
std::set<Tokens> SlowTree(const SlowHead& head, const Tokens& tokens, const at::Tensor& features,
                          int64_t rows, int64_t depth, int64_t top_k, double least,
                          double* margin) {
  *margin = 1e9;
  const auto keep = [margin](std::vector<Candidate> all, int64_t count) {
    std::sort(all.begin(), all.end());
    if (static_cast<int64_t>(all.size()) > count) {
      if (count > 0) *margin = std::min(*margin, all[count - 1].score - all[count].score);
      all.resize(count);
    }
    return all;
  };
  std::vector<SlowHead::Entry> text;
  Vector hidden;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const SlowHead::Row row = head.Project(tokens[i], head.Fuse(features[at]), at);
    text.push_back(row.entry);
    if (static_cast<int64_t>(text.size()) > Shape().window) text.erase(text.begin());
    hidden = head.Output(row, text);
  }
  const auto children = [&](const Candidate& of, const Vector& output) {
    std::vector<Candidate> made;
    const Vector scores = head.Scores(output);
    for (int64_t id = 0; id < kDraftVocabulary; ++id) {
      Candidate child = {of.path, of.score + scores[id], of.above, output};
      child.path.push_back(head.Target(id));
      made.push_back(child);
    }
    return keep(made, top_k);
  };
  std::vector<Candidate> best = children({}, hidden), all = best;
  for (int64_t ahead = 0; ahead + 1 < depth; ++ahead) {
    std::vector<Candidate> next;
    for (Candidate& one : best) {
      const auto position = static_cast<int64_t>(tokens.size()) + ahead;
      const SlowHead::Row row = head.Project(one.path.back(), one.hidden, position);
      one.above.push_back(row.entry);
      std::vector<SlowHead::Entry> seen = text;
      seen.insert(seen.end(), one.above.begin(), one.above.end());
      const std::vector<Candidate> more = children(one, head.Output(row, seen));
      next.insert(next.end(), more.begin(), more.end());
    }
    all.insert(all.end(), next.begin(), next.end());
    best = keep(next, top_k);
  }
  std::set<Tokens> paths = {{}};
  for (const Candidate& one : keep(all, rows - 1)) {
    *margin = std::min(*margin, std::abs(one.score - least));
    if (one.score >= least) paths.insert(one.path);
  }
  return paths;
}

std::set<Tokens> Paths(const DraftTree& tree) {
  tree.Validate();
  std::vector<Tokens> paths(tree.num_rows());
  for (int64_t row = 1; row < tree.num_rows(); ++row) {
    paths[row] = paths[tree.parent(row)];
    paths[row].push_back(tree.tokens[row]);
  }
  return {paths.begin(), paths.end()};
}

class Eagle3HeadTest : public testing::Test {
 protected:
  void SetUp() override {
    const uint64_t seed = TestSeed();
    random_.seed(seed);
    at::manual_seed(seed);
    weights_ = RandomWeights();
    embedding_ = at::randn({Shape().target_vocabulary, Shape().hidden});
    output_ = at::randn({Shape().target_vocabulary, Shape().hidden});
  }

  Eagle3Head Head(const Eagle3Options& options = {}) {
    return {Shape(), weights_, embedding_, output_, options};
  }
  Tokens Text(int64_t length) {
    Tokens tokens;
    for (int64_t i = 0; i < length; ++i) {
      tokens.push_back(static_cast<int64_t>(random_() % Shape().target_vocabulary));
    }
    return tokens;
  }
  static at::Tensor Features(int64_t rows) { return at::randn({rows, 2 * Shape().hidden}); }

  std::mt19937_64 random_;
  std::map<std::string, at::Tensor> weights_;
  at::Tensor embedding_, output_;
};

TEST_F(Eagle3HeadTest, DraftsWhatASlowHeadDrafts) {
  const SlowHead slow(weights_, embedding_, output_);
  int compared = 0;
  for (const double least : {0.0, 0.05}) {
    const Eagle3Head head = Head({.min_probability = least});
    for (int repeat = 0; repeat < 8; ++repeat) {
      const auto length = static_cast<int64_t>(1 + random_() % 12);
      const auto rows = static_cast<int64_t>(1 + random_() % 10);
      const auto depth = static_cast<int64_t>(1 + random_() % 4);
      const auto top_k = static_cast<int64_t>(1 + random_() % 4);
      const Tokens tokens = Text(length);
      const at::Tensor features = Features(length);
      Eagle3Head::State state;
      head.Observe(&state, tokens, features);
      const Eagle3Head::State* const states[] = {&state};
      const DraftTree tree = head.Draft(states, rows, depth, top_k).at(0);
      EXPECT_EQ(tree.tokens[0], tokens.back());
      double margin = 0;
      const std::set<Tokens> wanted =
          SlowTree(slow, tokens, features, rows, depth, top_k, std::log(least), &margin);
      if (margin < 1e-4) continue;  // rounding decides
      ++compared;
      EXPECT_EQ(Paths(tree), wanted) << rows << " rows, depth " << depth << ", top " << top_k;
    }
  }
  EXPECT_GT(compared, 4);
}

TEST_F(Eagle3HeadTest, NeitherPiecesNorTheBatchNorWhatWasTakenBackChangeATree) {
  const Eagle3Head head = Head();
  const Tokens tokens = Text(14), others = Text(9);
  const at::Tensor features = Features(14), other_features = Features(9);
  Eagle3Head::State whole, pieces, other;
  head.Observe(&whole, tokens, features);
  head.Observe(&other, others, other_features);
  head.Observe(&pieces, {tokens.begin(), tokens.begin() + 8}, features.slice(0, 0, 8));
  head.Observe(&pieces, Text(3), Features(3));
  head.Retract(&pieces, 5);  // and two that are observed again
  head.Observe(&pieces, {tokens.begin() + 6, tokens.end()}, features.slice(0, 6));
  const Eagle3Head::State* const alone[] = {&whole};
  const Eagle3Head::State* const both[] = {&other, &pieces};
  const DraftTree wanted = head.Draft(alone, 8, 4, 3).at(0);
  const DraftTree got = head.Draft(both, 8, 4, 3).at(1);
  EXPECT_EQ(got.tokens, wanted.tokens);
  EXPECT_EQ(got.parents, wanted.parents);
}

TEST_F(Eagle3HeadTest, KeepsToTheFirstTokensOfItsVocabulary) {
  const Eagle3Head head = Head({.draft_vocabulary = 3});
  Eagle3Head::State state;
  head.Observe(&state, Text(4), Features(4));
  const Eagle3Head::State* const states[] = {&state};
  const DraftTree tree = head.Draft(states, 12, 3, 5).at(0);
  std::set<int64_t> allowed;
  for (int64_t i = 0; i < 3; ++i) allowed.insert(weights_["draft_to_target"][i].item<int64_t>());
  for (int64_t row = 1; row < tree.num_rows(); ++row) {
    EXPECT_TRUE(allowed.contains(tree.tokens[row]));
  }
  EXPECT_EQ(tree.num_rows(), 12);
}

TEST_F(Eagle3HeadTest, RefusesWhatDoesNotFit) {
  const auto refused = [&](const std::string& name, const at::Tensor& tensor) {
    std::map<std::string, at::Tensor> weights = weights_;
    weights[name] = tensor;
    EXPECT_THROW(Eagle3Head(Shape(), weights, embedding_, output_), Error) << name;
  };
  refused("fuse", at::zeros({3, 3}));
  refused("draft_to_target", at::full({2}, Shape().target_vocabulary));
  refused("draft_to_target", at::zeros({0}, at::kLong));
  refused("surplus", at::zeros({1}));
  EXPECT_THROW(Eagle3Head(Shape(), {}, embedding_, output_), Error);
  EXPECT_THROW(Eagle3Head(Shape(), weights_, embedding_.slice(0, 1), output_), Error);
  const Eagle3Head head = Head();
  Eagle3Head::State state;
  const Eagle3Head::State* const states[] = {&state};
  EXPECT_THROW(head.Draft(states, 8, 4, 4), Error);  // nothing was observed
  EXPECT_THROW(head.Observe(&state, {1, 2}, Features(1)), Error);
  EXPECT_THROW(head.Retract(&state, 1), Error);
  head.Observe(&state, {1, 2}, Features(2));
  EXPECT_THROW(head.Draft(states, 0, 4, 4), Error);
  head.Retract(&state, 1);
  EXPECT_THROW(head.Draft(states, 8, 4, 4), Error);  // its root was taken back
}

}  // namespace
}  // namespace nwor
