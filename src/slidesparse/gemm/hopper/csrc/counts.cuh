// Counts in place of metadata (gemm/steps.py): two counts of COUNT_BITS bits a group, once a bundle of 32 groups. Step j
// of a bundle has window j of its groups:
//
//     bundle       COUNT_BITS words a thread and row block | step 0: values | step 1: values | ... | step windows - 1: values
//
// The words of a bundle come with its first step, and stay in a ring of their own, of SLOTS slots.

#pragma once

#include "consumer.cuh"
#include "producer.cuh"

static_assert(META_WORDS == 2 && (COUNT_BITS == 3 || COUNT_BITS == 4), "counts of groups of 6 to 16 columns, 8-bit types");

// ---- bundles ---------------------------------------------------------------------------------------------------------

// A place among the bundles: a slot, and the window of its groups that the next step has.
struct Bundle {
    int window;
    u32 slot = 0;
    __device__ __forceinline__ explicit Bundle(int first_step, int windows) : window(SPLIT > 1 ? first_step % windows : 0) {}
    // Go to the next step; whether it is in another bundle.
    __device__ __forceinline__ bool next(int windows) {
        if (++window < windows) return false;
        window = 0;
        if (++slot == SLOTS) slot = 0;
        return true;
    }
    __device__ __forceinline__ u32 words(const Ring& ring) const { return ring.slots + slot * SLOT_BYTES; }
};

// The address of row block `block` of a step: the words of a bundle precede the W_TILE row blocks of its steps.
__device__ __forceinline__ const u8* values_at(const Arguments& p, int block, int step) {
    const i64 words = (i64)(block / W_TILE) * (p.sparse_slabs / p.windows) + step / p.windows + 1;
    return weights_at(p.sparse, block, p.sparse_slabs, step, SPARSE_BYTES) + words * (W_TILE * COUNT_BYTES);
}

// The address of the words of a row block, from that of its step with this window.
__device__ __forceinline__ const u8* words_before(const u8* values, int block, int window) {
    return values - (W_TILE - block % W_TILE) * COUNT_BYTES - (window * W_TILE + block % W_TILE) * SPARSE_BYTES;
}

struct StepsWithCounts {
    const Range& range;
    Bundle bundle;

    __device__ __forceinline__ StepsWithCounts(const Range& range, const Arguments& p)
        : range(range), bundle(range.sparse, p.windows) {}

    // Load the 2:4 steps [step, end) of a tile.
    template <int OPERANDS>
    __device__ __forceinline__ void load(const TileSource& source, Place& place, int step, int end) {
        const Arguments& p = source.p;
        const Ring& ring = source.ring;
        const u8* values = values_at(p, source.block, step);
        bool words = step == range.sparse || bundle.window == 0;  // those of a bundle come with its first step here
#pragma unroll 1
        for (; step < end; step++, place.next()) {
            if (OPERANDS & WEIGHTS) {
                source.await_empty(place);
                barrier_expect(ring.full_of(place),
                               source.x_bytes + TILE_BLOCKS * SPARSE_BYTES + (words ? SLOT_BYTES : 0));
                if (words)
                    copy(bundle.words(ring), words_before(values, source.block, bundle.window), SLOT_BYTES,
                         ring.full_of(place));
            }
            if (OPERANDS & ACTIVATIONS) source.copy_x(place, p.dense_slabs + step);
            if (OPERANDS & WEIGHTS)
                copy_weights(ring.stage(place) + X_BYTES, values, TILE_BLOCKS * SPARSE_BYTES, ring.full_of(place), p.tokens);
            words = bundle.next(p.windows);
            values += W_TILE * (SPARSE_BYTES + (words ? COUNT_BYTES : 0));
        }
    }
};

// ---- metadata of counts ----------------------------------------------------------------------------------------------

// A logical operation of three words, bit by bit; TABLE is its value for a = 0xF0, b = 0xCC, c = 0xAA. The compiler would
// take two instructions for those below.
template <int TABLE>
__device__ __forceinline__ u32 logic(u32 a, u32 b, u32 c) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
    return result;
}

// Numbers that are compared bit by bit, from the lowest up: whether x is at most k, by their bit and those before. It is
// ~x & k | ~(x ^ k) & before.
__device__ __forceinline__ u32 at_most(u32 x, u32 k, u32 before) { return logic<0x8E>(x, k, before); }

// mask & a | ~mask & b.
__device__ __forceinline__ u32 select(u32 mask, u32 a, u32 b) { return logic<0xCA>(mask, a, b); }

// Of a group with kept entries 0 .. 2 * windows - 1 two positions are left out: a kept entries precede the first one and b
// the second, a <= b. Kept entry k is at position k + s, where s of the two counts are at most k. In window
// j = k / 2, which shows positions 2j .. 2j + 3, that is index k % 2 + s. So a window's metadata are s of entry 2j, and 1 + s
// of entry 2j + 1.
//
// A thread needs those of 16 groups at once: of 0 .. 7 in its first register, four bits each, and of 8 .. 15 in its second.
// Word f has bit f of all their counts, so one instruction a word compares all 32 of them with k:
//
//     bit      0      1      2      3    |   4      5      6      7    |        |  28 ... 31
//            a of 0 b of 0 a of 8 b of 8 | a of 1 b of 1 a of 9 b of 9 |  ...   |  7 and 15
__device__ __forceinline__ void metadata_of(const u32* words, int window, u32* meta) {
    constexpr u32 LOW = 0x55555555, FIRST = 0x33333333;
    u32 even = ~words[0], odd = ~0u;  // which counts are at most 2 * window, and which at most 2 * window + 1
#pragma unroll
    for (int f = 1; f < COUNT_BITS; f++) {
        const u32 k = 0 - (window >> (f - 1) & 1);  // bit f of both numbers, for all counts
        even = at_most(words[f], k, even);
        odd = at_most(words[f], k, odd);
    }
    // Now two bits have (b <= k, a <= k): 11 for s = 2, 01 for 1, and never 10.
    even ^= even >> 1 & LOW;
    odd = (odd ^ (odd >> 1 & LOW)) + LOW;
    meta[0] = select(FIRST, even, odd << 2);
    meta[1] = select(FIRST, even >> 2, odd);
}

struct CountsState {
    const int windows;
    Bundle bundle;  // of the next step to multiply

    __device__ __forceinline__ CountsState(const Range& range, const Arguments& p)
        : windows(p.windows), bundle(range.sparse, p.windows) {}
};

// A consumer that makes its metadata of counts.
struct CountsConsumer : Consumer<CountsState> {

    // The words of a bundle that began before the range came with the range's first step.
    __device__ __forceinline__ void await_first() const {
        if (state.bundle.window > 0) await_stage();
    }

    // Make the metadata registers of the next step from the words of its bundle. They came with the bundle's first step, so
    // only that one has to be waited for.
    __device__ __forceinline__ void make_metadata(u32 (*meta)[META_WORDS]) {
        Bundle& bundle = state.bundle;
        const u32 own = bundle.words(ring) + warpgroup * ROW_BLOCKS * COUNT_BYTES + (threadIdx.x % 128) * 4;
        if (bundle.window == 0) await_stage();
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++) {
            u32 words[COUNT_BITS];
#pragma unroll
            for (int f = 0; f < COUNT_BITS; f++)
                asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[f]) : "r"(own + (j * COUNT_BITS + f) * 512));
            metadata_of(words, bundle.window, meta[j]);
            asm volatile("" : "+r"(meta[j][0]), "+r"(meta[j][1]));  // now, while the group before multiplies
        }
        bundle.next(state.windows);
    }
};
