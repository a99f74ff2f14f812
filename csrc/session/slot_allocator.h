#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/export.h"
#include "session/persistent_array.h"
#include "session/persistent_map.h"

// Slots of a paged cache for hosts that have no allocator of their own.
//
// A request holds tokens 0 .. length-1, each at a slot (page * page_size + offset). Pages are
// handed out whole and counted: forks share them, and a page goes back when its last holder lets
// go. With staging, drafts hold no slots: extend by what was accepted, then commit there.

namespace nwor {

// A host names its requests by numbers or by text.
using RequestKey = std::variant<int64_t, std::string>;

// The request as messages name it: 7 or 'seven'.
NWOR_EXPORT std::string Describe(const RequestKey& request);

// The host copies a page, in every layer, before it writes to any slot it was given since.
struct PageCopy {
  int32_t source;
  int32_t destination;
  bool operator==(const PageCopy&) const = default;
};

// The host moves one token, in every layer. Moves of one call may run in order or all at once
// (reading everything before writing anything).
struct SlotMove {
  int64_t source;
  int64_t destination;
  bool operator==(const SlotMove&) const = default;
};

struct AllocatorStats {
  // Slots in free pages and in held ones: free_slots + held_slots == total_slots, always.
  int64_t total_slots = 0;
  int64_t free_slots = 0;
  int64_t held_slots = 0;
  int64_t total_pages = 0;
  int64_t free_pages = 0;
  int64_t held_pages = 0;
  int64_t shared_pages = 0;  // held by more than one request
  int64_t requests = 0;
  int64_t tokens = 0;  // of all requests; one in a shared page counts for each
  int64_t pending_copies = 0;
};

// Thread-safety: none; the host locks. Every call either does all it says or throws and changes
// nothing: Error for wrong use, CapacityError when there are not enough free pages.
class NWOR_EXPORT SlotAllocator {
 public:
  // REQUIRES: 1 <= num_pages < 2^31, page_size >= 1.
  SlotAllocator(int64_t num_pages, int64_t page_size);
  SlotAllocator(const SlotAllocator&) = delete;
  SlotAllocator& operator=(const SlotAllocator&) = delete;

  // Slots for the next num_tokens tokens of a request, which starts to exist with its first call.
  // A last page that others hold too is copied first if there is still room in it (see TakeCopies).
  std::vector<int64_t> Extend(const RequestKey& request, int64_t num_tokens);

  // Gives back all of a request; it is unknown afterwards.
  void Free(const RequestKey& request);

  // Gives back those of the request's last mask.size() tokens whose entry is true. The others keep
  // their slots and their order; Compact closes the holes.
  void Free(const RequestKey& request, const std::vector<bool>& mask);

  // Keeps the first `length` tokens. Its time depends on the pages that go back, not on the length.
  void Truncate(const RequestKey& request, int64_t length);

  // Makes token i live in the request's page i / page_size again. The moves are for the host, after
  // the copies. Without holes: no moves.
  std::vector<SlotMove> Compact(const RequestKey& request);

  // `child` starts with the parent's first num_tokens tokens (default: all), in the same slots.
  void Fork(const RequestKey& parent, const RequestKey& child,
            std::optional<int64_t> num_tokens = std::nullopt);

  // One fork per child, each with slots for num_tokens tokens of its own: [child][token]. Every
  // branch starts at the offset where the parent ends, on a page of its own.
  std::vector<std::vector<int64_t>> Branch(const RequestKey& parent,
                                           const std::vector<RequestKey>& children,
                                           int64_t num_tokens);

  // The copies that calls since the last TakeCopies asked for, in the order to make them.
  std::vector<PageCopy> TakeCopies();

  // Everything as it is now. Taking it and going back to it, once, often or nested, take a time
  // that depends on no length: what has changed since shares its storage with what has not.
  class Backup;
  Backup TakeBackup() const;
  // REQUIRES: a backup of this allocator. Copies asked for since then are forgotten; those due then
  // are due again, unless they were taken meanwhile: then they have been made.
  void Restore(const Backup& backup);

  bool Contains(const RequestKey& request) const;
  int64_t length(const RequestKey& request) const;
  // False between a Free by mask that left holes and Compact.
  bool IsDense(const RequestKey& request) const;
  // Slots of tokens [first, last); last = -1: the length.
  std::vector<int64_t> Slots(const RequestKey& request, int64_t first = 0, int64_t last = -1) const;
  // The request's pages from its first_page-th on: its row of a block table. REQUIRES: dense.
  std::vector<int32_t> Pages(const RequestKey& request, int64_t first_page = 0) const;
  int64_t num_pages(const RequestKey& request) const;
  // Free pages that Extend would need.
  int64_t PagesToExtend(const RequestKey& request, int64_t num_tokens) const;

  int64_t page_size() const { return page_size_; }
  AllocatorStats stats() const;

 private:
  // Where a token is: in the request's page-th page.
  struct Place {
    int64_t page;
    int64_t offset;
  };
  // Tokens [0, dense) fill the pages in order; the rest, after holes, say where they are.
  struct Request {
    PersistentArray<int32_t> pages;
    int64_t dense = 0;
    std::vector<Place> sparse;

    int64_t length() const { return dense + static_cast<int64_t>(sparse.size()); }
  };
  struct PendingCopy {
    PageCopy copy;
    std::shared_ptr<bool> taken;  // of every backup that owes it
  };
  struct State {
    PersistentArray<int32_t> holders;     // [num_pages]
    PersistentArray<int32_t> free_pages;  // a stack
    PersistentMap<RequestKey, Request> requests;
    PersistentArray<PendingCopy> copies;
    int64_t held_pages = 0;
    int64_t shared_pages = 0;
    int64_t tokens = 0;
  };
  struct Growth {
    int64_t in_last_page;  // tokens that fit there
    bool copies_last_page;
    int64_t pages;  // to take, the copy included
  };

  const Request& Known(const RequestKey& request) const;
  Request& Change(const RequestKey& request);
  Place PlaceOf(const Request& request, int64_t token) const;
  int64_t PagesOf(const Request& request, int64_t length) const;
  int64_t SlotOf(const Request& request, int64_t token) const;
  Growth PlanGrowth(const Request& request, int64_t num_tokens) const;
  void CheckRoom(int64_t pages, const RequestKey& request) const;
  int32_t TakePage();
  void HoldPage(int32_t page);
  void LetGo(int32_t page);
  void CopyPage(Request& request, int64_t page);
  void DropTail(Request& request, int64_t length);

  const int64_t num_pages_;
  const int64_t page_size_;
  const int64_t id_;  // of all allocators of the process: a backup knows its own
  State state_;
};

class SlotAllocator::Backup {
 private:
  friend class SlotAllocator;
  Backup(int64_t allocator, State state) : allocator_(allocator), state_(std::move(state)) {}

  int64_t allocator_;
  State state_;
};

}  // namespace nwor
