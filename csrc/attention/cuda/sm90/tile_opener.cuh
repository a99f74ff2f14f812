#pragma once

#include "attention/cuda/sm90/tile_memory.cuh"

namespace nwor {

// One warp of those that bring tokens: takes items from the queue, opens them in shared memory and
// brings their queries and the ids of their pages, ahead of the others. It is the only one that
// waits for what it reads from global memory: behind the tokens that are under way that takes
// microseconds.
template <class Traits>
class TileOpener {
 public:
  // Only the warp of which `runs` is true may call Run: it reads the CTA's first item and the
  // counts before anything waits.
  __device__ TileOpener(const VerifyArgs& args, const TileMemory<Traits>& memory, bool runs)
      : args_(args), memory_(memory) {
    if (!runs) return;
    part_ = ReadPart(args.items + blockIdx.x);
    if (lane() == 0) counts_.Read(args);
  }

  __device__ void Run() {
    int index = blockIdx.x;
    bool worked = false;
    while (true) {
      SharedItem* item = memory_.item(slot_.at);
      bulk::Wait(memory_.item_empty(slot_.at), slot_.parity ^ 1);
      const int first_id = Open(item, index < 0);
      if (item->is_end) return;
      slot_.Advance(2);
      if (lane() == 0 && !worked) ReportStart(args_, counts_);
      worked = true;
      const TileSpan<Traits> span(args_.params, item->plan);
      // Queries that stay in shared memory may be in use until the item before ends.
      constexpr bool kBring = TileMemory<Traits>::kQueryBytes > 0;
      if constexpr (kBring && Traits::kQueryInRegisters) BringQueries(item->plan);
      if (span.num_prefix() > 0) StoreWindow(first_id);
      if constexpr (kBring && !Traits::kQueryInRegisters) BringQueries(item->plan);
      for (int step = kWindowSteps; step < span.num_prefix(); step += kWindowSteps) {
        StoreWindow(ReadWindow(*item, span, step));
      }
      index = TakeItem();
    }
  }

 private:
  static constexpr int kChunks = Traits::kHeadDim / 8;
  static constexpr int kBlocks = TileSpan<Traits>::kBlocks;
  static constexpr int kWindowSteps = TileSpan<Traits>::kWindowSteps;

  __device__ static int lane() { return threadIdx.x % 32; }

  // Lane l reads the l-th part of an item.
  __device__ static int4 ReadPart(const PlanItem* item) {
    if (lane() >= sizeof(PlanItem) / sizeof(int4)) return {};
    return reinterpret_cast<const int4*>(item)[lane()];
  }

  // The next item's index, or -1; it is read. It is asked for when no more than a window of the
  // current one is left, so that the queue ends evenly.
  __device__ int TakeItem() {
    bulk::Wait(memory_.ids_empty(window_.at), window_.parity ^ 1);
    int index = 0;
    if (lane() == 0) index = SettleItem(args_, counts_, AskForItem(args_));
    index = __shfl_sync(0xffffffffu, index, 0);
    if (index >= 0) {
      part_ = ReadPart(args_.items + index);
      return index;
    }
    // The combine is looked at when all tokens are under way: then the other CTAs have begun.
    RingPlace last = window_;
    last.Advance(2);
    bulk::Wait(memory_.ids_empty(last.at), last.parity ^ 1);
    int pair = -1;
    if (lane() == 0 && counts_.num_split_pairs > 0) {
      ticket_ = TakeTicket(args_, counts_);
      const CombineTeams<Traits> teams(args_, counts_, memory_.combine_buffer().bytes);
      if (ticket_ != kNoTicket) pair = static_cast<int>(ticket_) / teams.units_per_pair;
      if (pair >= counts_.num_split_pairs) pair = -1;
    }
    pair = __shfl_sync(0xffffffffu, pair, 0);
    part_ = pair < 0 ? int4{-1, -1, -1, -1} : ReadPart(args_.pairs + pair);
    return -1;
  }

  // Brings what has been read to shared memory. Returns this lane's id of the first window: that
  // read takes longest.
  __device__ int Open(SharedItem* item, bool end) {
    if (lane() < sizeof(PlanItem) / sizeof(int4)) {
      reinterpret_cast<int4*>(&item->plan)[lane()] = part_;
    }
    __syncwarp();
    if (lane() == 0) {
      item->is_end = end || item->plan.request < 0;
      if (!item->is_end) MapIds(args_, item);
    }
    __syncwarp();
    int first_id = 0;
    if (!item->is_end) {
      first_id = ReadWindow(*item, TileSpan<Traits>(args_.params, item->plan), 0);
    }
    if (lane() == 0) {
      if (item->is_end) {
        item->queue.counts = counts_;
        item->queue.ticket = ticket_;
      } else {
        PrepareItem<Traits>(args_, item);
      }
    }
    __syncwarp();
    bulk::Arrive(memory_.item_full(slot_.at));
    return first_id;
  }

  // Ids for the steps from prefix step `first` on: a window of them.
  __device__ static int ReadWindow(const SharedItem& item, const TileSpan<Traits>& span,
                                   int first) {
    const int token = span.PrefixToken(first + lane() / kBlocks) + lane() % kBlocks * 16;
    return ReadId(item, token, span.end);
  }
  __device__ void StoreWindow(int id) {
    bulk::Wait(memory_.ids_empty(window_.at), window_.parity ^ 1);
    ptx::StoreShared32(memory_.ids + (window_.at * 32 + lane()) * 4, id);
    bulk::Arrive(memory_.ids_full(window_.at));
    window_.Advance(2);
  }

  // The item's rows of Q; rows beyond keep what was there: a row's result comes from its own.
  __device__ void BringQueries(const PlanItem& plan) {
    const VerifyParams& p = args_.params;
    bulk::Wait(memory_.query_empty(), query_.parity ^ 1);
#pragma unroll 4
    for (int i = lane(); i < plan.num_rows * kChunks; i += 32) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      const OutputRow at = LocateRow(args_, plan, row);
      const auto* source = static_cast<const typename Traits::Row*>(p.query) +
                           at.row * p.query_strides.row + at.head * p.query_strides.head +
                           chunk * 8;
      const uint32_t target = memory_.query + QueryOffset<Traits>(row, chunk);
      ptx::CopyAsync(target, source);
    }
    bulk::ArriveAfterCopies(memory_.query_full());
    query_.Advance(1);
  }

  const VerifyArgs& args_;
  const TileMemory<Traits>& memory_;
  int4 part_ = {};
  LaunchCounts counts_;
  uint32_t ticket_ = kNoTicket;
  RingPlace slot_;    // of the item to open next
  RingPlace window_;  // to fill next
  RingPlace query_;
};

}  // namespace nwor
