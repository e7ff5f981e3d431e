// The mainloop of weights with counts and values of six bits: the fewest bytes of all. Of an instruction the third words lie
// apart, so that a warp loads words that are neighbours.

#include "counts.cuh"
#include "six_bits.cuh"
#include "sparse_gemm.cuh"

static_assert(VALUE_BITS == 6, "another mainloop reads these weights");

struct SixBitCountsConsumer : CountsConsumer {
    using Held = Fragments;

    __device__ __forceinline__ static void load(Words& words, u32 instruction) {
        const u32 thread = threadIdx.x % 128;
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words.high0), "=r"(words.high1) : "r"(instruction + thread * 8));
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words.low) : "r"(instruction + 1024 + thread * 4));
    }

    // Multiply one 2:4 step. `held` must not be written again before the groups after this one have been waited for.
    __device__ __forceinline__ void sparse_step(acc_t (*d)[TOKENS / 2], Held& held, int accumulate) {
        u32 meta[ROW_BLOCKS][META_WORDS];
        make_metadata(meta);
        await_stage();
        const u32 x = ring.stage(place), w = weights(x, SPARSE_BYTES);
        multiply_six_bits(d, held, x, w, accumulate, load, [&](Words& words, int i, int j) { words.meta = meta[j][i]; });
        place.next();
    }
};

KERNEL(const __grid_constant__ Arguments p) { run<StepsWithCounts, SixBitCountsConsumer>(p); }
