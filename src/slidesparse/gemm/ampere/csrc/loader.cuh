// Copies of a team's steps into its ring, tile after tile.

#pragma once

#include "arguments.cuh"
#include "instructions.cuh"
#include "walk.cuh"

// A warp copies a contiguous share of each part of a stage, 512 bytes at once. An instruction has room for offsets of up to 2 KiB to an
// address in global memory, so they lie on both sides of it: with additions, there are not registers enough for large tiles.
constexpr int ROUND = 512;
constexpr int MOST_BYTES = PARTS < 4 || X_BYTES > W_BYTES ? X_BYTES : W_BYTES;
constexpr int ROUNDS = (MOST_BYTES + TEAM * 16 - 1) / (TEAM * 16);
constexpr int X_MIDDLE = ROUNDS > 4 ? 2048 : 0, W_MIDDLE = PARTS == 4 ? X_MIDDLE : 0;

struct Loader {
    const Arguments& p;
    const Walk& tiles;
    const int own, first, end;  // where this thread's bytes start, and the slabs of this team
    int tile, slab, x_left, part;
    const u8 *x, *w;

    __device__ __forceinline__ Loader(const Arguments& p, const Walk& tiles, int thread, int first, int end)
        : p(p), tiles(tiles), own(thread / 32 * (ROUNDS * ROUND) + thread % 32 * 16), first(first), end(end), tile(blockIdx.x), part(0), x(p.x), w(p.sparse) {
        start();
    }

    __device__ __forceinline__ void start() {
        if (tile >= tiles.count() || first == end) {  // nothing is copied any more
            x_left = 0, slab = -(1 << 30);
            return;
        }
        slab = first;
        int row_tile, token_tile;
        tiles.locate(tile, row_tile, token_tile);
        const int rows = ceil_div(p.tokens, 8) * 8, token = token_tile * TOKENS, of_all = row_tile * (CHANNELS / 16);
        part = of_all % 4;
        x_left = min(TOKENS, rows - token) * SLAB - own;  // no result of the bytes past them is stored
        x = p.x + ((i64)first * rows + token) * SLAB + own + X_MIDDLE;
        w = p.sparse + (((i64)(of_all / 16) * p.sparse_slabs + first) * 4 + of_all / 4 % 4) * BLOCK_BYTES + own + W_MIDDLE;
    }

    // Copy a step into a stage, if there is one, or every SHARES-th round of it.
    template <int SHARE, int SHARES>
    __device__ __forceinline__ void copy(u32 stage) const {
        copy_rounds<X_BYTES, 0, -X_MIDDLE, SHARE, SHARES>(stage, x, x_left);
        if constexpr (PARTS == 4)
            copy_rounds<W_BYTES, X_BYTES, -W_MIDDLE, SHARE, SHARES>(stage, w, slab < 0 ? 0 : W_BYTES - own);
        else
            copy_planes<0, SHARE, SHARES>(stage);
    }

    template <int PLANE, int SHARE, int SHARES>
    __device__ __forceinline__ void copy_planes(u32 stage) const {
        constexpr int BYTES = PARTS * width(PLANE);
        copy_rounds<BYTES, X_BYTES + PARTS * before(PLANE), 4 * before(PLANE), (SHARE + PLANE) % SHARES, SHARES>(
            stage, w + part * width(PLANE), slab < 0 ? 0 : BYTES - own);
        if constexpr (PLANE + 1 < PLANES) copy_planes<PLANE + 1, SHARE, SHARES>(stage);
    }

    // Copy the rounds I, I + SHARES and so on of this thread, of those that start before `left`.
    template <int BYTES, int TO, int FROM, int I, int SHARES>
    __device__ __forceinline__ void copy_rounds(u32 stage, const u8* from, int left) const {
        if constexpr (I < ROUNDS && I * ROUND < BYTES) {
            copy_16<TO + I * ROUND, FROM + I * ROUND, I * ROUND>(stage + own, from, left);
            copy_rounds<BYTES, TO, FROM, I + SHARES, SHARES>(stage, from, left);
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
