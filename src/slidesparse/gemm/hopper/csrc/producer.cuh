// The producer: one thread that copies a tile's operands into the ring, step after step.

#pragma once

#include "ring.cuh"
#include "tiles.cuh"

// The address of row block `block` of a step: W_TILE row blocks are contiguous, step by step.
__device__ __forceinline__ const u8* weights_at(const u8* weights, int block, int steps, int step, int bytes) {
    return weights + ((i64)(block / W_TILE * steps + step) * W_TILE + block % W_TILE) * bytes;
}

// Wait until the kernel before this one has ended: this one may start earlier (programmatic dependent launch, PTX ISA
// "griddepcontrol"). After an ordinary launch it returns at once.
__device__ __forceinline__ void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allow the kernel after this one to start, when all blocks have.
__device__ __forceinline__ void allow_kernel_after() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Wait until the activations are there, which the kernel before this one computes, or the one before a first band. The first
// band allows the second one to start when it has them.
__device__ __forceinline__ void await_activations(const Arguments& p) {
    if (p.band != FOLLOWING) await_kernel_before();
}

enum Operands { WEIGHTS = 1, ACTIVATIONS = 2 };

// Where the operands of one tile lie in global memory.
struct TileSource {
    const Arguments& p;
    const Ring& ring;
    int rows, token, block, x_bytes;

    __device__ __forceinline__ TileSource(const Arguments& p, const Ring& ring, const Tiles& tiles, int tile) : p(p), ring(ring) {
        int row_tile, token_tile;
        tiles.locate(tile, row_tile, token_tile);
        rows = ceil_div(p.tokens, 8) * 8, token = token_tile * TOKENS;
        block = first_block(p, expert_of(p, token_tile)) + row_tile * TILE_BLOCKS;
        x_bytes = min(TOKENS, rows - token) * SLAB;  // no result of the stage's bytes past them is stored
    }

    __device__ __forceinline__ void await_empty(const Place& place) const {
        barrier_wait(ring.empty_of(place), place.phase ^ 1);
    }
    __device__ __forceinline__ void copy_x(const Place& place, int slab) const {
        copy(ring.stage(place), p.x + ((i64)slab * rows + token) * SLAB, x_bytes, ring.full_of(place));
    }
};

// Loads tiles. `SparseSteps` loads their 2:4 steps, and keeps what it must know of the steps before; it is made anew for every
// walk over the tiles.
template <class SparseSteps>
struct Producer {
    const Arguments& p;
    const Ring& ring;
    const Range range;
    const Tiles tiles;

    __device__ __forceinline__ Producer(const Arguments& p, const Ring& ring, int rank)
        : p(p), ring(ring), range(range_of(p, rank)), tiles(p) {}

    __device__ __forceinline__ int dense_steps() const { return 2 * (range.dense_end - range.dense); }
    __device__ __forceinline__ int steps() const { return dense_steps() + range.sparse_end - range.sparse; }
    __device__ __forceinline__ int first_tile() const { return blockIdx.x / SPLIT; }
    __device__ __forceinline__ int early_steps() const { return min(STAGES, steps()); }

    // Load the weights of the first steps, as many as there are stages.
    __device__ __forceinline__ void load_early() const {
        if (GROUPED && first_tile() >= tiles.count()) return;
        Place place;
        SparseSteps sparse(range, p);
        load<WEIGHTS>(place, sparse, first_tile(), 0, early_steps());
    }

    // Load everything else.
    __device__ __forceinline__ void load_rest() const {
        if (GROUPED && first_tile() >= tiles.count()) return;
        Place place;
        SparseSteps sparse(range, p);
        load<ACTIVATIONS>(place, sparse, first_tile(), 0, early_steps());
        int from = early_steps();
        for (int tile = first_tile(); tile < tiles.count(); tile += gridDim.x / SPLIT, from = 0)
            load<WEIGHTS | ACTIVATIONS>(place, sparse, tile, from, steps());
    }

    // Load steps [from, to) of a tile. Loading the weights also sets the number of bytes that the step waits for.
    template <int OPERANDS>
    __device__ __forceinline__ void load(Place& place, SparseSteps& sparse, int tile, int from, int to) const {
        const TileSource source(p, ring, tiles, tile);
        const int dense_end = min(2 * range.dense + to, 2 * range.dense_end);
#pragma unroll 1
        for (int step = 2 * range.dense + from; step < dense_end; step++, place.next()) {
            const bool first_half = step % 2 == 0;
            if (OPERANDS & WEIGHTS) {
                source.await_empty(place);
                barrier_expect(ring.full_of(place), (first_half ? source.x_bytes : 0) + TILE_BLOCKS * VALUE_BYTES);
            }
            if (OPERANDS & ACTIVATIONS && first_half) source.copy_x(place, step / 2);
            if (OPERANDS & WEIGHTS)
                copy_weights(ring.stage(place) + X_BYTES, weights_at(p.dense, source.block, 2 * p.dense_slabs, step, VALUE_BYTES),
                     TILE_BLOCKS * VALUE_BYTES, ring.full_of(place), p.tokens);
        }
        const int sparse_end = range.sparse + to - dense_steps();
        sparse.template load<OPERANDS>(source, place, range.sparse + max(from - dense_steps(), 0), sparse_end);
    }
};
