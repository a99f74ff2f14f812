#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/cache_layout.h"
#include "base/export.h"
#include "base/types.h"
#include "kv_interceptor/commit/counters.h"
#include "kv_interceptor/commit/error.h"
#include "kv_interceptor/commit/tail.h"
#include "kv_interceptor/stage/stage.h"

// The commit: accepted rows move from staging to the caches of every layer, or none of them does.
//
// Everything is validated before the first byte is written. Destinations are the slots of
// consecutive positions, so committing a tree path is its compaction.

namespace nwor {

inline constexpr int kMaxCommitLayers = 256;
inline constexpr int kMaxCommitGroups = 8;
inline constexpr int kMaxCommitRows = 8192;  // num_requests * depth

// Layers that share slots, geometry and one staging buffer.
struct CommitGroup {
  KvRowsView staged;             // layer 0 of [L, M, H, D]
  int64_t staged_key_layer = 0;  // elements between two layers
  int64_t staged_value_layer = 0;
  const int64_t* slots = nullptr;      // [B, depth] destinations, or null:
  const int64_t* row_slots = nullptr;  // [M] the slot each staging row was written with
  CacheGeometry geometry;
  DType dtype = DType::kBFloat16;  // of staged rows
};

struct CommitLayer {
  void* key = nullptr;  // the layer's cache
  void* value = nullptr;
  KvScales scales;
  int32_t group = 0;
  int32_t staged_layer = 0;  // index into the group's staging
};

struct CommitParams {
  std::array<CommitGroup, kMaxCommitGroups> groups;
  std::array<CommitLayer, kMaxCommitLayers> layers;
  int32_t num_groups = 0;
  int32_t num_layers = 0;

  const int32_t* path = nullptr;    // [B, depth] rows of accepted drafts, root excluded, -1 padded
  const int32_t* counts = nullptr;  // [B] accepted drafts
  int32_t num_requests = 0;         // B
  int32_t depth = 0;
  int32_t num_staging_rows = 0;  // M

  // How a path entry names a staging row: entry + row_base[b], then through row_map. Null: as it
  // is.
  const int32_t* row_base = nullptr;  // [B]
  const int32_t* row_map = nullptr;   // [num_map_rows], -1 = not a draft row
  int32_t num_map_rows = 0;
  const int32_t* request_rows = nullptr;  // [B + 1] staging rows of request b, or null: unchecked
  const int32_t* parents = nullptr;  // [M] staging row of the parent, -1 = root; null: unchecked
  // [B] last committed staging row of an earlier chunk, -1 = root; updated. Null: there is no
  // earlier chunk, and no later one.
  int32_t* tips = nullptr;

  int64_t* round_status = nullptr;     // faults of the round's writes; nonzero code refuses
  const int64_t* agreement = nullptr;  // [2] max over ranks of digest and of ~digest, or null
  int64_t* status = nullptr;           // int64[8], written by every commit
  int64_t* counters = nullptr;         // int64[kNumCommitCounters] added to, or null
  int64_t bytes_per_token = 0;         // over all layers, for the counters
  // >= 0: this commit ends a round that staged so many tokens. On CUDA it then leaves tips and
  // round_status as the next round wants them, -1 and without a fault, so that beginning one is no
  // launch.
  int64_t closing_tokens = -1;
  CommitTail tail;  // fed in the same launch; REQUIRES: one group
  // CUDA: one zeroed word, left zero. Needed when publishing may have to wait for every block: with
  // tips, with round_status in a commit that ends a round, or when status and round_status are one;
  // may be null otherwise.
  uint32_t* ticket = nullptr;

  StreamHandle stream = nullptr;
};

// Writes rows into one layer's cache. The indirection exists so that tests can make a write fail.
class NWOR_EXPORT CacheWriter {
 public:
  virtual ~CacheWriter() = default;
  // Copies or quantises one staged row (K and V) into `slot` of `cache`.
  virtual void WriteRow(const CacheLayout& cache, int64_t slot, const KvRowsView& row,
                        DType row_dtype) = 0;
  // Whether WriteRow may throw. For a writer that cannot, no old bytes are kept: that would double
  // what a commit moves.
  virtual bool may_fail() const { return true; }
};
NWOR_EXPORT CacheWriter& PlainCacheWriter();

// The result of validating a commit.
struct CommitVerdict {
  CommitError error = CommitError::kOk;
  int64_t request = 0;
  int64_t index = 0;
  int64_t value = 0;
};

// Reads host memory only; changes nothing. The reported fault is the first by (request, index).
NWOR_EXPORT CommitVerdict ValidateCommit(const CommitParams& params);

// The tails of compact views, after the rows are in the caches. Host memory only.
NWOR_EXPORT void FeedTail(const CommitParams& params);

// Old bytes of the destinations, kept between commits so that a commit allocates nothing.
struct NWOR_EXPORT CommitUndoLog {
  std::vector<std::byte> bytes;
};

// Validates, then writes every row of every layer. If a write throws, everything written so far is
// put back byte for byte and the verdict is kWriteFailed; staging is untouched either way. The
// plain writer copies memory and cannot throw.
NWOR_EXPORT CommitVerdict CommitCpu(const CommitParams& params, CommitUndoLog& log,
                                    CacheWriter& writer = PlainCacheWriter());

// One launch; validated on the device by every block alike; no host sync; capturable.
NWOR_EXPORT void LaunchCommit(const CommitParams& params);  // CUDA builds only

// A 64-bit digest of counts, accepted path entries and their slots; equal on ranks that commit
// alike. Writes {digest, ~digest} so that one MAX all-reduce shows agreement; a round with faults
// writes a pair that agrees with none, itself included.
NWOR_EXPORT void CommitDigestCpu(const CommitParams& params, int64_t digest[2]);
NWOR_EXPORT void LaunchCommitDigest(const CommitParams& params,
                                    int64_t* digest);  // CUDA builds only

}  // namespace nwor
