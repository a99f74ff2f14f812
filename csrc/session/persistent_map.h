#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

// An ordered map whose copies cost nothing, like PersistentArray: a treap that shares its nodes and
// copies only those on the way to a change.
//
// Thread-safety: none; copies of one map count as that map.

namespace nwor {

template <typename Key, typename Value>
class PersistentMap {
 public:
  int64_t size() const { return size_; }

  // Null when there is none; valid until the next change.
  const Value* Find(const Key& key) const {
    const Node* node = root_.get();
    while (node != nullptr && node->key != key) {
      node = (key < node->key ? node->left : node->right).get();
    }
    return node == nullptr ? nullptr : &node->value;
  }

  // REQUIRES: Find(key) is not null. Valid until the next change.
  Value& Mutable(const Key& key) {
    Link* link = &root_;
    while (Own(*link).key != key) link = key < (*link)->key ? &(*link)->left : &(*link)->right;
    return (*link)->value;
  }

  // REQUIRES: Find(key) is null.
  void Insert(const Key& key, Value value) {
    auto fresh = std::make_shared<Node>(Node{key, std::move(value), Priority(key), {}, {}});
    Link* link = &root_;
    while (*link != nullptr && (*link)->priority >= fresh->priority) {
      Node& node = Own(*link);
      link = key < node.key ? &node.left : &node.right;
    }
    Split(std::move(*link), key, fresh->left, fresh->right);
    *link = std::move(fresh);
    ++size_;
  }

  // REQUIRES: Find(key) is not null.
  void Erase(const Key& key) {
    Link* link = &root_;
    while (Own(*link).key != key) link = key < (*link)->key ? &(*link)->left : &(*link)->right;
    Link left = std::move((*link)->left), right = std::move((*link)->right);
    *link = Merge(std::move(left), std::move(right));
    --size_;
  }

 private:
  struct Node;
  using Link = std::shared_ptr<Node>;
  struct Node {
    Key key;
    Value value;
    uint64_t priority;
    Link left, right;
  };

  static Node& Own(Link& link) {
    if (link.use_count() > 1) link = std::make_shared<Node>(*link);
    return *link;
  }

  // std::hash of an integer is often the integer itself, which would make a list of the tree.
  static uint64_t Priority(const Key& key) {
    uint64_t bits = std::hash<Key>{}(key) + 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
  }

  static void Split(Link link, const Key& key, Link& left, Link& right) {
    if (link == nullptr) {
      left = right = nullptr;
      return;
    }
    Node& node = Own(link);
    if (node.key < key) {
      Split(std::move(node.right), key, node.right, right);
      left = std::move(link);
    } else {
      Split(std::move(node.left), key, left, node.left);
      right = std::move(link);
    }
  }

  static Link Merge(Link left, Link right) {
    if (left == nullptr) return right;
    if (right == nullptr) return left;
    if (left->priority >= right->priority) {
      Node& node = Own(left);
      node.right = Merge(std::move(node.right), std::move(right));
      return left;
    }
    Node& node = Own(right);
    node.left = Merge(std::move(left), std::move(node.left));
    return right;
  }

  Link root_;
  int64_t size_ = 0;
};

}  // namespace nwor
