// GROUPED is for mixtures of experts: each token tile belongs to one expert, whose weights, scales and bias follow those of
// the expert before it. Which expert, and how many tiles have work, only the device knows; the other blocks leave at once.
// Everything else is as for one weight, which is expert 0 here.

#pragma once

#include "arguments.cuh"
#include "geometry.cuh"
#include "walk.cuh"

__device__ __forceinline__ int token_tiles_of(const Arguments& p) {
    return GROUPED ? __ldcg(p.used) : ceil_div(p.tokens, TOKENS);
}

__device__ __forceinline__ int expert_of(const Arguments& p, int token_tile) {
    return GROUPED ? __ldcg(p.experts + token_tile) : 0;
}

// The first row block of an expert, whose weights are padded to whole row tiles.
__device__ __forceinline__ int first_block(const Arguments& p, int expert) {
    return GROUPED ? expert * ceil_div(p.channels, W_TILE * ROWS) * W_TILE : 0;
}
