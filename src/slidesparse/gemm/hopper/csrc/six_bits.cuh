// Values of six bits: a thread loads those that it gives to wgmma, which takes A from registers then, and makes eight bits of each.

#pragma once

#include "consumer.cuh"
#include "six_bit_words.cuh"

#if !defined(TYPE_S8)
#error "values of six bits are INT8"
#endif

// As the functions of wgmma.cuh with weights in registers, which must not be written before the instruction has ended.
__device__ __forceinline__ void mma_sparse(acc_t* d, const u32* a, u64 b, u32 meta, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, " OPERAND(6) ", 0;\n"
        "wgmma.mma_async.sp.sync.aligned.m64n" TEXT(TOKENS) K_SPARSE "." MMA_TYPES " {" ACC_NAMES "}, {" OPERAND(0) ", "
        OPERAND(1) ", " OPERAND(2) ", " OPERAND(3) "}, " OPERAND(4) ", " OPERAND(5) ", " OPERAND(7) ", p" MMA_TAIL "; }"
        : ACC(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(meta), "r"(accumulate), "n"(0));
}

__device__ __forceinline__ void mma_dense(acc_t* d, const u32* a, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, " OPERAND(5) ", 0;\n"
        "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) K_DENSE "." MMA_TYPES " {" ACC_NAMES "}, {" OPERAND(0) ", "
        OPERAND(1) ", " OPERAND(2) ", " OPERAND(3) "}, " OPERAND(4) ", p" MMA_TAIL "; }"
        : ACC(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// What a thread gives to one instruction: the kept values of its rows lane / 4 and lane / 4 + 8, four a register (PTX ISA,
// "Register Fragments for sparse wgmma.mma_async.m64nNk64"), and metadata; of a dense weight all values, in the same registers
// ("Register Fragments for wgmma.mma_async.m64nNk32"). In memory the values are three words (six_bit_words.cuh).
struct Words {
    u32 high0, high1, low, meta;

    // Load the values alone, of which the third words lie apart, so that a warp loads words that are neighbours.
    __device__ __forceinline__ static void load(Words& words, u32 instruction) {
        const u32 thread = threadIdx.x % 128;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words.high0), "=r"(words.high1) : "r"(instruction + thread * 8));
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words.low) : "r"(instruction + 1024 + thread * 4));
    }
};

struct Fragment {
    u32 values[4], meta;

    __device__ __forceinline__ void take(const Words& from) {
        unpack_six_bits(values, from.high0, from.high1, from.low);
        if constexpr (DENSE) {
            asm volatile("" : "+r"(values[0]), "+r"(values[1]), "+r"(values[2]), "+r"(values[3]));  // now, not later
        } else {
            meta = from.meta;
            asm volatile("" : "+r"(values[0]), "+r"(values[1]), "+r"(values[2]), "+r"(values[3]), "+r"(meta));
        }
    }
};

// Groups in flight while values are made, and instructions of a step whose words are loaded at once: as many as registers
// allow. With more of either the compiler would let each instruction of the largest tiles wait for the one before.
constexpr int SUMS = ROW_BLOCKS * (TOKENS / 2) + (GROUPED ? 16 : 0);  // registers, and some for the expert
constexpr int IN_FLIGHT = SUMS <= 176 ? 2 : 1;
constexpr int AHEAD = SUMS <= 160 ? 2 * ROW_BLOCKS : SUMS == 192 ? 2 : 1;

enum { INSTRUCTIONS = DENSE ? 4 : 2 };  // of a row block in a step
using Fragments = Fragment[INSTRUCTIONS][ROW_BLOCKS];

// Multiply one step at `x` and `w`. Each instruction is a group. While others multiply, the values of the next one are made
// of words loaded before. `load(words, at, i, j)` loads those of instruction i of row block j, which are at `at`; `finish(words,
// i, j)` adds their metadata where they come from elsewhere.
template <class Load, class Finish>
__device__ __forceinline__ void multiply_six_bits(acc_t (*d)[TOKENS / 2], Fragments& held, u32 x, u32 w, int accumulate,
                                                  Load load_at, Finish finish) {
    auto load = [&](Words& words, int q) {
        load_at(words, w + q % ROW_BLOCKS * SPARSE_BYTES + q / ROW_BLOCKS * (SPARSE_BYTES / INSTRUCTIONS));
    };
    Words words[AHEAD];
#pragma unroll
    for (int q = 0; q < AHEAD; q++) load(words[q], q);
#pragma unroll
    for (int q = 0; q < INSTRUCTIONS * ROW_BLOCKS; q++) {
        const int i = q / ROW_BLOCKS, j = q % ROW_BLOCKS;
        finish(words[q % AHEAD], i, j);
        held[i][j].take(words[q % AHEAD]);
        if (q + AHEAD < INSTRUCTIONS * ROW_BLOCKS) load(words[q % AHEAD], q + AHEAD);
        mma_wait<IN_FLIGHT - 1>();
        mma_fence();
        if constexpr (DENSE)
            mma_dense(d[j], held[i][j].values, describe(x + i * 32, SLAB), i > 0 || accumulate);
        else
            mma_sparse(d[j], held[i][j].values, describe(x + i * 64, SLAB), held[i][j].meta, i > 0 || accumulate);
        mma_commit();
    }
}
