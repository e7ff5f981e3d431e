// The mainloop of dense weights of six bits: 64 x 128 values a step and row block, and nothing else.

#include "metadata.cuh"
#include "six_bits.cuh"
#include "sparse_gemm.cuh"

static_assert(DENSE && COUNT_BITS == 0 && VALUE_BITS == 6, "another mainloop reads these weights");

struct DenseConsumer : Consumer<NoState> {
    using Held = Fragments;

    // Multiply one step. `held` must not be written again before the groups after this one have been waited for.
    __device__ __forceinline__ void sparse_step(acc_t (*d)[TOKENS / 2], Held& held, int accumulate) {
        await_stage();
        const u32 x = ring.stage(place), w = weights(x, SPARSE_BYTES);
        multiply_six_bits(d, held, x, w, accumulate, Words::load, [](Words&, int, int) {});
        place.next();
    }
};

KERNEL(const __grid_constant__ Arguments p) { run<StepsWithMetadata, DenseConsumer>(p); }
