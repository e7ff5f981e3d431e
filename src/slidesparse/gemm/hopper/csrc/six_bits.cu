// The mainloop of weights with metadata and values of six bits: of an instruction every thread has 16 bytes, three words of
// values and one of metadata.

#include "metadata.cuh"
#include "six_bits.cuh"
#include "sparse_gemm.cuh"

static_assert(COUNT_BITS == 0 && VALUE_BITS == 6, "another mainloop reads these weights");

struct SixBitConsumer : Consumer<NoState> {
    using Held = Fragments;

    __device__ __forceinline__ static void load(Words& words, u32 instruction) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.high0), "=r"(words.high1), "=r"(words.low), "=r"(words.meta)
                     : "r"(instruction + threadIdx.x % 128 * 16));
    }

    // Multiply one 2:4 step. `held` must not be written again before the groups after this one have been waited for.
    __device__ __forceinline__ void sparse_step(acc_t (*d)[TOKENS / 2], Held& held, int accumulate) {
        await_stage();
        const u32 x = ring.stage(place), w = weights(x, SPARSE_BYTES);
        multiply_six_bits(d, held, x, w, accumulate, load, [](Words&, int, int) {});
        place.next();
    }
};

KERNEL(const __grid_constant__ Arguments p) { run<StepsWithMetadata, SixBitConsumer>(p); }
