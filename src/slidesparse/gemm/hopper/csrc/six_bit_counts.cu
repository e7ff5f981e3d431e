// The mainloop of weights with counts and values of six bits: the fewest bytes of all.

#include "counts.cuh"
#include "six_bits.cuh"
#include "sparse_gemm.cuh"

static_assert(VALUE_BITS == 6, "another mainloop reads these weights");

struct SixBitCountsConsumer : CountsConsumer {
    using Held = Fragments;

    // Multiply one 2:4 step. `held` must not be written again before the groups after this one have been waited for.
    __device__ __forceinline__ void sparse_step(acc_t (*d)[TOKENS / 2], Held& held, int accumulate) {
        u32 meta[ROW_BLOCKS][META_WORDS];
        make_metadata(meta);
        await_stage();
        const u32 x = ring.stage(place), w = weights(x, SPARSE_BYTES);
        multiply_six_bits(d, held, x, w, accumulate, Words::load, [&](Words& words, int i, int j) { words.meta = meta[j][i]; });
        place.next();
    }
};

KERNEL(const __grid_constant__ Arguments p) { run<StepsWithCounts, SixBitCountsConsumer>(p); }
