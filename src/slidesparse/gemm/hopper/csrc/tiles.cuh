// The tiles of a launch, and the steps of a tile that a block multiplies.

#pragma once

#include "experts.cuh"

struct Tiles : Walk {
    __device__ __forceinline__ explicit Tiles(const Arguments& p)
        : Walk{ceil_div(p.channels, TILE_BLOCKS * ROWS), token_tiles_of(p), p.group} {}
};

// The slabs of a tile that a block multiplies: [dense, dense_end) and [sparse, sparse_end).
struct Range {
    int dense, dense_end, sparse, sparse_end;
    __device__ __forceinline__ bool empty() const { return dense == dense_end && sparse == sparse_end; }
};

// Cut the steps into SPLIT equal parts, except that none ends within a dense slab, whose X serves two steps.
__device__ __forceinline__ Range range_of(const Arguments& p, int rank) {
    if (SPLIT == 1) return {0, p.dense_slabs, 0, p.sparse_slabs};
    const int dense = 2 * p.dense_slabs, steps = dense + p.sparse_slabs;
    auto bound = [&](int part) {
        const int step = steps * part / SPLIT;
        return step < dense ? step / 2 * 2 : step;
    };
    const int first = bound(rank), end = bound(rank + 1);
    return {min(first, dense) / 2, min(end, dense) / 2, max(first - dense, 0), max(end - dense, 0)};
}
