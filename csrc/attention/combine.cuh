#pragma once

#include "attention/fold.cuh"

// The combine of all partial results, once all items are done: CTAs that find no further item share
// it, by tickets. What such a CTA waits for is never held by a CTA that does not run: the others
// have all taken their first items, or it gets no ticket; the one that ends last always gets one.
// A Traits type here has Row, kHeadDim, kThreads, kTwoRows and Meet, a barrier for the CTA's
// kThreads first threads.

namespace nwor {

inline constexpr uint32_t kNoTicket = 0xffffffffu;

// Shared memory for the combine.
struct CombineBuffer {
  uint32_t address;
  int bytes;
};

// A row of a pair's partial results as a warp has it, or two of them: tile kernels (kTwoRows) keep
// rows r and r + 8 side by side, as the threads of their items' CTAs left them in a slot: quads of
// two values of each. All lanes have the states, a lane the quads lane, lane + 32, ...
template <class Traits>
struct CombinedRows {
  static constexpr int kRows = Traits::kTwoRows ? 2 : 1;
  static constexpr int kChannels = 4 / kRows;  // of a quad and row
  static constexpr int kRowQuads = Traits::kHeadDim / kChannels;
  static constexpr int kQuads = (kRowQuads + 31) / 32;
  float4 output[kQuads];
  float2 state[kRows];

  // The first row of the index-th such rows; how many there are in a slot of `tile` rows.
  __device__ static int Row(int index) { return kRows == 1 ? index : index / 8 * 16 + index % 8; }
  __device__ static int Count(int tile) { return tile / kRows; }
  // Of this lane's i-th quad: whether there is one, its channel, its place in a slot.
  __device__ static int Quad(int i) { return i * 32 + static_cast<int>(threadIdx.x % 32); }
  __device__ static bool Has(int i) { return kRowQuads % 32 == 0 || Quad(i) < kRowQuads; }
  __device__ static int Channel(int i) {
    return kRows == 1 ? Quad(i) * 4 : Quad(i) / 4 * 8 + Quad(i) % 4 * 2;
  }
  __device__ static int Place(int i, int row, int tile) {
    if constexpr (kRows == 1) return row * kRowQuads + Quad(i);
    return Quad(i) / 4 * (tile * 2) + row / 16 * 32 + row % 8 * 4 + Quad(i) % 4;
  }

  // Folds a later result in; `weight` is what FoldState gives for the states.
  __device__ void FoldOutputs(const CombinedRows& later, const float2 (&weight)[kRows]) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      output[i] = FoldRows(output[i], later.output[i], weight[0], weight[kRows - 1]);
    }
  }
  __device__ void Fold(const CombinedRows& later) {
    float2 weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) weight[r] = FoldState(&state[r], later.state[r]);
    FoldOutputs(later, weight);
  }

  __device__ void Write(const VerifyArgs& args, const PlanItem& item, int row) const {
    using T = typename Traits::Row;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at_row = row + 8 * r;
      if (at_row >= item.num_rows) break;
      const OutputRow at = LocateRow(args, item, at_row);
      const RowStrides strides = args.params.out_strides;
      const float factor = InverseSum(state[r].y);
      T* out = static_cast<T*>(args.params.out) + at.row * strides.row + at.head * strides.head;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        if (!Has(i)) break;
        const float values[4] = {output[i].x, output[i].y, output[i].z, output[i].w};
#pragma unroll
        for (int c = 0; c < kChannels; c += 2) {
          *reinterpret_cast<uint32_t*>(out + Channel(i) + c) = ptx::Pack<T>(
              values[r * kChannels + c] * factor, values[r * kChannels + c + 1] * factor);
        }
      }
      if (threadIdx.x % 32 == 0) WriteLse(args, item, at_row, state[r]);
    }
  }
};

// What a part's states do to the fold of its group, of one row: its weights (old, new), the maximum
// then, and its sum as it comes in.
struct PartWeight {
  float old, part;
  float max, sum;

  // Lane j has the state of part begin + j, `place` in its group. `earlier` is the fold of the
  // group before this batch, if it began there. Called by a whole warp.
  __device__ static PartWeight Of(float2 state, float2 earlier, int place) {
    const int lane = threadIdx.x % 32;
    float max = state.x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, max, distance);
      if (lane >= distance && place >= distance) max = fmaxf(other, max);
    }
    if (place > lane) max = fmaxf(earlier.x, max);
    float before = __shfl_up_sync(0xffffffffu, max, 1);
    if (lane == 0) before = earlier.x;
    PartWeight weight = {StateWeight(before, max), StateWeight(state.x, max), max, state.y};
    if (place > 0) weight.sum = __fmul_rn(state.y, weight.part);
    return weight;
  }
};
static_assert(sizeof(PartWeight) == sizeof(uint4));

// Folds the partial results of a warp's rows and writes the output. `item` is the pair's first.
// Called by a whole warp once all parts are there. Its code is short and its loads are all under
// way at once: it runs when nothing else does, on a cold cache.
template <class Traits>
__device__ void CombineRows(const VerifyArgs& args, const PlanItem& item, int row,
                            const CombineBuffer& buffer) {
  using Rows = CombinedRows<Traits>;
  constexpr int kRows = Rows::kRows;
  constexpr int kThreadBytes = 16 * (Rows::kQuads + kRows);  // quads of a part, and a weight
  constexpr int kPartBytes = 16 * Rows::kQuads * Traits::kThreads;
  constexpr int kWarpWeights = 16 * kRows * 32;
  static_assert(kThreadBytes * Traits::kThreads ==
                kPartBytes + kWarpWeights * (Traits::kThreads / 32));
  const int lane = threadIdx.x % 32;
  const int num_parts = item.num_parts;
  const int group_parts = LeafGroup(item.num_leaves) / item.leaves_per_part();
  const uint32_t weights = buffer.address + threadIdx.x / 32 * kWarpWeights;
  const int weight_bytes = kWarpWeights * (Traits::kThreads / 32);
  const int at_once = min((buffer.bytes - weight_bytes) / kPartBytes, 32);
  const int64_t tile = args.row_tile;
  const int64_t part_quads = tile * (Traits::kHeadDim / 4);
  const auto* outputs =
      reinterpret_cast<const float4*>(args.outputs + item.slot * tile * Traits::kHeadDim);
  const float2* states = args.states + item.slot * tile + StateOffset<Traits>(row);
  const uint32_t mine = buffer.address + weight_bytes + threadIdx.x * (16 * Rows::kQuads);
  Rows total, group;
#pragma unroll
  for (int r = 0; r < kRows; ++r) group.state[r] = {-INFINITY, 0.0f};
  int place = 0;  // of the part in its group
#pragma unroll 1
  for (int begin = 0; begin < num_parts; begin += at_once) {
    const int count = min(at_once, num_parts - begin);
    float2 state[kRows] = {};
    if (lane < count) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) state[r] = __ldcg(states + (begin + lane) * tile + r);
    }
    const float4* part = outputs + begin * part_quads + Rows::Place(0, row, args.row_tile);
    uint32_t to = mine;
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
#pragma unroll
      for (int i = 0; i < Rows::kQuads; ++i) {
        if (!Rows::Has(i)) break;
        ptx::CopyAsync(to + 16 * i, part + (Rows::Place(i, row, args.row_tile) -
                                            Rows::Place(0, row, args.row_tile)));
      }
      part += part_quads;
      to += kPartBytes;
    }
    ptx::CommitCopies();
    __syncwarp();  // the weights before are no longer read
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const PartWeight weight =
          PartWeight::Of(state[r], group.state[r], (begin + lane) % group_parts);
      ptx::StoreShared128(weights + (lane * kRows + r) * 16, ptx::Bits<uint4>(weight));
    }
    __syncwarp();
    ptx::WaitCopies<0>();
    uint32_t from = mine;
#pragma unroll 2
    for (int j = 0; j < count; ++j, from += kPartBytes) {
      Rows next;
      PartWeight weight[kRows];
#pragma unroll
      for (int i = 0; i < Rows::kQuads; ++i) {
        next.output[i] = ptx::Bits<float4>(ptx::LoadShared128(from + 16 * i));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        weight[r] = ptx::Bits<PartWeight>(ptx::LoadShared128(weights + (j * kRows + r) * 16));
      }
      if (place == 0) {
        group = next;
#pragma unroll
        for (int r = 0; r < kRows; ++r) group.state[r].y = weight[r].sum;
      } else {
        float2 factor[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          factor[r] = {weight[r].old, weight[r].part};
          group.state[r].y = __fmaf_rn(group.state[r].y, weight[r].old, weight[r].sum);
        }
        group.FoldOutputs(next, factor);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) group.state[r].x = weight[r].max;
      if (++place < group_parts && begin + j < num_parts - 1) continue;
      place = 0;
      if (begin + j < group_parts) {
        total = group;
      } else {
        total.Fold(group);
      }
    }
  }
  total.Write(args, item, row);
}

// Each pair is combined in units of a CTA's kThreads threads: warps times rows.
template <class Traits>
__device__ int UnitsPerPair(const VerifyArgs& args) {
  constexpr int kWarps = Traits::kThreads / 32;
  return (CombinedRows<Traits>::Count(args.row_tile) + kWarps - 1) / kWarps;
}

// Called by one thread, when there is no further item.
__device__ inline uint32_t TakeTicket(const VerifyArgs& args, const LaunchCounts& counts) {
  auto& round = args.counters->round[counts.launch % 2];
  const uint32_t first_items = min(counts.num_items, static_cast<int>(gridDim.x));
  if (ptx::LoadAcquire(&round.started) != first_items) return kNoTicket;
  return atomicAdd(&round.tickets, 1);
}

// Called by the whole CTA after its last of `num_items` items: none of them has been reported yet.
// shared->queue.ticket is what TakeTicket has given, and if it stands for a unit, shared->plan its
// pair.
template <class Traits>
__device__ void CombineAll(const VerifyArgs& args, SharedItem* shared, int num_items,
                           const CombineBuffer& buffer) {
  const LaunchCounts counts = shared->queue.counts;
  if (counts.num_split_pairs == 0) return;
  auto& round = args.counters->round[counts.launch % 2];
  Traits::Meet();  // all of this CTA's stores are made
  if (threadIdx.x == 0) ptx::AddRelease(&round.done, num_items);
  const int units_per_pair = UnitsPerPair<Traits>(args);
  const uint32_t units = counts.num_split_pairs * units_per_pair;
  uint32_t unit = shared->queue.ticket;
  bool first = unit < units;
  if (unit == kNoTicket) {
    Traits::Meet();
    if (threadIdx.x == 0) shared->queue.ticket = TakeTicket(args, counts);
    Traits::Meet();
    unit = shared->queue.ticket;
  }
  if (unit >= units) return;
  if (threadIdx.x == 0) {
    while (ptx::LoadAcquire(&round.done) != static_cast<uint32_t>(counts.num_items)) {
    }
  }
  while (true) {
    Traits::Meet();
    uint32_t next = 0;
    if (threadIdx.x == 0) next = atomicAdd(&round.tickets, 1);
    const PlanItem pair = first ? shared->plan : args.pairs[unit / units_per_pair];
    const int index = unit % units_per_pair * (Traits::kThreads / 32) + threadIdx.x / 32;
    const int row = CombinedRows<Traits>::Row(index);
    if (row < pair.num_rows) CombineRows<Traits>(args, pair, row, buffer);
    first = false;
    if (threadIdx.x == 0) shared->queue.ticket = next;
    Traits::Meet();
    unit = shared->queue.ticket;
    if (unit >= units) return;
  }
}

}  // namespace nwor
