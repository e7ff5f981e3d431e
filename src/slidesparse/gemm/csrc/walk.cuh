// The order in which blocks walk over the tiles of a product.

#pragma once

struct Walk {
    int row_tiles, token_tiles, group;
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

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
