// The mainloop of weights with metadata and whole values: 64 x 64 bytes of kept values and their metadata a step and row block.

#include "metadata.cuh"
#include "sparse_gemm.cuh"

static_assert(COUNT_BITS == 0 && VALUE_BITS == 8, "another mainloop reads these weights");

struct MetadataConsumer : Consumer<NoState> {
    using Held = u32[ROW_BLOCKS][META_WORDS];

    // Load the metadata registers of a step whose weights are at `w`.
    __device__ __forceinline__ void load_metadata(u32 w, Held& meta) const {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int i = 0; i < META_WORDS; i++)
                asm volatile("ld.shared.b32 %0, [%1];" : "=r"(meta[j][i])
                             : "r"(w + j * SPARSE_BYTES + VALUE_BYTES + i * 512 + (threadIdx.x % 128) * 4));
    }

    // Multiply one 2:4 step. `meta` must not be written again before the group after this one has been waited for.
    __device__ __forceinline__ void sparse_step(acc_t (*d)[TOKENS / 2], Held& meta, int accumulate) {
        await_stage();
        const u32 x = ring.stage(place), w = weights(x, SPARSE_BYTES);
        load_metadata(w, meta);
        multiply_sparse(d, x, w, meta, accumulate);
    }
};

KERNEL(const __grid_constant__ Arguments p) { run<StepsWithMetadata, MetadataConsumer>(p); }
