#pragma once

// The CPU attention, compiled once per instruction set: kernel_<set>.cpp sets the level of simd.h,
// includes this file and lists its functions in a cpu::Kernels (kernels.h). verify.cpp divides a
// step into work tiles and calls them from torch's threads:
//
//   query_pack.h       pack_queries: a chunk's queries as float, interleaved for tiles
//   split_attention.h  attend: one split, block of tokens by block of tokens; mask (block_mask.h)
//   tile.h             QK, softmax and PV of one tile of four packed rows
//   merge_state.h      merge: two states; finish: normalises a state into out and LSE
//
// K and V are read in place through prefix_reader.h, or copied as float when several tiles share
// them.

#include "attention/cpu/merge_state.h"      // Merge, Finish
#include "attention/cpu/query_pack.h"       // PackQueries
#include "attention/cpu/split_attention.h"  // Attend
