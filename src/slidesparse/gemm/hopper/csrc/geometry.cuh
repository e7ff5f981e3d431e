// The sizes of a tile, and of everything that shared memory and registers hold of it.

#pragma once

#include "types.cuh"

constexpr int ROWS = 64;                    // channels of a row block: the M of wgmma
constexpr int SLAB = 128;                   // bytes of an X row in a slab
constexpr int HALF = 64;                    // bytes of a weight row in a step
constexpr int W_TILE = 4;                   // row blocks that are contiguous in memory, step by step
constexpr int TILE_BLOCKS = WARPGROUPS * ROW_BLOCKS;
constexpr int X_BYTES = TOKENS * SLAB;
constexpr int VALUE_BYTES = ROWS * HALF;
constexpr int META_BYTES = COUNT_BITS == 0 && !DENSE ? META_WORDS * 512 : 0;
constexpr int SPARSE_BYTES = VALUE_BYTES / 8 * VALUE_BITS * (1 + DENSE) + META_BYTES;  // of a row block in a slab of this mainloop
constexpr int WEIGHT_BYTES = SPARSE_BYTES > VALUE_BYTES ? SPARSE_BYTES : VALUE_BYTES;
constexpr int STAGE_BYTES = (X_BYTES + TILE_BLOCKS * WEIGHT_BYTES + 1023) / 1024 * 1024;  // X's swizzle repeats after 1024

// A bundle's words have a slot from its first step on. It is filled again for the first step of the bundle SLOTS later, when
// consumers have given back the step STAGES before that. The old bundle's last step is (SLOTS - 1) * windows + 1 >= STAGES
// steps before it, or more where dense steps lie between, so they have read its words. SLOTS is for the fewest windows.
constexpr int COUNT_BYTES = COUNT_BITS * 512;             // of a row block in a bundle
constexpr int SLOT_BYTES = TILE_BLOCKS * COUNT_BYTES;
constexpr int FEWEST_WINDOWS = COUNT_BITS == 3 ? 2 : 4;
constexpr int SLOTS = COUNT_BITS == 0 ? 0 : 1 + (STAGES - 1 + FEWEST_WINDOWS - 1) / FEWEST_WINDOWS;

// Tokens that a block completes and stores: the fewest, in multiples of 16, that make at most one share a block.
__host__ __device__ constexpr int share_of(int tokens, int split) {
    int share = 16;
    while (tokens % share != 0 || tokens / share > split) share += 16;
    return share;
}

constexpr int SHARE = share_of(TOKENS, SPLIT);
constexpr int CHANNELS = ROW_BLOCKS * ROWS;               // channels of a warpgroup
constexpr int PIECE = 32;                                 // tokens that a warpgroup transposes at a time
constexpr int ROW_BYTES = CHANNELS * 2;
constexpr int PIECE_BYTES = PIECE * ROW_BYTES;
constexpr int FACTOR_BYTES = (SHARE + 2 * CHANNELS) * 4;  // token scales, channel scales and bias of a block's share
constexpr int RESULT_BYTES = PIECE_BYTES + FACTOR_BYTES;
constexpr int SUM_BYTES = TILE_BLOCKS * ROWS * SHARE * 4;  // the sums that one block gives another
constexpr int EXCHANGE_BYTES = (SPLIT - 1) * SUM_BYTES;
constexpr bool SUMS_IN_RING = SPLIT > 1 && TILE_BLOCKS == W_TILE;  // shared memory does not hold both
constexpr int APART_BYTES = SUMS_IN_RING ? 0 : EXCHANGE_BYTES;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCER_REGISTERS = SPLIT > 1 && (COUNT_BITS > 0 || ROW_BLOCKS == 1) ? 40 : 24;  // with 24 some of those spill
constexpr int LAUNCH_REGISTERS = 65536 / (BLOCKS * THREADS) / 8 * 8;
constexpr int LEFT_REGISTERS = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * 128) / (128 * WARPGROUPS) / 8 * 8;
constexpr int CONSUMER_REGISTERS = LEFT_REGISTERS < 240 ? LEFT_REGISTERS : 240;

static_assert(TOKENS % 16 == 0 && W_TILE % TILE_BLOCKS == 0, "tokens go in sixteens, and the weights of a tile are contiguous");
static_assert(X_BYTES % 512 == 0 && SPARSE_BYTES % 512 == 0, "the swizzle of weights repeats every 512 bytes");
static_assert(STAGES >= 3, "a dense slab holds two stages while the next step is awaited");
static_assert(!SUMS_IN_RING || EXCHANGE_BYTES <= STAGES * STAGE_BYTES, "the ring holds the sums");
static_assert(!GROUPED || SPLIT == 1, "the blocks of a cluster must all have work, or none");
