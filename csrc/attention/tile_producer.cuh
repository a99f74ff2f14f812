#pragma once

#include "attention/bulk_copy.cuh"
#include "attention/item.cuh"
#include "attention/warpgroup.cuh"

namespace nwor {

// What one tile kernel is compiled for: see VerifyTraits.
//   kGroups  warpgroups that compute
template <typename T, int kHeadDim_, int kGroups_>
struct TileTraits {
  using Row = T;
  using Product = T;

  static constexpr bool kAvailable = wgmma::kAvailable;
  static constexpr bool kFloat8 = false;
  static constexpr bool kTwoRows = true;  // of a thread's outputs: see PartPlace
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRowTile = kGroups * kTileRows;
  static constexpr int kThreads = TileConsumers(kGroups);  // of those that compute
  static constexpr int kStepTokens = TileStepTokens(kHeadDim);
  static constexpr int kTileBytes = TileBytes(kHeadDim);  // of K or V of a step
  static constexpr int kStageBytes = 2 * kTileBytes;
  // The widest atom that divides a row.
  static constexpr int kAtomBytes = kHeadDim % 64 == 0 ? 128 : kHeadDim % 32 == 0 ? 64 : 32;
  static constexpr int kAtoms = kHeadDim * 2 / kAtomBytes;
  static constexpr int kAtomStride = kStepTokens * kAtomBytes;  // between atoms side by side

  __device__ static void Meet() { ptx::NamedBarrier(1, kThreads); }
};

// The dynamic shared memory of a CTA, as addresses.
template <class Traits>
struct TileMemory {
  uint32_t stages, query, barriers;
  float4* folds;      // of the computing threads: a block's groups so far
  SharedItem* items;  // two: one is opened while the other is worked on

  __device__ TileMemory(uint8_t* base, int num_stages) {
    uint8_t* query_at = base + num_stages * Traits::kStageBytes;
    folds = reinterpret_cast<float4*>(query_at + TileQueryBytes(Traits::kHeadDim, Traits::kGroups));
    uint8_t* rest =
        reinterpret_cast<uint8_t*>(folds) + TileFoldBytes(Traits::kHeadDim, Traits::kGroups);
    stages = ptx::SharedAddress(base);
    query = ptx::SharedAddress(query_at);
    items = reinterpret_cast<SharedItem*>(rest);
    barriers = ptx::SharedAddress(rest + 2 * kItemBytes);
  }

  __device__ SharedItem* item(int slot) const {
    return reinterpret_cast<SharedItem*>(reinterpret_cast<uint8_t*>(items) + slot * kItemBytes);
  }
  __device__ uint32_t keys(int stage) const { return stages + stage * Traits::kStageBytes; }
  __device__ uint32_t values(int stage) const { return keys(stage) + Traits::kTileBytes; }
  // Full: tokens are there. Empty: they have been used.
  __device__ uint32_t keys_full(int stage) const { return barriers + stage * 24; }
  __device__ uint32_t values_full(int stage) const { return barriers + stage * 24 + 8; }
  __device__ uint32_t stage_empty(int stage) const { return barriers + stage * 24 + 16; }
  __device__ uint32_t item_full(int slot) const {
    return barriers + 24 * kMaxTileStages + slot * 16;
  }
  __device__ uint32_t item_empty(int slot) const { return item_full(slot) + 8; }

  static constexpr int kFillers = Traits::kStepTokens / 16;  // warps that bring tokens

  __device__ void InitBarriers(int num_stages) const {
    for (int i = 0; i < num_stages; ++i) {
      bulk::InitBarrier(keys_full(i), kFillers);
      bulk::InitBarrier(values_full(i), kFillers);
      bulk::InitBarrier(stage_empty(i), Traits::kThreads / 32);
    }
    for (int i = 0; i < 2; ++i) {
      bulk::InitBarrier(item_full(i), 1);
      bulk::InitBarrier(item_empty(i), Traits::kThreads / 32);
    }
    bulk::FenceBarriers();
  }
};

// In a tile of tokens: 16-byte chunk `chunk` of token `row`.
template <class Traits>
__device__ uint32_t ChunkOffset(int row, int chunk) {
  constexpr int kAtomChunks = Traits::kAtomBytes / 16;
  return chunk / kAtomChunks * Traits::kAtomStride +
         RowSwizzle<Traits::kAtomBytes>::Offset(row, chunk % kAtomChunks);
}

// A place in a ring of `size`, and which time round it is.
struct RingPlace {
  int at = 0;
  uint32_t parity = 0;

  __device__ void Advance(int size) {
    if (++at == size) {
      at = 0;
      parity ^= 1;
    }
  }
};

// The steps of an item: tokens of the prefix and, where the last leaf begins, the in-flight rows:
// they are there before the pages are known.
template <class Traits>
struct TileSpan {
  static constexpr int kStep = Traits::kStepTokens;
  int begin, end;  // prefix tokens
  int tail_rows;
  int num_steps;
  int tail_begin, tail_end;    // steps
  int plain_begin, plain_end;  // prefix steps of tokens that all exist and that every row sees

  __device__ TileSpan(const VerifyParams& p, const PlanItem& plan) {
    begin = plan.token_begin + plan.leaf_begin * plan.leaf_tokens;
    end = max(begin, min(plan.token_begin + plan.leaf_end * plan.leaf_tokens, plan.prefix_tokens));
    tail_rows = TailRows(p, plan, plan.leaf_end - 1);
    tail_begin = (plan.leaf_end - 1 - plan.leaf_begin) * (plan.leaf_tokens / kStep);
    tail_end = tail_begin + (tail_rows + kStep - 1) / kStep;
    num_steps = (end - begin + kStep - 1) / kStep + tail_end - tail_begin;
    plain_end = (end - begin) / kStep;
    plain_begin = 0;
    if (p.window > 0) {
      // Rows stand at prefix_tokens and beyond, at most request_rows - 1 further.
      const int seen_by_all = plan.prefix_tokens + plan.request_rows - p.window;
      plain_begin = (max(seen_by_all - begin, 0) + kStep - 1) / kStep;
    }
  }
  __device__ bool IsTail(int step) const { return step >= tail_begin && step < tail_end; }
  __device__ int TailRow(int step) const { return (step - tail_begin) * kStep; }
  // Among the steps of the prefix.
  __device__ int PrefixStep(int step) const {
    return step < tail_end ? step : step - (tail_end - tail_begin);
  }
  // The end of the plain steps that begin with `step` and have one behind them, if there are any.
  __device__ int PlainEnd(int step) const {
    const int prefix_step = PrefixStep(step);
    if (IsTail(step) || prefix_step < plain_begin) return step;
    const int end = min(num_steps - 1, step + plain_end - prefix_step);
    return step < tail_begin ? min(end, tail_begin) : end;
  }
  __device__ int PrefixToken(int prefix_step) const { return begin + prefix_step * kStep; }
  __device__ bool IsPlain(int prefix_step) const {
    return prefix_step >= plain_begin && prefix_step < plain_end;
  }
};

// The warps that take items from the queue, open them and fill the stages. Warp w brings the w-th
// 16 tokens of every step, which never lie across pages.
template <class Traits>
class TileProducer {
 public:
  __device__ TileProducer(const VerifyArgs& args, const TileMemory<Traits>& memory)
      : args_(args),
        memory_(memory),
        policy_(ptx::EvictFirstPolicy()),
        warp_(static_cast<int>(threadIdx.x) / 32 - Traits::kThreads / 32) {
    // The CTA's first item and the counts are read before anything waits.
    if (warp_ == 0) part_ = ReadItem(blockIdx.x);
    if (leads()) counts_.Read(args);
  }

  __device__ void Run() {
    RingPlace slot;
    int index = blockIdx.x;
    while (true) {
      SharedItem* item = memory_.item(slot.at);
      if (warp_ == 0) {
        if (worked_) part_ = ReadItem(index);
        bulk::Wait(memory_.item_empty(slot.at), slot.parity ^ 1);
        Open(item, index < 0);
      }
      Meet();
      if (item->is_end) return;
      uint32_t fetch = 0;
      if (leads()) fetch = AskForItem(args_);
      Feed(*item, [&] {
        if (leads()) item->next_item = SettleItem(args_, counts_, fetch);
      });
      Meet();
      index = item->next_item;
      slot.Advance(2);
      worked_ = true;
    }
  }

 private:
  static constexpr int kBlocks = Traits::kStepTokens / 16;
  static constexpr int kChunks = Traits::kHeadDim / 8;

  __device__ static void Meet() { ptx::NamedBarrier(2, kTileProducers); }

  __device__ static bool leads() { return threadIdx.x == Traits::kThreads; }

  // Lane l of the first warp reads the l-th part of an item. -1 is the end: there it reads the pair
  // that this CTA will combine.
  __device__ int4 ReadItem(int index) {
    const int lane = threadIdx.x % 32;
    const PlanItem* item = args_.items + index;
    if (index < 0) {
      int pair = -1;
      if (lane == 0 && worked_ && counts_.num_split_pairs > 0) {
        ticket_ = TakeTicket(args_, counts_);
        pair = ticket_ == kNoTicket ? -1 : static_cast<int>(ticket_) / UnitsPerPair<Traits>(args_);
        if (pair >= counts_.num_split_pairs) pair = -1;
      }
      pair = __shfl_sync(0xffffffffu, pair, 0);
      if (pair < 0) return {-1, -1, -1, -1};
      item = args_.pairs + pair;
    }
    if (lane >= sizeof(PlanItem) / sizeof(int4)) return {};
    return reinterpret_cast<const int4*>(item)[lane];
  }
  // Brings what has been read to shared memory.
  __device__ void Open(SharedItem* item, bool end) {
    const int lane = threadIdx.x % 32;
    if (lane < sizeof(PlanItem) / sizeof(int4)) reinterpret_cast<int4*>(&item->plan)[lane] = part_;
    __syncwarp();
    if (lane == 0) {
      item->ticket = ticket_;
      item->is_end = end || item->plan.request < 0;
      item->counts = counts_;
      if (!item->is_end) PrepareItem<Traits>(args_, item);
    }
    __syncwarp();
    if (lane == 0) bulk::Arrive(memory_.item_full(static_cast<int>(item == memory_.item(1))));
  }

  // Fills stages with all steps of the item; finish() is called before the last one is complete.
  template <typename Finish>
  __device__ void Feed(const SharedItem& item, Finish finish) {
    const TileSpan<Traits> span(args_.params, item.plan);
    if (warp_ < kBlocks) PrefetchIds(item, span, 0);
#pragma unroll 1
    for (int step = 0; step < span.num_steps; ++step) {
      const bool in_flight = span.IsTail(step);
      const int prefix_step = span.PrefixStep(step);
      if (!in_flight && prefix_step % 32 == 0) LookUp(item, span, prefix_step);
      bulk::Wait(memory_.stage_empty(stage_.at), stage_.parity ^ 1);
      if (step + 1 == span.num_steps) finish();
      if (warp_ < kBlocks) {
        if (!in_flight && span.IsPlain(prefix_step)) {
          CopyPlain(item, prefix_step);
        } else {
          CopyEdge(item, span, in_flight,
                   in_flight ? span.TailRow(step) : span.PrefixToken(prefix_step));
        }
      }
      stage_.Advance(args_.stages);
    }
  }

  // A lane keeps the whereabouts of its warp's block of step 32k + lane; the ids of the next 32 are
  // under way.
  __device__ void PrefetchIds(const SharedItem& item, const TileSpan<Traits>& span, int step) {
    next_id_ = ReadId(item, Token(span, step + static_cast<int>(threadIdx.x % 32)), span.end);
  }
  __device__ void LookUp(const SharedItem& item, const TileSpan<Traits>& span, int step) {
    const int token = Token(span, step + static_cast<int>(threadIdx.x % 32));
    place_ = PlaceOf(args_, item, token, token < span.end ? next_id_ : 0);
    PrefetchIds(item, span, step + 32);
  }
  // The first token of this warp's block.
  __device__ int Token(const TileSpan<Traits>& span, int step) const {
    return span.PrefixToken(step) + warp_ * 16;
  }

  __device__ void CopyPlain(const SharedItem& item, int step) const {
    const int lane = threadIdx.x % 32;
    const uint32_t keys_full = memory_.keys_full(stage_.at);
    const uint32_t values_full = memory_.values_full(stage_.at);
    const int page = __shfl_sync(0xffffffffu, place_.page, step % 32);
    const int token = __shfl_sync(0xffffffffu, place_.token, step % 32);
    if (lane > 0) return;
    bulk::ArriveExpecting(keys_full, Traits::kTileBytes / kBlocks);
    bulk::ArriveExpecting(values_full, Traits::kTileBytes / kBlocks);
    const CUtensorMap* maps = args_.maps + (item.plan.source == TokenSource::kCompact ? 2 : 0);
    const int head = item.plan.kv_head;
#pragma unroll
    for (int is_value = 0; is_value < 2; ++is_value) {
      const uint32_t full = is_value ? values_full : keys_full;
      const uint32_t tile = is_value ? memory_.values(stage_.at) : memory_.keys(stage_.at);
#pragma unroll
      for (int atom = 0; atom < Traits::kAtoms; ++atom) {
        bulk::CopyBox(tile + atom * Traits::kAtomStride + warp_ * 16 * Traits::kAtomBytes,
                      maps + is_value, full, atom * (Traits::kAtomBytes / 2), token, head, page,
                      policy_);
      }
    }
  }

  // Rows that do not exist, or that no row sees, become zeros in V and stay undefined in K. Of a
  // step of up to 16 tokens no more are used. `first` is the step's first prefix token or in-flight
  // row.
  __device__ void CopyEdge(const SharedItem& item, const TileSpan<Traits>& span, bool in_flight,
                           int first) const {
    const VerifyParams& p = args_.params;
    const TokenMap& map = item.tokens;
    const int token = first + warp_ * 16;
    const int valid_begin = (in_flight ? 0 : WindowBegin(p, item.plan.prefix_tokens)) - token;
    const int valid_end = (in_flight ? span.tail_rows : span.end) - token;
    const char* keys = map.keys;
    const char* values = map.values;
    int64_t key_stride = map.key_token;
    int64_t value_stride = map.value_token;
    if (in_flight) {
      const int64_t head = item.plan.kv_head;
      const int64_t row = item.plan.query_start + token;
      key_stride = p.key_strides.row * 2;
      value_stride = p.value_strides.row * 2;
      keys = static_cast<const char*>(p.key) + row * key_stride + head * p.key_strides.head * 2;
      values =
          static_cast<const char*>(p.value) + row * value_stride + head * p.value_strides.head * 2;
    } else if (valid_end > 0) {
      const BlockOffsets at = LocateBlock(args_, item, token, span.end);
      keys += at.key;
      values += at.value;
    }
    if (warp_ == 0 || valid_end + warp_ * 16 > 16) {
#pragma unroll 2
      for (int i = threadIdx.x % 32; i < 16 * kChunks; i += 32) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const bool valid = row >= valid_begin && row < valid_end;
        const uint32_t to = memory_.keys(stage_.at) + ChunkOffset<Traits>(warp_ * 16 + row, chunk);
        if (valid) ptx::CopyAsync(to, keys + row * key_stride + chunk * 16, policy_);
        // Without a valid row to name, the read address is that of the queries.
        const char* source =
            valid ? values + row * value_stride + chunk * 16 : static_cast<const char*>(p.query);
        ptx::CopyAsync(to + Traits::kTileBytes, source, valid, policy_);
      }
    }
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
    wgmma::FenceShared();
    __syncwarp();
    if (threadIdx.x % 32 > 0) return;
    bulk::Arrive(memory_.keys_full(stage_.at));
    bulk::Arrive(memory_.values_full(stage_.at));
  }

  const VerifyArgs& args_;
  const TileMemory<Traits>& memory_;
  uint64_t policy_;
  int warp_;  // of those that fill; negative in those that compute
  int4 part_ = {};
  LaunchCounts counts_;
  uint32_t ticket_ = kNoTicket;
  bool worked_ = false;
  RingPlace stage_;
  int next_id_ = 0;
  BlockPlace place_ = {};
};

}  // namespace nwor
