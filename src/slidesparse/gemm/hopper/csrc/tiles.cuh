// The tiles of a launch, and the steps of a tile that a block multiplies.

#pragma once

#include "experts.cuh"

struct Tiles {
    int row_tiles, token_tiles, group;
    __device__ __forceinline__ explicit Tiles(const Arguments& p)
        : row_tiles(ceil_div(p.channels, TILE_BLOCKS * ROWS)),
          token_tiles(token_tiles_of(p)), group(p.group) {}
    __device__ __forceinline__ int count() const { return row_tiles * token_tiles; }
    // Tiles are numbered group by group of `group` row tiles; within a group, token tile by token tile.
    __device__ __forceinline__ void locate(int tile, int& row_tile, int& token_tile) const {
        int first = tile / (group * token_tiles) * group;
        int height = min(group, row_tiles - first);
        int within = tile - first * token_tiles;
        row_tile = first + within % height;
        token_tile = within / height;
    }
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
