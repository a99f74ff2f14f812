#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

// An array whose copies cost nothing: a copy shares every node, and a later write to either of the
// two copies only the few nodes on its way. An array nobody else shares is written in place.
//
// Thread-safety: none; copies of one array count as that array.

namespace nwor {

template <typename T>
class PersistentArray {
 public:
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  // REQUIRES: 0 <= index < size().
  const T& operator[](int64_t index) const {
    const Node* node = root_.get();
    for (int level = height_; level > 0; --level) {
      node = node->children[Digit(index, level)].get();
    }
    return node->values[Digit(index, 0)];
  }
  const T& back() const { return (*this)[size_ - 1]; }

  // REQUIRES: 0 <= index < size().
  void Set(int64_t index, const T& value) { At(index) = value; }

  void PushBack(const T& value) {
    while (size_ >= Capacity()) Grow();
    ++size_;
    At(size_ - 1) = value;
  }

  // Time independent of both sizes; nodes beyond the end wait to be used again.
  // REQUIRES: 0 <= size <= size().
  void Truncate(int64_t size) { size_ = size; }

 private:
  static constexpr int kBits = 5;
  static constexpr int kWidth = 1 << kBits;

  // A leaf uses values, any other node children.
  struct Node {
    std::vector<std::shared_ptr<Node>> children;
    std::array<T, kWidth> values{};
  };

  static int Digit(int64_t index, int level) {
    return static_cast<int>((index >> (kBits * level)) & (kWidth - 1));
  }
  int64_t Capacity() const { return root_ == nullptr ? 0 : int64_t{kWidth} << (kBits * height_); }

  void Grow() {
    if (root_ == nullptr) {
      root_ = std::make_shared<Node>();
      return;
    }
    auto root = std::make_shared<Node>();
    root->children.resize(kWidth);
    root->children[0] = std::move(root_);
    root_ = std::move(root);
    ++height_;
  }

  // The way to an element, made this array's own.
  T& At(int64_t index) {
    std::shared_ptr<Node>* link = &root_;
    for (int level = height_;; --level) {
      if (*link == nullptr) {
        *link = std::make_shared<Node>();
        if (level > 0) (*link)->children.resize(kWidth);
      } else if (link->use_count() > 1) {
        *link = std::make_shared<Node>(**link);
      }
      if (level == 0) return (*link)->values[Digit(index, 0)];
      link = &(*link)->children[Digit(index, level)];
    }
  }

  std::shared_ptr<Node> root_;
  int height_ = 0;  // levels above the leaves
  int64_t size_ = 0;
};

}  // namespace nwor
