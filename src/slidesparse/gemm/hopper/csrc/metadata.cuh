// Metadata that come with the kept values of every 2:4 step.

#pragma once

#include "producer.cuh"

struct NoState {
    __device__ __forceinline__ NoState(const Range&, const Arguments&) {}
};

struct StepsWithMetadata {
    __device__ __forceinline__ StepsWithMetadata(const Range&, const Arguments&) {}

    // Load the 2:4 steps [step, end) of a tile.
    template <int OPERANDS>
    __device__ __forceinline__ void load(const TileSource& source, Place& place, int step, int end) const {
        const Arguments& p = source.p;
        const Ring& ring = source.ring;
#pragma unroll 1
        for (; step < end; step++, place.next()) {
            if (OPERANDS & WEIGHTS) {
                source.await_empty(place);
                barrier_expect(ring.full_of(place), source.x_bytes + TILE_BLOCKS * SPARSE_BYTES);
            }
            if (OPERANDS & ACTIVATIONS) source.copy_x(place, p.dense_slabs + step);
            if (OPERANDS & WEIGHTS)
                copy_weights(ring.stage(place) + X_BYTES, weights_at(p.sparse, source.block, p.sparse_slabs, step, SPARSE_BYTES),
                     TILE_BLOCKS * SPARSE_BYTES, ring.full_of(place), p.tokens);
        }
    }
};
