// A consumer: a warpgroup that multiplies its channels of a tile, step after step.

#pragma once

#include "ring.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

// What the consumers of all mainloops share. Each mainloop adds `Held`, the registers of a 2:4 step that its instructions read
// while they are in flight, and `sparse_step`. `OwnState` is what it keeps from step to step besides places in the ring.
template <class OwnState>
struct Consumer {
    using State = OwnState;
    const Ring& ring;
    const int warpgroup, lane_zero;
    State state;
    Place place, oldest;  // the next step to multiply; the oldest stage not yet given back

    __device__ __forceinline__ u32 weights(u32 stage, int block_bytes) const {
        return stage + X_BYTES + warpgroup * ROW_BLOCKS * block_bytes;
    }

    __device__ __forceinline__ void await_stage() const { barrier_wait(ring.full_of(place), place.phase); }

    // Wait for what the first 2:4 step of a range needs before its own stage is waited for.
    __device__ __forceinline__ void await_first() const {}

    __device__ __forceinline__ void release() {
        if (lane_zero) barrier_arrive(ring.empty_of(oldest));
        oldest.next();
    }

    // Multiply the 2:4 step whose weights, of eight bits or more, are at `w`, as one group; then wait for the one before.
    __device__ __forceinline__ void multiply_sparse(acc_t (*d)[TOKENS / 2], u32 x, u32 w, const u32 (*meta)[META_WORDS],
                                                    int accumulate) {
        mma_fence();
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
            mma_sparse<0>(d[j], describe(w + j * SPARSE_BYTES, HALF), describe(x, SLAB), meta[j][0], accumulate);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
            mma_sparse<META_WORDS == 1>(d[j], describe(w + j * SPARSE_BYTES + 32, HALF), describe(x + 64, SLAB),
                                        meta[j][META_WORDS - 1], 1);
        mma_commit();
        place.next();
        mma_wait<1>();
    }

    // Multiply half a slab of dense weights by the bytes at `x` of every X row.
    __device__ __forceinline__ void dense_step(acc_t (*d)[TOKENS / 2], u32 x, int accumulate) {
        await_stage();
        const u32 w = weights(ring.stage(place), VALUE_BYTES);
        mma_fence();
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
            mma_dense(d[j], describe(w + j * VALUE_BYTES, HALF), describe(x, SLAB), accumulate);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
            mma_dense(d[j], describe(w + j * VALUE_BYTES + 32, HALF), describe(x + 32, SLAB), 1);
        mma_commit();
        place.next();
        mma_wait<1>();
    }
};

// Multiply a 2:4 step that may be the first of the range, or follow a dense slab.
template <class Mainloop>
__device__ __forceinline__ void first_sparse_step(Mainloop& loop, acc_t (*d)[TOKENS / 2], typename Mainloop::Held& held,
                                                  int dense, int slab) {
    loop.sparse_step(d, held, dense + slab > 0);
    if (dense + slab > 0) loop.release();
    if (dense > 0 && slab == 0) loop.release();
}

// Compute W X^T of one tile over a range of slabs into d. A stage is released when the group after its own is in flight,
// except that the X of a dense slab serves two steps and is released with the second.
template <class Mainloop>
__device__ __forceinline__ void multiply(Mainloop& loop, const Range& range, acc_t (*d)[TOKENS / 2]) {
    const int dense = range.dense_end - range.dense, sparse = range.sparse_end - range.sparse;
    // No weight has dense steps, and this loop never runs. It stays, with all that serves it in these files: without it
    // ptxas 13.0 spills, or serialises wgmma, in some variants of 192 x 256.
    for (int slab = 0; slab < dense; slab++) {
        const u32 x = loop.ring.stage(loop.place);
        loop.dense_step(d, x, slab > 0);
        if (slab > 0) loop.release(), loop.release();
        loop.dense_step(d, x + HALF, 1);
    }
    // There are two sets of registers: a group in flight still reads its own.
    typename Mainloop::Held even, odd;
    loop.await_first();
    int slab = 0;
    for (; slab + 1 < sparse; slab += 2) {
        first_sparse_step(loop, d, even, dense, slab);
        loop.sparse_step(d, odd, 1);
        loop.release();
    }
    if (slab < sparse) first_sparse_step(loop, d, even, dense, slab);
    mma_wait<0>();
    loop.release();
    if (sparse == 0) loop.release();
}
