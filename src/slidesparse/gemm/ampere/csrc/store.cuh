// Scales, bias, rounding and storing of a team's results.

#pragma once

#include "instructions.cuh"
#include "rounding.cuh"

// A thread holds channels lane / 4 and lane / 4 + 8 of every 16, and tokens lane % 4 * 2 and one more of every 8.
using Sums = acc_t[ROW_BLOCKS][TOKEN_BLOCKS][4];

struct Store {
    const Arguments& p;
    float* const factors;  // [TOKENS] token scales, [CHANNELS] channel scales, [CHANNELS] bias, in shared memory
    const int thread, warp, lane, team;
    int first_channel, first_token;
    float token_scale[(TOKENS + TEAM - 1) / TEAM];
    Channel channel[(CHANNELS + TEAM - 1) / TEAM];

    __device__ __forceinline__ Store(const Arguments& p, u8* shared, int thread, int team)
        : p(p), factors((float*)shared), thread(thread), warp(thread / 32), lane(thread % 32), team(team) {}

    // Fetch this thread's share of a tile's scales and bias, if it can be before the multiplication, which hides the latency.
    __device__ __forceinline__ void fetch(const Walk& tiles, int tile) {
        int row_tile, token_tile;
        tiles.locate(tile, row_tile, token_tile);
        first_channel = row_tile * CHANNELS, first_token = token_tile * TOKENS;
#pragma unroll
        for (int i = 0; i < (TOKENS + TEAM - 1) / TEAM; i++)
            token_scale[i] = p.scale_x ? p.scale_x[min(first_token + thread + i * TEAM, p.tokens - 1)] : 1.f;
#pragma unroll
        for (int i = 0; i < (CHANNELS + TEAM - 1) / TEAM; i++) {
            const int at = min(first_channel + thread + i * TEAM, p.channels - 1);
            channel[i] = {p.scale_w ? p.scale_w[at] : 1.f, bias_of(p, at)};
        }
    }

    // Pass it to the other threads of the team.
    __device__ __forceinline__ void share() const {
#pragma unroll
        for (int i = 0; i < (TOKENS + TEAM - 1) / TEAM; i++)
            if (const int at = thread + i * TEAM; at < TOKENS) factors[at] = token_scale[i];
#pragma unroll
        for (int i = 0; i < (CHANNELS + TEAM - 1) / TEAM; i++)
            if (const int at = thread + i * TEAM; at < CHANNELS)
                factors[TOKENS + at] = channel[i].scale, factors[TOKENS + CHANNELS + at] = channel[i].bias;
        sync_team(team);
    }

    // Store the results of a tile, through a stage that this team has just read, and fills after its next barrier.
    __device__ __forceinline__ void store(const Sums& d, u8* stage) const {
        share();
        u8* const piece = stage + warp * PIECE_BYTES;
        const int own_channels = warp / TOKEN_WARPS * ROW_BLOCKS * 16, own_tokens = warp % TOKEN_WARPS * TOKEN_BLOCKS * 8;
        Channel c[ROW_BLOCKS][2];
#pragma unroll
        for (int m = 0; m < ROW_BLOCKS; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float* own = factors + TOKENS + own_channels + m * 16 + h * 8 + lane / 4;
                c[m][h] = {own[0], own[CHANNELS]};
            }
#pragma unroll
        for (int n = 0; n < TOKEN_BLOCKS; n++) {
            u8* const own = piece + n % PIECES * (8 * PIECE_ROW);
            out_t* const to = (out_t*)(own + lane % 4 * 2 * PIECE_ROW) + lane / 4;
            const float2 scale = *(const float2*)(factors + own_tokens + n * 8 + lane % 4 * 2);
#pragma unroll
            for (int m = 0; m < ROW_BLOCKS; m++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    put(to + m * 16 + h * 8, finish(d[m][n][h * 2], scale.x, c[m][h]), finish(d[m][n][h * 2 + 1], scale.y, c[m][h]));
            __syncwarp();
            store_rows(own, first_channel + own_channels, first_token + own_tokens + n * 8);
            if (PIECES == 1) __syncwarp();
        }
    }

    // Put the results of two neighbouring tokens into a piece.
    __device__ __forceinline__ static void put(out_t* to, float first, float second) {
        constexpr int ROW = PIECE_ROW / sizeof(out_t);
#if defined(OUT_F32)
        to[0] = first, to[ROW] = second;
#else
        const u32 both = round_pair(first, second);
        to[0] = (u16)both, to[ROW] = (u16)(both >> 16);
#endif
    }

    // Store a piece: neighbouring lanes write neighbouring chunks of 16 bytes.
    __device__ __forceinline__ void store_rows(const u8* from, int channel, int token) const {
        constexpr int EACH = 16 / sizeof(out_t), CHUNKS = ROW_BLOCKS * 16 / EACH;
#pragma unroll
        for (int i = lane; i < 8 * CHUNKS; i += 32) {
            const int row = i / CHUNKS, first = channel + i % CHUNKS * EACH, left = token + row < p.tokens ? p.channels - first : 0;
            const u8* const chunk = from + row * PIECE_ROW + i % CHUNKS * 16;
            out_t* const to = p.y + (i64)(token + row) * p.row + first;
            if (left >= EACH && p.row % EACH == 0) {
                *(uint4*)to = *(const uint4*)chunk;
            } else {
#pragma unroll 1
                for (int k = 0; k < min(left, EACH); k++) to[k] = ((const out_t*)chunk)[k];
            }
        }
    }
};
