// Copies of a team's steps into its ring, tile after tile.

#pragma once

#include "arguments.cuh"
#include "instructions.cuh"
#include "walk.cuh"

constexpr int ROUND = TEAM * 16;  // bytes that the threads of a team copy at once

struct Loader {
    const Arguments& p;
    const Walk& tiles;
    const int own, first, end;  // where this thread's bytes of a round start, and the slabs of this team
    int tile, slab, x_left, w_left, part;
    const u8 *x, *w;

    __device__ __forceinline__ Loader(const Arguments& p, const Walk& tiles, int thread, int first, int end)
        : p(p), tiles(tiles), own(thread * 16), first(first), end(end), tile(blockIdx.x), part(0), x(p.x), w(p.sparse) {
        start();
    }

    __device__ __forceinline__ void start() {
        slab = first;
        if (tile >= tiles.count() || first == end) {  // nothing is copied any more
            x_left = w_left = -own;
            return;
        }
        int row_tile, token_tile;
        tiles.locate(tile, row_tile, token_tile);
        const int rows = ceil_div(p.tokens, 8) * 8, token = token_tile * TOKENS, of_all = row_tile * (CHANNELS / 16);
        part = of_all % 4;
        x_left = min(TOKENS, rows - token) * SLAB - own;  // no result of the bytes past them is stored
        w_left = W_BYTES - own;
        x = p.x + ((i64)first * rows + token) * SLAB + own;
        w = p.sparse + (((i64)(of_all / 16) * p.sparse_slabs + first) * 4 + of_all / 4 % 4) * BLOCK_BYTES + own;
    }

    // Copy a step, if there is one, or every SHARES-th round of it: `stage` is where this thread's bytes start. There is no branch, so
    // that copies are issued between matrix instructions.
    template <int SHARE, int SHARES>
    __device__ __forceinline__ void copy(u32 stage) const {
        copy_rounds<X_BYTES, 0, 0, SHARE * ROUND, SHARES>(stage, x, x_left);
        if constexpr (PARTS == 4)
            copy_rounds<W_BYTES, X_BYTES, 0, SHARE * ROUND, SHARES>(stage, w, w_left);
        else
            copy_planes<0, SHARE, SHARES>(stage);
    }

    template <int PLANE, int SHARE, int SHARES>
    __device__ __forceinline__ void copy_planes(u32 stage) const {
        constexpr int BYTES = PARTS * width(PLANE);
        const int left = w_left + own > 0 ? BYTES - own : 0;
        copy_rounds<BYTES, X_BYTES + PARTS * before(PLANE), 4 * before(PLANE), (SHARE + PLANE) % SHARES * ROUND, SHARES>(
            stage, w + part * width(PLANE), left);
        if constexpr (PLANE + 1 < PLANES) copy_planes<PLANE + 1, SHARE, SHARES>(stage);
    }

    template <int BYTES, int TO, int FROM, int START, int SHARES>
    __device__ __forceinline__ void copy_rounds(u32 stage, const u8* from, int left) const {
        if constexpr (START < BYTES) {
            if (START < left) copy_16<TO + START, FROM + START>(stage, from);
            copy_rounds<BYTES, TO, FROM, START + SHARES * ROUND, SHARES>(stage, from, left);
        }
    }

    // End a step's copies as one group, and go to the next step.
    __device__ __forceinline__ void next() {
        commit();
        x += (i64)(ceil_div(p.tokens, 8) * 8) * SLAB, w += 4 * BLOCK_BYTES;
        if (++slab == end) {
            tile += gridDim.x;
            start();
        }
    }
};
