// Every block multiplies the same number of 2:4 steps, across tiles, so that no multiprocessor is left without a block in a last
// wave (stream-K, https://arxiv.org/abs/2301.03598). A tile whose steps several blocks have is summed in an int32 workspace in L2:
// integers have the same bits in any order. The block that comes last completes the tile, and leaves zeros for the next launch.
// No block waits for another, so the blocks need not run at one time.
//
//     steps of all tiles    | tile 0        | tile 1        | tile 2        |
//     blocks                | 0       | 1        | 2        | 3       | 4   |
//
// The launch passes the workspace in place of what experts need: `experts` is int32 [tiles][WARPGROUPS][SUMS_OF_THREAD][128], and
// `used` int32 [tiles][WARPGROUPS], the blocks that have added their sums. Both are zeros before and after a launch.

#pragma once

#include "sparse_gemm.cuh"

#if !defined(TYPE_S8)
#error "sums of floats depend on their order"
#endif
static_assert(SPLIT == 1 && !GROUPED && COUNT_BITS == 0, "one block takes part in several tiles");

constexpr int SUMS_OF_THREAD = ROW_BLOCKS * TOKENS / 2;

// The steps of this launch, tile after tile, and the share of each block. All numbers below are less than 2^31: 5 million steps.
struct Shares {
    int steps, total;
    __device__ __forceinline__ Shares(const Arguments& p, const Tiles& tiles)
        : steps(p.sparse_slabs), total(steps * tiles.count()) {}
    __device__ __forceinline__ int start(int block) const { return total * block / (int)gridDim.x; }
    __device__ __forceinline__ int block_of(int step) const { return ((step + 1) * (int)gridDim.x - 1) / total; }
    __device__ __forceinline__ int blocks_of(int tile) const {
        return block_of((tile + 1) * steps - 1) - block_of(tile * steps) + 1;
    }
};

// Load steps [from, to) of the launch.
template <int OPERANDS, class Producing, class SparseSteps>
__device__ __forceinline__ void load_steps(const Producing& producer, const Shares& shares, Place& place, SparseSteps& sparse,
                                           int from, int to) {
    while (from < to) {
        const int tile = from / shares.steps, first = tile * shares.steps, end = min(to, first + shares.steps);
        producer.template load<OPERANDS>(place, sparse, tile, from - first, end - first);
        from = end;
    }
}

// The sums of a warpgroup's part of a tile.
struct Sums {
    int* const at;    // of this thread: one every 128 numbers
    int* const done;  // how many blocks have added theirs
    const int blocks, warpgroup;

    __device__ __forceinline__ Sums(const Arguments& p, int tile, int blocks, int warpgroup)
        : at((int*)p.experts + (i64)(tile * WARPGROUPS + warpgroup) * SUMS_OF_THREAD * 128 + threadIdx.x % 128),
          done((int*)p.used + tile * WARPGROUPS + warpgroup), blocks(blocks), warpgroup(warpgroup) {}

    // Pass what one thread read of `done` to the others of the warpgroup; it orders what they do after it, too.
    __device__ __forceinline__ int told(int* box, int value) const {
        if (threadIdx.x % 128 == 0) *box = value;
        warpgroup_sync(warpgroup);
        const int found = *(volatile int*)box;
        warpgroup_sync(warpgroup);
        return found;
    }

    __device__ __forceinline__ bool others_have_added(int* box) const {
        int found = 0;
        if (threadIdx.x % 128 == 0) asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(done) : "memory");
        return told(box, found) == blocks - 1;
    }

    // Add this block's sums; returns whether it was the last one.
    __device__ __forceinline__ bool add(const acc_t (*d)[TOKENS / 2], int* box) const {
#pragma unroll
        for (int i = 0; i < SUMS_OF_THREAD; i++)
            asm volatile("red.global.add.s32 [%0], %1;" ::"l"(at + i * 128), "r"(d[i / (TOKENS / 2)][i % (TOKENS / 2)]) : "memory");
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        warpgroup_sync(warpgroup);
        int before = 0;
        if (threadIdx.x % 128 == 0)
            asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(done) : "memory");
        return told(box, before) == blocks - 1;
    }

    // Return the sums in memory, with those in registers where these were not added, and leave zeros.
    __device__ __forceinline__ void take(acc_t (*sum)[SHARE / 2], const acc_t (*d)[TOKENS / 2], bool with_own) const {
#pragma unroll
        for (int i = 0; i < SUMS_OF_THREAD; i++) {
            int found;
            asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(at + i * 128) : "memory");
            sum[i / (TOKENS / 2)][i % (TOKENS / 2)] = found;
        }
#pragma unroll
        for (int i = 0; i < SUMS_OF_THREAD; i++) {
            asm volatile("st.global.b32 [%0], %1;" ::"l"(at + i * 128), "r"(0) : "memory");
            if (with_own) sum[i / (TOKENS / 2)][i % (TOKENS / 2)] += d[i / (TOKENS / 2)][i % (TOKENS / 2)];
        }
        if (threadIdx.x % 128 == 0) asm volatile("st.global.b32 [%0], %1;" ::"l"(done), "r"(0) : "memory");
    }
};

// As run(), for equal shares.
template <class SparseSteps, class Mainloop>
__device__ __forceinline__ void run_equal_shares(const Arguments& p) {
    extern __shared__ u8 raw[];
    u8* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
    u8* const results = base + STAGES * STAGE_BYTES;
    const u32 barriers = shared_address(results + WARPGROUPS * RESULT_BYTES);
    const Ring ring{shared_address(base), barriers, barriers + STAGES * 8, 0};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(ring.full + s * 8, 1);
            barrier_init(ring.empty + s * 8, 4 * WARPGROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
#if defined(ALLOW_AT_START)
    allow_kernel_after();
#endif
    const int warpgroup = threadIdx.x / 128;
    const Tiles tiles(p);
    const Shares shares(p, tiles);
    const int from = shares.start(blockIdx.x), to = shares.start(blockIdx.x + 1);
    if (warpgroup == WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS + 16));
        if (threadIdx.x % 128 != 0) return;
        const Producer<SparseSteps> producer(p, ring, 0);
        const int early = min(min(to, from + STAGES), (from / shares.steps + 1) * shares.steps);  // of one tile
        Place place, start;
        SparseSteps sparse(producer.range, p);
        load_steps<WEIGHTS>(producer, shares, place, sparse, from, early);
        await_kernel_before();
        load_steps<ACTIVATIONS>(producer, shares, start, sparse, from, early);
        load_steps<WEIGHTS | ACTIVATIONS>(producer, shares, place, sparse, early, to);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((CONSUMER_REGISTERS - 16 / WARPGROUPS) / 8 * 8));
        Mainloop mainloop{ring, warpgroup, threadIdx.x % 32 == 0, typename Mainloop::State(range_of(p, 0), p)};
        Epilogue epilogue(p, results + warpgroup * RESULT_BYTES, warpgroup);
        int* const box = (int*)epilogue.factors;  // which all have read when one leaves store(); of `piece` some may still read
        acc_t d[ROW_BLOCKS][TOKENS / 2];
        await_kernel_before();
        for (int at = from; at < to;) {
            const int tile = at / shares.steps, first = tile * shares.steps, end = min(to, first + shares.steps);
            int row_tile, token_tile;
            tiles.locate(tile, row_tile, token_tile);
            epilogue.fetch(row_tile, token_tile * TOKENS, 0);
            multiply(mainloop, Range{0, 0, at - first, end - first}, d);
            at = end;
            const int blocks = shares.blocks_of(tile);
            if (blocks == 1) {
                epilogue.store(d);
                continue;
            }
            const Sums sums(p, tile, blocks, warpgroup);
            const bool others = sums.others_have_added(box);
            if (!others && !sums.add(d, box)) continue;
            acc_t sum[ROW_BLOCKS][SHARE / 2];
            sums.take(sum, d, others);
            epilogue.store(sum);
        }
    }
}
