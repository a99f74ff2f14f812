#pragma once

#include <cstdint>
#include <vector>

#include "attention/params.h"
#include "base/export.h"

// What the instruction sets of the CPU attention share: the units of work, the softmax state, the
// working memory of a thread, and the table of functions that each instruction set provides.
//
// Work is divided in two ways. Rows: the rows of one request times the query heads of a KV head are
// packed (packed row i is row i / group, head i % group) and walk the prefix together. A request
// with very many rows is divided into chunks, and chunks may divide the heads. Prefix: splits of
// kSplitTokens tokens, each attended from an empty state; the states are merged by a fixed binary
// tree (merge_tree.h). A row's arithmetic depends on its request only, so its bits depend neither
// on the batch nor on the number of threads.

namespace nwor::cpu {

inline constexpr int kTileRows = 4;         // packed rows that share a register tile
inline constexpr int kSplitTokens = 512;    // prefix tokens of a split
inline constexpr int kMaxPackedRows = 256;  // of a chunk, all heads: queries and sums stay in L2
inline constexpr int kMaxBlockTokens = 64;  // one mask word
inline constexpr int kMaxLanes = 16;        // of any instruction set

// Tokens walked at a time: a block of float K (or V) stays in L1.
constexpr int BlockTokens(int head_dim) { return head_dim <= 128 ? kMaxBlockTokens : 32; }

// Some rows of one request, for some KV heads. The heads share the walk over the prefix because the
// cache keeps the heads of a token side by side; each head has its own tiles.
struct RowChunk {
  int32_t request = 0;
  int32_t request_row = 0;  // the request's first row among all rows
  int32_t request_rows = 0;
  int32_t first = 0;  // the chunk's rows, counted from request_row
  int32_t count = 0;
  int32_t group = 1;       // query heads per KV head
  int32_t first_head = 0;  // KV heads
  int32_t num_heads = 1;

  constexpr int packed() const { return count * group; }  // per KV head
  constexpr int head_tiles() const { return (packed() + kTileRows - 1) / kTileRows; }
  constexpr int tiles() const { return num_heads * head_tiles(); }
};

// The tokens of a split. The last split of a request continues with its in-flight rows.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool then_rows = false;
};

// Online softmax state: log2 units, not normalised.
struct State {
  float* max = nullptr;  // [tiles * kTileRows]
  float* sum = nullptr;  // [tiles * kTileRows]
  float* acc = nullptr;  // [tiles * kTileRows, D]

  static constexpr int64_t Floats(int tiles, int head_dim) {
    return static_cast<int64_t>(tiles) * kTileRows * (head_dim + 2);
  }
  static State At(float* memory, int tiles, int head_dim) {
    const int64_t rows = static_cast<int64_t>(tiles) * kTileRows;
    return {memory + rows * head_dim, memory + rows * (head_dim + 1), memory};
  }
};

// One thread's working memory; grows, never shrinks.
class NWOR_EXPORT Scratch {
 public:
  // Makes room for a chunk, and for AMX if it is used. Contents are undefined afterwards.
  void Prepare(const RowChunk& rows, int head_dim, bool uses_amx);

  // Memory of `count` states, valid until the next call.
  float* States(int count, int tiles, int head_dim);

  float* queries = nullptr;  // [tiles, D / lanes, kTileRows, lanes]
  float* tokens = nullptr;   // [block_tokens, D + lanes] of K, then of V
  float* scores = nullptr;   // [head_tiles, block_tokens, kTileRows]
  float* decay = nullptr;    // [head_tiles, kTileRows] factor of the sums so far
  float* zeros = nullptr;    // [D] stands for tokens that pad a block
  // Per row of the chunk, for window and masks.
  int64_t* visible_from = nullptr;  // first position the row may see
  uint64_t* visible = nullptr;      // bit i: the row sees token i of the block
  // For AMX, bfloat16 in the order of its tiles: see Amx.
  uint16_t* pairs = nullptr;        // [heads, rows in sixteens, D] queries
  uint16_t* key_rows = nullptr;     // [32, D] copies of K whose rows are not evenly spaced
  uint16_t* value_pairs = nullptr;  // [block_tokens, D]
  uint16_t* weights = nullptr;      // [32 rows, 64 tokens, 2]
  float* sums = nullptr;            // [16, D]

 private:
  void PrepareAmx(const RowChunk& rows, int head_dim);

  std::vector<float> floats_;
  std::vector<float> states_;
  std::vector<int64_t> positions_;
  std::vector<uint64_t> words_;
  std::vector<uint16_t> amx_words_;
};

// What each instruction set provides. All functions are thread-safe; none allocates.
struct Kernels {
  const char* name;
  int lanes;      // D must be a multiple
  bool uses_amx;  // whether it needs memory for AMX

  // Copies the chunk's queries, as float, into scratch.queries.
  void (*pack_queries)(const VerifyParams& params, const RowChunk& rows, Scratch& scratch);
  // Attends the packed queries to a range, into a state it first clears.
  void (*attend)(const VerifyParams& params, const RowChunk& rows, const TokenRange& range,
                 Scratch& scratch, const State& state);
  // into = into merged with from, for `tiles` tiles.
  void (*merge)(const State& into, const State& from, int tiles, int head_dim);
  // Normalises a state into params.out and params.lse.
  void (*finish)(const VerifyParams& params, const RowChunk& rows, const State& state);
};

extern const Kernels kGenericKernels;
#if defined(__aarch64__)
extern const Kernels kNeonKernels;
#elif defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAmxKernels;  // AVX-512, and AMX for bfloat16
#endif

// The kernels that this machine can run for this D, widest first. REQUIRES: head_dim % 8 == 0.
std::vector<const Kernels*> SupportedKernels(int head_dim);

}  // namespace nwor::cpu
