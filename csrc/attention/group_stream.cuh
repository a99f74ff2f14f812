#pragma once

#include "attention/item.cuh"
#include "attention/warpgroup.cuh"

namespace nwor {

// What one warpgroup kernel is compiled for: see VerifyTraits.
template <typename T, bool kFloat8_, int kHeadDim_>
struct GroupTraits {
  using Row = T;
  using Product = std::conditional_t<kFloat8_, __half, T>;

  static constexpr bool kAvailable = wgmma::kAvailable;
  static constexpr bool kFloat8 = kFloat8_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowTile = kGroupRows;
  static constexpr int kThreads = kGroupThreads;
  static constexpr int kStepTokens = GroupStepTokens(kHeadDim);
  static constexpr int kTileBytes = GroupTileBytes(kHeadDim);
  static constexpr int kStageBytes = GroupStageBytes(kHeadDim, kFloat8);
  // The widest atom that divides a row.
  static constexpr int kAtomBytes = kHeadDim % 64 == 0 ? 128 : kHeadDim % 32 == 0 ? 64 : 32;
  static constexpr int kAtomStride = kStepTokens * kAtomBytes;  // between atoms side by side
};

// Feeds the tiles of a warpgroup: tokens of the prefix through the page map, then in-flight rows.
// Eight threads copy a token, a block of 16 (never across pages) at a time: a thread keeps its
// place in the block, so that all its addresses in shared memory differ by constants.
template <class Traits>
class GroupStream {
 public:
  // Tokens [begin, end) of the prefix and the request's first tail_rows rows. `tiles` are the
  // widened tokens of a float8 cache.
  __device__ GroupStream(const VerifyArgs& args, const SharedItem& item, uint32_t stages,
                         uint32_t tiles, int begin, int end, int tail_rows)
      : args_(args),
        item_(item),
        stages_(stages),
        tiles_(tiles),
        begin_(begin),
        end_(end),
        tail_rows_(tail_rows),
        num_prefix_((end - begin + kStep - 1) / kStep),
        num_steps_(num_prefix_ + (tail_rows + kStep - 1) / kStep),
        wide_(Traits::kFloat8 && item.plan.source == TokenSource::kCompact),
        policy_(ptx::EvictFirstPolicy()) {}

  __device__ int num_prefix() const { return num_prefix_; }
  __device__ int num_steps() const { return num_steps_; }
  __device__ int PrefixToken(int step) const { return begin_ + step * kStep; }
  __device__ int TailRow(int step) const { return (step - num_prefix_) * kStep; }

  // Steps [plain_begin, plain_end) hold whole blocks of prefix tokens that every row sees.
  __device__ int plain_begin() const {
    // Rows stand at prefix_tokens and beyond, at most request_rows - 1 further.
    const int window = args_.params.window;
    if (window == 0) return 0;
    const int seen_by_all = item_.plan.prefix_tokens + item_.plan.request_rows - window;
    return (max(seen_by_all - begin_, 0) + kStep - 1) / kStep;
  }
  __device__ int plain_end() const { return wide_ ? 0 : (end_ - begin_) / kStep; }

  // Whether a plain step's pages are at hand: every so often Load has to look them up.
  __device__ static bool IsAtHand(int step) { return step % (32 / kBlocks) != 0; }

  // Load for a plain step that is at hand.
  __device__ void LoadPlain(int step, int stage) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int lane = (step * kBlocks + i) % 32;
      CopyBlock<true>(stage, i, __shfl_sync(0xffffffffu, key_offset_, lane),
                      __shfl_sync(0xffffffffu, value_offset_, lane), 0);
    }
    ptx::CommitCopies();
  }

  // Starts the copies of a step, ascending from 0, and closes their group; an empty one past the
  // end.
  __device__ void Load(int step, int stage) {
    if (step < num_prefix_ && !wide_) {
#pragma unroll 1
      for (int i = 0; i < kBlocks; ++i) {
        const int block = step * kBlocks + i;
        if (block % 32 == 0) LookUp(block);
        CopyBlock<false>(stage, i, __shfl_sync(0xffffffffu, key_offset_, block % 32),
                         __shfl_sync(0xffffffffu, value_offset_, block % 32),
                         PrefixToken(step) + i * 16);
      }
    } else if (step < num_steps_ && !Traits::kFloat8) {
      ForWideBlocks(step, [&](int i, const char* key, const char* value, bool valid) {
#pragma unroll
        for (int j = 0; j < kSpans; ++j) {
          if (!HasChunk(j)) break;
          const uint32_t to = stages_ + stage * Traits::kStageBytes + TileOffset(i, j);
          ptx::CopyAsync(to, key + j * 128, valid, policy_);
          ptx::CopyAsync(to + Traits::kTileBytes, value + j * 128, valid, policy_);
        }
      });
    }
    ptx::CommitCopies();
  }

  // Float8 caches: widens a step's tokens from its stage into the tiles. A thread widens what it
  // has copied itself. 16-bit tokens come straight from global memory: there are few.
  __device__ void Widen(int step, int stage) const {
    if (step < num_prefix_ && !wide_) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kRawSpans; ++j) {
          if (!HasRawChunk(j)) break;
          const uint32_t from = RawAddress(stage, i, j);
          const uint32_t to = tiles_ + WideOffset(i, j);
          WidenChunk(to, from);
          WidenChunk(to + Traits::kTileBytes, from + 2048);
        }
      }
    } else {
      ForWideBlocks(step, [&](int i, const char* key, const char* value, bool valid) {
#pragma unroll 1
        for (int j = 0; j < kSpans; ++j) {
          if (!HasChunk(j)) break;
          const uint32_t to = tiles_ + TileOffset(i, j);
          StoreHalves(to, valid ? *reinterpret_cast<const uint4*>(key + j * 128) : uint4{});
          StoreHalves(to + Traits::kTileBytes,
                      valid ? *reinterpret_cast<const uint4*>(value + j * 128) : uint4{});
        }
      });
    }
  }

  // The step's K; V lies kTileBytes further.
  __device__ uint32_t Tile(int stage) const {
    return Traits::kFloat8 ? tiles_ : stages_ + stage * Traits::kStageBytes;
  }

 private:
  static constexpr int kStep = Traits::kStepTokens;
  static constexpr int kBlocks = kStep / 16;
  static constexpr int kChunks = Traits::kHeadDim / 8;      // of a 16-bit token
  static constexpr int kSpans = (kChunks + 7) / 8;          // of eight chunks
  static constexpr int kRawChunks = Traits::kHeadDim / 16;  // of a float8 token
  static constexpr int kRawSpans = (kRawChunks + 7) / 8;
  static constexpr int kAtomChunks = Traits::kAtomBytes / 16;
  using Atom = RowSwizzle<Traits::kAtomBytes>;

  // This thread's token of a block and its first chunk. Beside float8 caches the eight threads of a
  // token take its second half from the neighbouring token: the chunks they widen to then lie in
  // distinct banks.
  __device__ static int row() {
    return Traits::kFloat8 ? threadIdx.x / 8 ^ (threadIdx.x % 8 / 4) : threadIdx.x / 8;
  }
  __device__ static int chunk() { return threadIdx.x % 8; }
  __device__ static bool HasChunk(int j) { return kChunks % 8 == 0 || chunk() + 8 * j < kChunks; }
  __device__ static bool HasRawChunk(int j) {
    return kRawChunks % 8 == 0 || chunk() + 8 * j < kRawChunks;
  }

  // In a tile: this thread's chunk j (of 16 bits) of block i.
  __device__ static uint32_t TileOffset(int i, int j) {
    return chunk() / kAtomChunks * Traits::kAtomStride +
           Atom::Offset(row(), chunk() % kAtomChunks) + i * 16 * Traits::kAtomBytes +
           j * (8 / kAtomChunks) * Traits::kAtomStride;
  }
  // The two chunks that raw chunk j widens to lie at the result and at the result ^ 16.
  __device__ static uint32_t WideOffset(int i, int j) {
    const int first = 2 * chunk();
    return first / kAtomChunks * Traits::kAtomStride + Atom::Offset(row(), first % kAtomChunks) +
           i * 16 * Traits::kAtomBytes + j * (16 / kAtomChunks) * Traits::kAtomStride;
  }
  __device__ uint32_t RawAddress(int stage, int i, int j) const {
    return stages_ + stage * Traits::kStageBytes + (i * kRawSpans + j) * 4096 + threadIdx.x * 16;
  }

  // Block i of a step, whose first token is `token`; all of it if kWhole.
  template <bool kWhole>
  __device__ void CopyBlock(int stage, int i, int64_t key_offset, int64_t value_offset,
                            int token) const {
    const TokenMap& map = item_.tokens;
    const bool valid = kWhole || (token + row() >= window_begin() && token + row() < end_);
    const int64_t place = valid ? row() : 0;
    const char* key = map.keys + key_offset + place * map.key_token + chunk() * 16;
    const char* value = map.values + value_offset + place * map.value_token + chunk() * 16;
#pragma unroll
    for (int j = 0; j < (Traits::kFloat8 ? kRawSpans : kSpans); ++j) {
      if (!(Traits::kFloat8 ? HasRawChunk(j) : HasChunk(j))) break;
      const uint32_t to = Traits::kFloat8
                              ? RawAddress(stage, i, j)
                              : stages_ + stage * Traits::kStageBytes + TileOffset(i, j);
      const uint32_t value_to = to + (Traits::kFloat8 ? 2048 : Traits::kTileBytes);
      if constexpr (kWhole) {
        ptx::CopyAsync(to, key + j * 128, policy_);
        ptx::CopyAsync(value_to, value + j * 128, policy_);
      } else {
        ptx::CopyAsync(to, key + j * 128, valid, policy_);
        ptx::CopyAsync(value_to, value + j * 128, valid, policy_);
      }
    }
  }

  // Calls copy(block, key, value, valid) with this thread's first chunk of each block of 16-bit
  // tokens: in-flight rows, or a compact view beside a float8 cache.
  template <typename Copy>
  __device__ void ForWideBlocks(int step, Copy copy) const {
    const VerifyParams& p = args_.params;
    const bool in_flight = step >= num_prefix_;
    const int first = in_flight ? TailRow(step) : PrefixToken(step);
    const int64_t head = item_.plan.kv_head;
#pragma unroll 1
    for (int i = 0; i < kBlocks; ++i) {
      const int at = first + i * 16 + row();
      const bool valid = in_flight ? at < tail_rows_ : at >= window_begin() && at < end_;
      const int64_t place = valid ? at : 0;
      const char* key;
      const char* value;
      if (in_flight) {
        const int64_t from = item_.plan.query_start + place;
        key = static_cast<const char*>(p.key) +
              (from * p.key_strides.row + head * p.key_strides.head) * 2;
        value = static_cast<const char*>(p.value) +
                (from * p.value_strides.row + head * p.value_strides.head) * 2;
      } else {
        key = item_.tokens.keys + place * item_.tokens.key_token;
        value = item_.tokens.values + place * item_.tokens.value_token;
      }
      copy(i, key + chunk() * 16, value + chunk() * 16, valid);
    }
  }

  __device__ static void Store(uint32_t to, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
  }
  __device__ static void StoreHalves(uint32_t to, uint4 v) {
    using Row = typename Traits::Row;
    Store(to, {ptx::ToHalf2<Row>(v.x), ptx::ToHalf2<Row>(v.y), ptx::ToHalf2<Row>(v.z),
               ptx::ToHalf2<Row>(v.w)});
  }
  __device__ static void WidenChunk(uint32_t to, uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    const auto low = [](uint32_t four) { return ptx::Float8ToHalf2(four & 0xffffu); };
    const auto high = [](uint32_t four) { return ptx::Float8ToHalf2(four >> 16); };
    const uint4 first = {low(v.x), high(v.x), low(v.y), high(v.y)};
    const uint4 second = {low(v.z), high(v.z), low(v.w), high(v.w)};
    Store(to, first);
    Store(to ^ 16, second);
  }

  // Finds where the next 32 blocks lie, one per lane.
  __device__ void LookUp(int first_block) {
    const int token = begin_ + (first_block + static_cast<int>(threadIdx.x % 32)) * 16;
    const BlockOffsets at = LocateBlock(args_, item_, token, end_);
    key_offset_ = at.key;
    value_offset_ = at.value;
  }

  // Tokens before it are outside every row's window.
  __device__ int window_begin() const {
    return WindowBegin(args_.params, item_.plan.prefix_tokens);
  }

  const VerifyArgs& args_;
  const SharedItem& item_;
  uint32_t stages_, tiles_;
  int begin_, end_, tail_rows_;
  int num_prefix_, num_steps_;
  bool wide_;  // prefix tokens are 16-bit although the pages are float8
  int64_t key_offset_ = 0, value_offset_ = 0;  // of block 32k + lane
  uint64_t policy_;
};

}  // namespace nwor
