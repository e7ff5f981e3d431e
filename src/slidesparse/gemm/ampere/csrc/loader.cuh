// Copies of a team's steps into its ring, tile after tile.

#pragma once

#include "arguments.cuh"
#include "instructions.cuh"
#include "walk.cuh"

struct Loader {
    const Arguments& p;
    const Walk& tiles;
    const int thread, first, end;  // the slabs of this team
    int tile, slab, x_bytes, part;
    const u8 *x, *w;

    __device__ __forceinline__ Loader(const Arguments& p, const Walk& tiles, int thread, int first, int end)
        : p(p), tiles(tiles), thread(thread), first(first), end(end), tile(blockIdx.x) {
        start();
    }

    __device__ __forceinline__ void start() {
        slab = tile < tiles.count() ? first : end;
        if (slab == end) return;
        int row_tile, token_tile;
        tiles.locate(tile, row_tile, token_tile);
        const int rows = ceil_div(p.tokens, 8) * 8, token = token_tile * TOKENS, of_all = row_tile * (CHANNELS / 16);
        part = of_all % 4;
        x_bytes = min(TOKENS, rows - token) * SLAB;  // no result of the bytes past them is stored
        x = p.x + ((i64)first * rows + token) * SLAB;
        w = p.sparse + (((i64)(of_all / 16) * p.sparse_slabs + first) * 4 + of_all / 4 % 4) * BLOCK_BYTES;
    }

    // Copy the next step, if there is one, as one group.
    __device__ __forceinline__ void load(u32 stage) {
        if (slab < end) {
            copy<X_BYTES>(stage, x, x_bytes);
            if constexpr (PARTS == 4) {
                copy<W_BYTES>(stage + X_BYTES, w, W_BYTES);
            } else {
#pragma unroll
                for (int i = 0; i < PLANES; i++)
                    copy<PARTS * 1024>(stage + X_BYTES + PARTS * before(i), w + 4 * before(i) + part * width(i), PARTS * width(i));
            }
            x += (i64)(ceil_div(p.tokens, 8) * 8) * SLAB, w += 4 * BLOCK_BYTES;
            if (++slab == end) {
                tile += gridDim.x;
                start();
            }
        }
        commit();
    }

    // Copy `bytes` bytes, at most MOST.
    template <int MOST>
    __device__ __forceinline__ void copy(u32 to, const u8* from, int bytes) const {
#pragma unroll
        for (int i = 0; i < MOST; i += TEAM * 16)
            if (const int at = i + thread * 16; at < bytes) copy_16(to + at, from + at);
    }
};
