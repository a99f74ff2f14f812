#include "session/slot_allocator.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "base/check.h"
#include "session/session_error.h"

namespace nwor {
namespace {

std::atomic<int64_t> allocators{0};

// Of numbers up to the largest there is.
int64_t DivideUp(int64_t value, int64_t by) { return value / by + (value % by > 0 ? 1 : 0); }

}  // namespace

std::string Describe(const RequestKey& request) {
  if (const auto* number = std::get_if<int64_t>(&request)) return std::to_string(*number);
  return Concat("'", std::get<std::string>(request), "'");
}

SlotAllocator::SlotAllocator(int64_t num_pages, int64_t page_size)
    : num_pages_(num_pages), page_size_(page_size), id_(++allocators) {
  constexpr int64_t kMostPages = std::numeric_limits<int32_t>::max();
  NWOR_CHECK(num_pages >= 1 && num_pages <= kMostPages, "num_pages: got ", num_pages,
             ", expected 1 to ", kMostPages);
  const int64_t largest = std::numeric_limits<int64_t>::max() / num_pages;
  NWOR_CHECK(page_size >= 1 && page_size <= largest, "page_size: got ", page_size,
             ", expected 1 to ", largest);
  // A stack, so that page 0 is the first to go.
  for (int64_t page = num_pages - 1; page >= 0; --page) {
    state_.free_pages.PushBack(static_cast<int32_t>(page));
    state_.holders.PushBack(0);
  }
}

// ---- pages -------------------------------------------------------------------------------------

int32_t SlotAllocator::TakePage() {
  const int32_t page = state_.free_pages.back();
  state_.free_pages.Truncate(state_.free_pages.size() - 1);
  state_.holders.Set(page, 1);
  ++state_.held_pages;
  return page;
}

void SlotAllocator::HoldPage(int32_t page) {
  const int32_t holders = state_.holders[page] + 1;
  state_.holders.Set(page, holders);
  if (holders == 2) ++state_.shared_pages;
}

void SlotAllocator::LetGo(int32_t page) {
  const int32_t holders = state_.holders[page] - 1;
  state_.holders.Set(page, holders);
  if (holders == 1) --state_.shared_pages;
  if (holders == 0) {
    --state_.held_pages;
    state_.free_pages.PushBack(page);
  }
}

// The request's page-th page becomes its own.
void SlotAllocator::CopyPage(Request& request, int64_t page) {
  const int32_t source = request.pages[page];
  const int32_t destination = TakePage();
  LetGo(source);
  request.pages.Set(page, destination);
  state_.copies.PushBack({{source, destination}, std::make_shared<bool>(false)});
}

// ---- places ------------------------------------------------------------------------------------

SlotAllocator::Place SlotAllocator::PlaceOf(const Request& request, int64_t token) const {
  if (token < request.dense) return {token / page_size_, token % page_size_};
  return request.sparse[token - request.dense];
}

// Pages that the first `length` tokens need.
int64_t SlotAllocator::PagesOf(const Request& request, int64_t length) const {
  return length == 0 ? 0 : PlaceOf(request, length - 1).page + 1;
}

int64_t SlotAllocator::SlotOf(const Request& request, int64_t token) const {
  const Place place = PlaceOf(request, token);
  return int64_t{request.pages[place.page]} * page_size_ + place.offset;
}

const SlotAllocator::Request& SlotAllocator::Known(const RequestKey& request) const {
  const Request* found = state_.requests.Find(request);
  NWOR_CHECK(found != nullptr, "request: got ", Describe(request),
             ", expected a request that holds slots");
  return *found;
}

SlotAllocator::Request& SlotAllocator::Change(const RequestKey& request) {
  return state_.requests.Mutable(request);
}

// ---- growing -----------------------------------------------------------------------------------

SlotAllocator::Growth SlotAllocator::PlanGrowth(const Request& request, int64_t num_tokens) const {
  Growth growth{0, false, 0};
  if (request.length() > 0) {
    const Place last = PlaceOf(request, request.length() - 1);
    growth.in_last_page = std::min(num_tokens, page_size_ - 1 - last.offset);
    growth.copies_last_page =
        growth.in_last_page > 0 && state_.holders[request.pages[last.page]] > 1;
  }
  growth.pages =
      DivideUp(num_tokens - growth.in_last_page, page_size_) + (growth.copies_last_page ? 1 : 0);
  return growth;
}

void SlotAllocator::CheckRoom(int64_t pages, const RequestKey& request) const {
  if (pages <= state_.free_pages.size()) return;
  throw CapacityError(Concat("pages: request ", Describe(request), " needs ", pages, ", but only ",
                             state_.free_pages.size(), " of ", num_pages_, " are free"));
}

std::vector<int64_t> SlotAllocator::Extend(const RequestKey& request, int64_t num_tokens) {
  // More than every slot cannot fit, and might not even be counted.
  const int64_t total = num_pages_ * page_size_;
  NWOR_CHECK(num_tokens >= 0, "num_tokens: got ", num_tokens, ", expected 0 or more");
  if (num_tokens > total) CheckRoom(DivideUp(num_tokens, page_size_), request);
  const Request* found = state_.requests.Find(request);
  const Growth growth = PlanGrowth(found == nullptr ? Request{} : *found, num_tokens);
  CheckRoom(growth.pages, request);
  std::vector<int64_t> slots(num_tokens);  // may throw, so before anything changes
  if (found == nullptr) state_.requests.Insert(request, {});

  Request& grown = Change(request);
  const int64_t before = grown.length();
  Place next{0, 0};
  if (before > 0) {
    next = PlaceOf(grown, before - 1);
    ++next.offset;
    if (growth.copies_last_page) CopyPage(grown, next.page);
  }
  int64_t slot = before > 0 ? SlotOf(grown, before - 1) + 1 : 0;
  const bool dense = grown.sparse.empty();
  for (int64_t i = 0; i < num_tokens; ++i, ++next.offset, ++slot) {
    if (next.offset == page_size_ || (before == 0 && i == 0)) {
      const int32_t page = TakePage();
      grown.pages.PushBack(page);
      next = {grown.pages.size() - 1, 0};
      slot = page * page_size_;
    }
    slots[i] = slot;
    if (!dense) grown.sparse.push_back(next);
  }
  if (dense) grown.dense += num_tokens;
  state_.tokens += num_tokens;
  return slots;
}

int64_t SlotAllocator::PagesToExtend(const RequestKey& request, int64_t num_tokens) const {
  const Request* found = state_.requests.Find(request);
  return PlanGrowth(found == nullptr ? Request{} : *found, num_tokens).pages;
}

// ---- shrinking ---------------------------------------------------------------------------------

void SlotAllocator::DropTail(Request& request, int64_t length) {
  const int64_t kept = PagesOf(request, length);
  for (int64_t page = kept; page < request.pages.size(); ++page) LetGo(request.pages[page]);
  request.pages.Truncate(kept);
  state_.tokens -= request.length() - length;
  request.sparse.resize(std::max<int64_t>(0, length - request.dense));
  request.dense = std::min(request.dense, length);
}

void SlotAllocator::Free(const RequestKey& request) {
  Known(request);
  DropTail(Change(request), 0);
  state_.requests.Erase(request);
}

void SlotAllocator::Truncate(const RequestKey& request, int64_t length) {
  const int64_t now = Known(request).length();
  NWOR_CHECK(length >= 0 && length <= now, "length: got ", length, " for request ",
             Describe(request), ", expected 0 to its length ", now);
  DropTail(Change(request), length);
}

void SlotAllocator::Free(const RequestKey& request, const std::vector<bool>& mask) {
  const int64_t length = Known(request).length();
  const auto covered = static_cast<int64_t>(mask.size());
  NWOR_CHECK(covered <= length, "mask: got ", covered, " entries for request ", Describe(request),
             ", expected at most its length ", length);
  const int64_t start = length - covered;
  const int64_t first =
      start + (std::find(mask.begin(), mask.end(), true) - mask.begin());  // that goes
  if (first == length) return;

  // What stays beyond the first hole, by the page it is in.
  Request& shrunk = Change(request);
  const int64_t prefix_pages = PagesOf(shrunk, first);
  struct KeptPage {
    int32_t page;
    int64_t index;  // before
  };
  std::vector<KeptPage> kept_pages;
  std::vector<Place> kept;
  for (int64_t token = first; token < length; ++token) {
    if (mask[token - start]) continue;
    Place place = PlaceOf(shrunk, token);
    if (place.page >= prefix_pages) {
      if (kept_pages.empty() || kept_pages.back().index != place.page) {
        kept_pages.push_back({shrunk.pages[place.page], place.page});
        HoldPage(kept_pages.back().page);  // DropTail lets go of it once
      }
      place.page = prefix_pages + static_cast<int64_t>(kept_pages.size()) - 1;
    }
    kept.push_back(place);
  }
  DropTail(shrunk, first);
  for (const KeptPage& page : kept_pages) shrunk.pages.PushBack(page.page);
  state_.tokens += static_cast<int64_t>(kept.size());
  // Holes as large as pages leave none: what follows them may be dense again.
  size_t filled = 0;
  if (shrunk.sparse.empty()) {
    while (filled < kept.size() && kept[filled].page == shrunk.dense / page_size_ &&
           kept[filled].offset == shrunk.dense % page_size_) {
      ++shrunk.dense;
      ++filled;
    }
  }
  shrunk.sparse.insert(shrunk.sparse.end(), kept.begin() + static_cast<int64_t>(filled),
                       kept.end());
}

std::vector<SlotMove> SlotAllocator::Compact(const RequestKey& request) {
  const Request& sparse = Known(request);
  if (sparse.sparse.empty()) return {};
  const int64_t length = sparse.length();
  const int64_t first_page = sparse.dense / page_size_;
  const int64_t num_pages = DivideUp(length, page_size_);
  int64_t shared = 0;
  for (int64_t page = first_page; page < num_pages; ++page) {
    shared += state_.holders[sparse.pages[page]] > 1 ? 1 : 0;
  }
  CheckRoom(shared, request);

  Request& dense = Change(request);
  for (int64_t page = first_page; page < num_pages; ++page) {
    if (state_.holders[dense.pages[page]] > 1) CopyPage(dense, page);
  }
  std::vector<SlotMove> moves;
  for (int64_t token = dense.dense; token < length; ++token) {
    const int64_t source = SlotOf(dense, token);
    const int64_t destination =
        int64_t{dense.pages[token / page_size_]} * page_size_ + token % page_size_;
    if (source != destination) moves.push_back({source, destination});
  }
  dense.dense = length;
  dense.sparse.clear();
  for (int64_t page = num_pages; page < dense.pages.size(); ++page) LetGo(dense.pages[page]);
  dense.pages.Truncate(num_pages);
  return moves;
}

// ---- sharing -----------------------------------------------------------------------------------

void SlotAllocator::Fork(const RequestKey& parent, const RequestKey& child,
                         std::optional<int64_t> num_tokens) {
  const Request& source = Known(parent);
  NWOR_CHECK(state_.requests.Find(child) == nullptr, "child: got ", Describe(child),
             " that already holds slots, expected a new request");
  const int64_t length = num_tokens.value_or(source.length());
  NWOR_CHECK(length >= 0 && length <= source.length(), "num_tokens: got ", length,
             ", expected 0 to the length ", source.length(), " of request ", Describe(parent));
  Request fork = source;
  fork.pages.Truncate(PagesOf(source, length));
  fork.sparse.resize(std::max<int64_t>(0, length - fork.dense));
  fork.dense = std::min(fork.dense, length);
  for (int64_t page = 0; page < fork.pages.size(); ++page) HoldPage(fork.pages[page]);
  state_.tokens += length;
  state_.requests.Insert(child, std::move(fork));
}

std::vector<std::vector<int64_t>> SlotAllocator::Branch(const RequestKey& parent,
                                                        const std::vector<RequestKey>& children,
                                                        int64_t num_tokens) {
  const Backup before = TakeBackup();
  std::vector<std::vector<int64_t>> slots;
  try {
    for (const RequestKey& child : children) {
      Fork(parent, child);
      slots.push_back(Extend(child, num_tokens));
    }
  } catch (...) {
    Restore(before);
    throw;
  }
  return slots;
}

std::vector<PageCopy> SlotAllocator::TakeCopies() {
  std::vector<PageCopy> copies;
  for (int64_t i = 0; i < state_.copies.size(); ++i) {
    const PendingCopy& pending = state_.copies[i];
    if (*pending.taken) continue;
    copies.push_back(pending.copy);
    *pending.taken = true;
  }
  state_.copies = {};
  return copies;
}

SlotAllocator::Backup SlotAllocator::TakeBackup() const { return {id_, state_}; }

void SlotAllocator::Restore(const Backup& backup) {
  NWOR_CHECK(backup.allocator_ == id_,
             "state: got a backup of another allocator, expected one of this allocator");
  state_ = backup.state_;
}

// ---- reading -----------------------------------------------------------------------------------

bool SlotAllocator::Contains(const RequestKey& request) const {
  return state_.requests.Find(request) != nullptr;
}

int64_t SlotAllocator::length(const RequestKey& request) const { return Known(request).length(); }

bool SlotAllocator::IsDense(const RequestKey& request) const {
  return Known(request).sparse.empty();
}

int64_t SlotAllocator::num_pages(const RequestKey& request) const {
  return Known(request).pages.size();
}

std::vector<int64_t> SlotAllocator::Slots(const RequestKey& request, int64_t first,
                                          int64_t last) const {
  const Request& known = Known(request);
  if (last == -1) last = known.length();
  NWOR_CHECK(first >= 0 && first <= last && last <= known.length(), "first, last: got ", first,
             " and ", last, ", expected a range of the ", known.length(), " tokens of request ",
             Describe(request));
  std::vector<int64_t> slots;
  slots.reserve(last - first);
  for (int64_t token = first; token < last; ++token) slots.push_back(SlotOf(known, token));
  return slots;
}

std::vector<int32_t> SlotAllocator::Pages(const RequestKey& request, int64_t first_page) const {
  const Request& known = Known(request);
  NWOR_CHECK(known.sparse.empty(), "request: ", Describe(request),
             " has holes; call compact first");
  NWOR_CHECK(first_page >= 0, "first_page: got ", first_page, ", expected 0 or more");
  std::vector<int32_t> pages;
  for (int64_t page = first_page; page < known.pages.size(); ++page) {
    pages.push_back(known.pages[page]);
  }
  return pages;
}

AllocatorStats SlotAllocator::stats() const {
  AllocatorStats stats;
  stats.total_pages = num_pages_;
  stats.free_pages = state_.free_pages.size();
  stats.held_pages = state_.held_pages;
  stats.total_slots = num_pages_ * page_size_;
  stats.free_slots = stats.free_pages * page_size_;
  stats.held_slots = stats.held_pages * page_size_;
  stats.shared_pages = state_.shared_pages;
  stats.requests = state_.requests.size();
  stats.tokens = state_.tokens;
  for (int64_t i = 0; i < state_.copies.size(); ++i) {
    stats.pending_copies += *state_.copies[i].taken ? 0 : 1;
  }
  return stats;
}

}  // namespace nwor
