#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

#include "session/session_error.h"
#include "session/slot_allocator.h"
#include "test_seed.h"

// Random calls against a model that knows nothing of pages: requests are lists of token values, and
// a pretended cache holds a value in each slot. Whatever the allocator says (slots, page copies,
// moves) is done to that cache; afterwards every request must read its own tokens there.

namespace nwor {
namespace {

constexpr int kPages = 40, kRequests = 12;

class World {
 public:
  World(uint64_t seed, int64_t page_size)
      : random_(seed),
        page_size_(page_size),
        allocator_(kPages, page_size),
        cache_(kPages * page_size, -1) {}

  void Step() {
    const int64_t request = Below(kRequests);
    switch (Below(10)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return Extend(request, Below(3 * page_size_ + 2));
      case 4:
        return Truncate(request);
      case 5:
        return FreeByMask(request);
      case 6:
        return Fork(request, Below(kRequests));
      case 7:
        return Compact(request);
      case 8:
        return Below(3) == 0 ? Free(request) : Branch(request);
      default:
        return BackupOrRestore();
    }
  }

  void CheckBalance() const {
    const AllocatorStats stats = allocator_.stats();
    ASSERT_EQ(stats.free_slots + stats.held_slots, stats.total_slots);
    ASSERT_EQ(stats.requests, static_cast<int64_t>(model_.size()));
  }

  // Everything, from the slots alone.
  void CheckAll() const {
    std::map<int64_t, std::set<int64_t>> holders;
    int64_t tokens = 0;
    for (const auto& [request, values] : model_) {
      CheckRequest(request);
      tokens += static_cast<int64_t>(values.size());
      for (const int64_t slot : allocator_.Slots(request)) {
        holders[slot / page_size_].insert(request);
      }
    }
    int64_t shared = 0;
    for (const auto& [page, who] : holders) shared += who.size() > 1 ? 1 : 0;
    const AllocatorStats stats = allocator_.stats();
    ASSERT_EQ(stats.held_pages, static_cast<int64_t>(holders.size()));
    ASSERT_EQ(stats.shared_pages, shared);
    ASSERT_EQ(stats.tokens, tokens);
  }

  void CheckSome() const {
    if (!model_.empty()) CheckRequest(model_.begin()->first);
  }

 private:
  using Tokens = std::vector<int64_t>;

  int64_t Below(int64_t bound) { return static_cast<int64_t>(random_() % bound); }

  void CheckRequest(int64_t request) const {
    const Tokens& values = model_.at(request);
    const std::vector<int64_t> slots = allocator_.Slots(request);
    ASSERT_EQ(slots.size(), values.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      ASSERT_EQ(cache_[slots[i]], values[i]) << "token " << i << " of request " << request;
    }
  }

  void MakeCopies() {
    for (const PageCopy& copy : allocator_.TakeCopies()) {
      for (int64_t i = 0; i < page_size_; ++i) {
        cache_[copy.destination * page_size_ + i] = cache_[copy.source * page_size_ + i];
      }
    }
  }

  void Write(int64_t request, const std::vector<int64_t>& slots) {
    Tokens& values = model_[request];
    for (const int64_t slot : slots) {
      values.push_back(next_value_);
      cache_[slot] = next_value_++;
    }
  }

  void Extend(int64_t request, int64_t num_tokens) {
    const int64_t needed = allocator_.PagesToExtend(request, num_tokens);
    const int64_t free = allocator_.stats().free_pages;
    std::vector<int64_t> slots;
    try {
      slots = allocator_.Extend(request, num_tokens);
    } catch (const CapacityError&) {
      ASSERT_GT(needed, free);
      // At worst every token needs a new page, or the last page has to be copied.
      ASSERT_LT(free, (num_tokens + page_size_ - 1) / page_size_ + 1);
      return;
    }
    ASSERT_EQ(allocator_.stats().free_pages, free - needed);
    MakeCopies();
    Write(request, slots);
  }

  void Truncate(int64_t request) {
    if (!model_.contains(request)) return;
    Tokens& values = model_[request];
    values.resize(values.size() - Below(std::min<int64_t>(values.size(), 20) + 1));
    allocator_.Truncate(request, static_cast<int64_t>(values.size()));
  }

  void FreeByMask(int64_t request) {
    if (!model_.contains(request)) return;
    Tokens& values = model_[request];
    std::vector<bool> mask(Below(std::min<int64_t>(values.size(), 20) + 1));
    Tokens kept(values.begin(), values.end() - static_cast<int64_t>(mask.size()));
    for (size_t i = 0; i < mask.size(); ++i) {
      mask[i] = Below(2) == 0;
      if (!mask[i]) kept.push_back(values[values.size() - mask.size() + i]);
    }
    allocator_.Free(request, mask);
    values = kept;
  }

  void Compact(int64_t request) {
    if (!model_.contains(request)) return;
    std::vector<SlotMove> moves;
    try {
      moves = allocator_.Compact(request);
    } catch (const CapacityError&) {
      return;  // shared pages and none free
    }
    MakeCopies();
    if (Below(2) == 0) {
      for (const SlotMove& move : moves) cache_[move.destination] = cache_[move.source];
    } else {
      std::vector<int64_t> read;
      for (const SlotMove& move : moves) read.push_back(cache_[move.source]);
      for (size_t i = 0; i < moves.size(); ++i) cache_[moves[i].destination] = read[i];
    }
    ASSERT_TRUE(allocator_.IsDense(request));
    const int64_t length = allocator_.length(request);
    ASSERT_EQ(allocator_.num_pages(request), (length + page_size_ - 1) / page_size_);
  }

  void Fork(int64_t parent, int64_t child) {
    if (!model_.contains(parent) || model_.contains(child)) return;
    Tokens values = model_[parent];
    values.resize(Below(static_cast<int64_t>(values.size()) + 1));
    allocator_.Fork(parent, child, static_cast<int64_t>(values.size()));
    model_[child] = values;
  }

  void Branch(int64_t parent) {
    std::vector<RequestKey> children;
    for (int64_t child = 0; child < kRequests && children.size() < 3; ++child) {
      if (!model_.contains(child)) children.emplace_back(child);
    }
    if (!model_.contains(parent)) return;
    std::vector<std::vector<int64_t>> slots;
    try {
      slots = allocator_.Branch(parent, children, 1 + Below(page_size_));
    } catch (const CapacityError&) {
      return;
    }
    MakeCopies();
    for (size_t i = 0; i < children.size(); ++i) {
      const auto child = std::get<int64_t>(children[i]);
      model_[child] = model_[parent];
      Write(child, slots[i]);
    }
  }

  void Free(int64_t request) {
    if (model_.erase(request) > 0) {
      allocator_.Free(request);
    } else {
      ASSERT_THROW(allocator_.Free(request), Error);
    }
  }

  // The cache is part of what is remembered here: pages that were given back since are written by
  // others, which only a host that restores before it writes again is safe from.
  void BackupOrRestore() {
    if (backups_.size() < 3 && Below(2) == 0) {
      backups_.push_back({allocator_.TakeBackup(), model_, cache_});
    } else if (!backups_.empty()) {
      const Remembered& chosen = backups_[Below(static_cast<int64_t>(backups_.size()))];
      allocator_.Restore(chosen.backup);
      model_ = chosen.model;
      cache_ = chosen.cache;
      if (Below(3) == 0) backups_.clear();
    }
  }

  struct Remembered {
    SlotAllocator::Backup backup;
    std::map<int64_t, Tokens> model;
    std::vector<int64_t> cache;
  };

  std::mt19937_64 random_;
  int64_t page_size_;
  SlotAllocator allocator_;
  std::vector<int64_t> cache_;
  std::map<int64_t, Tokens> model_;
  std::vector<Remembered> backups_;
  int64_t next_value_ = 0;
};

TEST(SlotAllocatorFuzz, AMillionCallsLeaveEveryRequestItsTokens) {
  const uint64_t seed = TestSeed();
  for (const int64_t page_size : {1, 3, 8, 16}) {
    World world(seed + page_size, page_size);
    for (int step = 0; step < 250'000; ++step) {
      world.Step();
      world.CheckBalance();
      if (step % 16 == 0) world.CheckSome();
      if (step % 512 == 0) world.CheckAll();
      if (HasFailure()) FAIL() << "page_size=" << page_size << " step=" << step;
    }
  }
}

}  // namespace
}  // namespace nwor
