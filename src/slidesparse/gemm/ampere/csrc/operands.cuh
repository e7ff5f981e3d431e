// What a warp reads of a stage for its instructions.

#pragma once

#include "instructions.cuh"
#include "six_bit_words.cuh"

struct Operands {
    const int lane, part;  // the warp's first 16 channels, of those of a row block in shared memory
    u32 block;             // offset of its first row block in a stage
    u32 rows;              // offset in 16 channels of the lane's row, for values of eight bits
    u32 tokens;            // offset in a stage of the lane's row, for activations

    __device__ __forceinline__ Operands(int warp, int lane) : lane(lane), part(warp / TOKEN_WARPS * ROW_BLOCKS % PARTS) {
        block = X_BYTES + warp / TOKEN_WARPS * ROW_BLOCKS / PARTS * PART_BLOCK;
        rows = lane % 16 * 64 + ((lane / 16) ^ (lane / 2 % 4)) * 16;
        // For a sparse instruction a warp loads 64 bytes of 8 tokens, for two dense ones 32 bytes of 16.
        const int chunk = DENSE ? lane / 8 % 2 : lane / 8;
        tokens = warp % TOKEN_WARPS * TOKEN_BLOCKS * 1024 + lane % 8 * SLAB + (chunk ^ lane % 8) * 16 + (DENSE ? lane / 16 * 1024 : 0);
    }

    // Load what instruction `i` of a step reads of 16 channels, the m-th of this warp.
    __device__ __forceinline__ void load(Fragment& to, u32 stage, int i, int m) const {
        const u32 at = stage + block + m / PARTS * PART_BLOCK;
        const int own = part + m % PARTS;
        if constexpr (VALUE_BITS == 8) {
            const int half = DENSE ? i / 2 : 0, meta = META_WORDS == 2 ? 1 + i : 1;
            load_matrices(to.values, at + PARTS * before(half) + own * 1024 + (rows ^ i % 2 * 32));
            if (!DENSE) to.meta = word(at + PARTS * before(meta) + own * 128 + lane * 4);
        } else {
            u32 high0, high1, low;
            if constexpr (DENSE) {
                asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(high0), "=r"(high1)
                             : "r"(at + PARTS * before(2 * i) + own * 256 + lane * 8));
                low = word(at + PARTS * before(2 * i + 1) + own * 128 + lane * 4);
            } else {
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(high0), "=r"(high1), "=r"(low), "=r"(to.meta)
                             : "r"(at + PARTS * before(i) + own * 512 + lane * 16));
            }
            unpack_six_bits(to.values, high0, high1, low);
        }
    }

    __device__ __forceinline__ static u32 word(u32 address) {
        u32 value;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
        return value;
    }

    // Load what instruction `i` of a step reads of activations: the q-th 8 tokens of this warp; 16 for a dense weight.
    __device__ __forceinline__ void load_tokens(u32* to, u32 stage, int i, int q) const {
        load_matrices(to, stage + (tokens ^ i * (DENSE ? 32 : 64)) + q * (DENSE ? 2048 : 1024));
    }
};
