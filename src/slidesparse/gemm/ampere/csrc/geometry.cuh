// The sizes of a tile, and of everything that shared memory holds of it.

#pragma once

#include "types.cuh"

constexpr int SLAB = 128;                                    // bytes of an X row in a slab
constexpr int CHANNELS = ROW_WARPS * ROW_BLOCKS * 16;        // of a tile
constexpr int TOKENS = TOKEN_WARPS * TOKEN_BLOCKS * 8;       // of a tile
constexpr int TEAM = 32 * ROW_WARPS * TOKEN_WARPS;           // threads that share the steps of a tile
constexpr int THREADS = TEAM * SPLIT;
constexpr int INSTRUCTIONS = DENSE ? 4 : 2;                  // of 16 channels and 8 tokens in a step

// A row block of 64 channels is a sequence of planes in memory, each with so many bytes of every 16 channels, one after another
// (gemm/steps.py): values then metadata; instructions of six bits; or halves of a dense slab.
constexpr int PLANES = DENSE ? (VALUE_BITS == 6 ? 8 : 2) : VALUE_BITS == 6 ? 2 : 1 + META_WORDS;
__device__ constexpr int width(int plane) {
    if (VALUE_BITS == 6) return DENSE ? (plane % 2 ? 128 : 256) : 512;
    return DENSE || plane == 0 ? 1024 : 128;
}
__device__ constexpr int before(int plane) {
    if (VALUE_BITS == 6) return DENSE ? plane / 2 * 384 + plane % 2 * 256 : plane * 512;
    return DENSE || plane == 0 ? plane * 1024 : 1024 + (plane - 1) * 128;
}

constexpr int BLOCK_BYTES = 4 * before(PLANES);              // of a row block in memory
constexpr int PARTS = CHANNELS < 64 ? CHANNELS / 16 : 4;     // of a row block, 16 channels each, in shared memory
constexpr int PART_BLOCK = PARTS * before(PLANES);           // bytes of a row block there
constexpr int X_BYTES = TOKENS * SLAB;
constexpr int W_BYTES = CHANNELS / 16 * before(PLANES);
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;             // of a team

constexpr int PIECE_ROW = ROW_BLOCKS * 16 * (int)sizeof(out_t) + 16;  // so padded, no two lanes use the same bank
constexpr int PIECES = sizeof(out_t) == 2 ? 2 : 1;           // of a warp, each with the results of 8 tokens
constexpr int PIECE_BYTES = 16 * (ROW_BLOCKS * 32 + 16);     // of a warp: enough for either
constexpr int FACTOR_BYTES = (TOKENS + 2 * CHANNELS) * 4;    // token scales, channel scales and bias
constexpr int SUM_BYTES = SPLIT / 2 * CHANNELS * TOKENS * 4; // the sums of half of the teams

static_assert(TEAM / 32 * PIECE_BYTES <= STAGE_BYTES, "results are stored through a stage");
static_assert(STAGES >= 3, "one stage is read, the next one has been awaited, and another is filled");
static_assert(PARTS % ROW_BLOCKS == 0 || ROW_BLOCKS % PARTS == 0, "a warp starts at a row block, or ends within one");
static_assert(!DENSE || TOKEN_BLOCKS % 2 == 0, "a dense weight's activations are loaded for 16 tokens");
