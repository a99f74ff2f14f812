#pragma once

#include <cstdint>
#include <vector>

#include "attention/params.h"
#include "base/export.h"

// The pieces of the CPU attention that do not depend on the instruction set.
//
// Work is cut in two ways. Rows: the rows of one request times the query heads that share a KV head
// are packed (row-major, so packed row i is row i / group, head i % group) and walk the prefix
// together; a request with very many rows is cut into chunks, and chunks may share out the heads.
// Prefix: leaves of kLeafTokens tokens, each attended from a fresh state; leaf states are merged by
// a fixed binary tree (state_stack.h). A row's arithmetic depends on its request alone, so its bits
// depend on neither batch nor threads.

namespace nwor::cpu {

inline constexpr int kTileRows = 4;         // packed rows that share a register tile
inline constexpr int kLeafTokens = 512;     // prefix tokens per leaf of the merge tree
inline constexpr int kMaxPackedRows = 256;  // per chunk, all heads: queries and sums stay in L2
inline constexpr int kMaxBlockTokens = 64;  // one mask word
inline constexpr int kMaxLanes = 16;        // of any instruction set

// Tokens walked at a time: a block of float K (or V) stays in L1.
constexpr int BlockTokens(int head_dim) { return head_dim <= 128 ? kMaxBlockTokens : 32; }

// Some rows of one request, for some KV heads. Heads share the walk over the prefix because engines
// keep the heads of a token side by side; each has its own tiles.
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

// A stretch of the prefix; the last one of a request goes on with its in-flight rows.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool then_rows = false;
};

// Online softmax over what was seen so far, in units of log2 and not yet normalised.
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
  // Makes room for a chunk, and for a matrix unit if one is used. Contents are undefined
  // afterwards.
  void Prepare(const RowChunk& rows, int head_dim, bool matrix_unit);

  // Memory of `count` states, valid until the next call.
  float* States(int count, int tiles, int head_dim);

  float* queries = nullptr;  // [tiles, D / lanes, kTileRows, lanes]
  float* tokens = nullptr;   // [block_tokens, D + lanes] of K, then of V
  float* scores = nullptr;   // [head_tiles, block_tokens, kTileRows]
  float* decay = nullptr;    // [head_tiles, kTileRows] what the block leaves of the old sums
  float* zeros = nullptr;    // [D] stands for tokens that pad a block
  // Per row of the chunk, for window and masks.
  int64_t* visible_from = nullptr;  // first position the row may see
  uint64_t* visible = nullptr;      // bit i: the row sees token i of the block
  // Of a matrix unit, bfloat16 in its own order: see MatrixUnit.
  uint16_t* pairs = nullptr;        // [heads, rows in sixteens, D] queries
  uint16_t* key_rows = nullptr;     // [32, D] K that does not lie where the unit could read it
  uint16_t* value_pairs = nullptr;  // [block_tokens, D]
  uint16_t* weights = nullptr;      // [32 rows, 64 tokens, 2]
  float* sums = nullptr;            // [16, D]

 private:
  void PrepareMatrixUnit(const RowChunk& rows, int head_dim);

  std::vector<float> floats_;
  std::vector<float> states_;
  std::vector<int64_t> positions_;
  std::vector<uint64_t> words_;
  std::vector<uint16_t> matrix_words_;
};

// What each instruction set provides. All functions are thread-safe; none allocates.
struct Kernels {
  const char* name;
  int lanes;         // D must be a multiple
  bool matrix_unit;  // whether it needs memory for one

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
extern const Kernels kAmxKernels;  // those, and a matrix unit for bfloat16
#endif

// The kernels this machine can run for this D, widest first. REQUIRES: head_dim % 8 == 0.
std::vector<const Kernels*> SupportedKernels(int head_dim);

}  // namespace nwor::cpu
