// Scales, bias, rounding and storing of a tile's results.

#pragma once

#include "ring.cuh"
#include "rounding.cuh"

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Scales, rounds and stores a warpgroup's part of a tile. A thread holds two channels of every row block, 8 apart, and two
// neighbouring tokens of every 8.
struct Epilogue {
    const Arguments& p;
    float* const factors;  // [SHARE] token scales, [CHANNELS] channel scales, [CHANNELS] bias, in shared memory
    u8* const piece;       // [PIECE][CHANNELS] of the result, in shared memory
    const int warpgroup, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    int first_channel, first_token;
    float token_scale[(SHARE + 127) / 128], channel_scale, channel_bias;

    __device__ __forceinline__ Epilogue(const Arguments& p, u8* shared, int warpgroup)
        : p(p), factors((float*)(shared + PIECE_BYTES)), piece(shared), warpgroup(warpgroup) {}

    // Fetch this thread's share of a tile's scales and bias, before the multiplication, which hides the latency.
    __device__ __forceinline__ void fetch(int row_tile, int token, int expert) {
        first_channel = (row_tile * TILE_BLOCKS + warpgroup * ROW_BLOCKS) * ROWS;
        first_token = token;
        const int channel = min(first_channel + thread, p.channels - 1);
        channel_scale = p.scale_w ? p.scale_w[expert * p.channels + channel] : 1.f;
        channel_bias = bias_of(p, expert * p.channels + channel);
#pragma unroll
        for (int i = 0; i < (SHARE + 127) / 128; i++)
            token_scale[i] = p.scale_x ? p.scale_x[min(first_token + thread + i * 128, p.tokens - 1)] : 1.f;
    }

    // Pass it to the other threads of the warpgroup.
    __device__ __forceinline__ void share() const {
#pragma unroll
        for (int i = 0; i < (SHARE + 127) / 128; i++)
            if (thread + i * 128 < SHARE) factors[thread + i * 128] = token_scale[i];
        if (thread < CHANNELS) {
            factors[SHARE + thread] = channel_scale;
            factors[SHARE + CHANNELS + thread] = channel_bias;
        }
        warpgroup_sync(warpgroup);
    }

    __device__ __forceinline__ Channel channel(int j, int h) const {
        const float* own = factors + SHARE + j * ROWS + warp * 16 + h * 8 + lane / 4;
        return {own[0], own[CHANNELS]};
    }

#if defined(OUT_F32)
    template <class Sums>  // acc_t[SHARE / 2], a row block
    __device__ __forceinline__ void store(const Sums* d) const {
        share();
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const Channel c = channel(j, h);
                const int row = first_channel + j * ROWS + warp * 16 + h * 8 + lane / 4, column = lane % 4 * 2;
                const int left = row < p.channels ? p.tokens - first_token - column : 0;
                out_t* to = p.y + (i64)(first_token + column) * p.row + row;
#pragma unroll
                for (int q = 0; q < SHARE / 8; q++, to += (i64)8 * p.row) {
                    const float2 scale = *(const float2*)(factors + q * 8 + column);
                    if (q * 8 < left) to[0] = finish(d[j][q * 4 + h * 2], scale.x, c);
                    if (q * 8 + 1 < left) to[p.row] = finish(d[j][q * 4 + h * 2 + 1], scale.y, c);
                    asm volatile("" : "+l"(to));  // hides it: else all addresses are computed ahead, into registers
                }
            }
        warpgroup_sync(warpgroup);  // all have read the factors
    }
#else
    // Results go through shared memory, a piece of the tokens at a time: stmatrix turns channel-major fragments into rows of
    // tokens. Rows are chunks of 16 bytes; chunk c of row r is at c ^ r % 8, so that no two lanes use the same bank.
    __device__ __forceinline__ static int chunk_offset(int row, int chunk) {
        return row * ROW_BYTES + (chunk ^ row % 8) * 16;
    }

    template <class Sums>  // acc_t[SHARE / 2], a row block
    __device__ __forceinline__ void store(const Sums* d) const {
        share();
        Channel c[ROW_BLOCKS][2];
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) c[j][h] = channel(j, h);
        store_from<0>(d, c);
    }

    template <int START>
    __device__ __forceinline__ void store_from(const acc_t (*d)[SHARE / 2], const Channel (*c)[2]) const {
        constexpr int LENGTH = SHARE - START < PIECE ? SHARE - START : PIECE;
        if (START > 0) warpgroup_sync(warpgroup);  // the piece before has been read
#pragma unroll
        for (int row = 0; row < LENGTH; row += 16) {
            const float* own = factors + START + row + lane % 4 * 2;
            const float2 s[2] = {*(const float2*)own, *(const float2*)(own + 8)};
#pragma unroll
            for (int j = 0; j < ROW_BLOCKS; j++) transpose(d[j] + (START + row) / 2, c[j], s, j, row);
        }
        warpgroup_sync(warpgroup);
        store_rows<START, LENGTH>();
        if constexpr (START + PIECE < SHARE) store_from<START + PIECE>(d, c);
    }

    // Write four 8 x 8 matrices into the piece: channels +0 and +8 of 8 tokens, then of the 8 tokens after them.
    __device__ __forceinline__ void transpose(const acc_t* d, const Channel* c, const float2* s, int j, int first_row) const {
        u32 m[4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const acc_t* pair = d + i * 4 + h * 2;
                m[i * 2 + h] = round_pair(finish(pair[0], s[i].x, c[h]), finish(pair[1], s[i].y, c[h]));
            }
        // first_row is a multiple of 16, so the swizzle is that of the lane's own row.
        const u32 own = shared_address(piece) + chunk_offset(lane / 16 * 8 + lane % 8, j * (ROWS / 8) + warp * 2 + lane / 8 % 2);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         own + first_row * ROW_BYTES), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]));
    }

    // Neighbouring lanes write neighbouring chunks, and a warp writes whole lines.
    template <int START, int LENGTH>
    __device__ __forceinline__ void store_rows() const {
        constexpr int CHUNKS = CHANNELS / 8;  // 16-byte chunks of a warpgroup's part of a Y row
        constexpr int STEP = 128 / CHUNKS;    // rows a pass: 8 or 16, so a thread's swizzle stays
        const int chunk = thread % CHUNKS, channel = first_channel + chunk * 8, first = thread / CHUNKS;
        const int rows = min(LENGTH, p.tokens - first_token - START), channels = min(8, p.channels - channel);
        const u8* from = piece + chunk_offset(first, chunk);
        out_t* to = p.y + (i64)(first_token + START + first) * p.row + channel;
        const i64 stride = (i64)STEP * p.row;
        if (rows == LENGTH && channels == 8 && p.row % 8 == 0) {
#pragma unroll
            for (int i = 0; i < LENGTH / STEP; i++)
                *(uint4*)(to + i * stride) = *(const uint4*)(from + i * STEP * ROW_BYTES);
        } else {
#pragma unroll 1
            for (int row = first; row < rows; row += STEP, from += STEP * ROW_BYTES, to += stride)
#pragma unroll 1
                for (int i = 0; i < channels; i++) to[i] = ((const u16*)from)[i];
        }
    }
#endif
};
