// The mainloop of weights with counts and whole values.

#include "counts.cuh"
#include "sparse_gemm.cuh"

static_assert(VALUE_BITS == 8, "another mainloop reads these weights");

struct EightBitCountsConsumer : CountsConsumer {
    using Held = u32[ROW_BLOCKS][META_WORDS];

    // Multiply one 2:4 step. `meta` must not be written again before the group after this one has been waited for.
    __device__ __forceinline__ void sparse_step(acc_t (*d)[TOKENS / 2], Held& meta, int accumulate) {
        make_metadata(meta);
        await_stage();
        const u32 x = ring.stage(place), w = weights(x, SPARSE_BYTES);
        multiply_sparse(d, x, w, meta, accumulate);
    }
};

KERNEL(const __grid_constant__ Arguments p) { run<StepsWithCounts, EightBitCountsConsumer>(p); }
