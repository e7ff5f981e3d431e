// Y[token, channel] = scale_x[token] * (scale_w[channel] * (W X^T)[channel, token]) + bias[channel]   on Hopper (sm_90a)
//
// W is 2:4 along K, and X is lifted to match; or it is dense (six_bit_dense.cu). Dense steps of eight bits before the 2:4 ones,
// which the source can also multiply, are in no weight: the host asks for none (arguments.cuh). wgmma takes 2:4 weights as its A operand only, so the weights are A (64 rows
// an instruction) and the tokens are B.
//
// A block has one producer warp and WARPGROUPS consumer warpgroups. It is persistent: it walks over tiles of
// WARPGROUPS * ROW_BLOCKS * 64 channels by TOKENS tokens. Here WARPGROUPS = 2 and ROW_BLOCKS = 2:
//
//                            TOKENS
//                       +--------------+
//     row block 0       |              |   channels   0 ..  63    warpgroup 0
//     row block 1       |   a tile     |   channels  64 .. 127
//                       +--------------+
//     row block 2       |   of Y^T     |   channels 128 .. 191    warpgroup 1
//     row block 3       |              |   channels 192 .. 255
//                       +--------------+
//
// Along K a tile is a sequence of *steps* of 128 bytes of an X row (a *slab*), each of 64 x 64 bytes of kept values and their
// metadata a row block, and TOKENS x 128 bytes of X. (A dense step would be of half a slab, with X once for two of them.)
//
// How the weights lie in memory decides on the *mainloop*, how they are loaded and multiplied. Each has a file that is compiled:
//
//     metadata.cu          whole values, metadata with every step
//     counts.cu            whole values, counts once a bundle of steps in place of metadata (counts.cuh)
//     six_bits.cu          INT8 values in six bits (six_bits.cuh), metadata with every step
//     six_bit_counts.cu    both
//     six_bit_dense.cu     dense weights of six bits; their steps are whole slabs, and are called sparse as the others are
//
// Every operand lies in memory in the order that shared memory needs (gemm/steps.py), so a step is two 1-D bulk
// copies, without tensor maps. A ring of STAGES stages, each with the memory of one step, joins producer and consumers:
//
//     producer                    stage 0    stage 1    stage 2          stage STAGES - 1             consumers
//     waits for `empty`,        +----------+----------+----------+-----+----------+           wait for `full`,
//     expects the bytes,  --->  | X, W     | X, W     | X, W     | ... | X, W     |  --->     multiply,
//     copies X and W            +----------+----------+----------+-----+----------+           arrive at `empty`
//                                     ^                                      |
//                                     +--------- then stage 0 again ---------+
//
// The copies complete `full`; one lane of each consumer warp arrives at `empty`. A stage is used again and again, so a place
// in the ring (`Place`) also has the parity of its current use. One wgmma group is always in flight: the step before the
// last one issued is complete.
//
// With few tokens, several blocks share the steps of a tile (exchange.cuh). For mixtures, tiles have experts (experts.cuh).
//
// A product may be launched in two bands, each of neighbouring channels and with its own tiles (gemm/hopper/tiles.py): the first
// fills every multiprocessor some times over, and the second, of smaller tiles, takes each one that the first leaves.
//
// The compiler's options (gemm/hopper/compile.py) define TYPE_S8 / E4M3 / BF16 / F16, OUT_BF16 / F16 / F32, TOKENS,
// WARPGROUPS, ROW_BLOCKS, STAGES, SPLIT, BLOCKS (of a multiprocessor), GROUPED, COUNT_BITS (of a count, 0 without) and VALUE_BITS
// (of a value in memory: 6, or 8 for all others) and DENSE (1: a dense weight). Since a preprocessor cannot count, they define the accumulator operands of
// wgmma, too: ACC_NAMES is the string "%0, %1, ..." of TOKENS / 2 registers, ACC(d) the constraints "+r"(d[0]), ..., and
// OPERAND(n) the string of the n-th operand after them (options define OPERAND_0 ... OPERAND_7).

#pragma once

#include "consumer.cuh"
#include "epilogue.cuh"
#include "exchange.cuh"
#include "producer.cuh"

// Run a block. `SparseSteps` loads 2:4 steps (producer.cuh), and `Mainloop` multiplies them (consumer.cuh).
template <class SparseSteps, class Mainloop>
__device__ __forceinline__ void run(const Arguments& p) {
    extern __shared__ u8 raw[];
    u8* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
    u8* const slots = base + STAGES * STAGE_BYTES;
    u8* const results = slots + SLOTS * SLOT_BYTES;
    u8* const apart = results + WARPGROUPS * RESULT_BYTES;
    const u32 barriers = shared_address(apart + APART_BYTES);
    const Ring ring{shared_address(base), barriers, barriers + STAGES * 8, shared_address(slots)};
    const u32 received = barriers + 2 * STAGES * 8;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(ring.full + s * 8, 1);
            barrier_init(ring.empty + s * 8, 4 * WARPGROUPS);
        }
        if (SPLIT > 1) barrier_init(received, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if (SPLIT > 1) barrier_expect(received, EXCHANGE_BYTES);
    }
    if (SPLIT > 1) cluster_arrive();
    const int rank = SPLIT > 1 ? cluster_rank() : 0;
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (GROUPED) await_activations(p);  // and what says which tiles there are
        const Producer<SparseSteps> producer(p, ring, rank);
        const bool leader = threadIdx.x % 128 == 0;
        if (leader) producer.load_early();
        if (SPLIT > 1) {
            __syncwarp();
            cluster_wait();  // no thread may exit before every block has made its barriers
        }
        if (leader) {
            await_activations(p);
            if (p.band == LEADING) allow_kernel_after();
            producer.load_rest();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        if (GROUPED) await_activations(p);
        const Tiles tiles(p);
        Mainloop mainloop{ring, warpgroup, threadIdx.x % 32 == 0, typename Mainloop::State(range_of(p, rank), p)};
        Epilogue epilogue(p, results + warpgroup * RESULT_BYTES, warpgroup);
        acc_t d[ROW_BLOCKS][TOKENS / 2];
        await_activations(p);  // and of their scales
        for (int tile = blockIdx.x / SPLIT; tile < tiles.count(); tile += gridDim.x / SPLIT) {
            int row_tile, token_tile;
            tiles.locate(tile, row_tile, token_tile);
            epilogue.fetch(row_tile, token_tile * TOKENS + rank * SHARE, expert_of(p, token_tile));
            const Range range = range_of(p, rank);
            if constexpr (SPLIT == 1) {
                multiply(mainloop, range, d);
                epilogue.store(d);
            } else {
                const Exchange exchange{SUMS_IN_RING ? base : apart, received, rank};
                acc_t sum[ROW_BLOCKS][SHARE / 2];
                if (range.empty()) {
                    const acc_t zeros[ROW_BLOCKS][TOKENS / 2] = {};  // not in d: only wgmma may write its registers
                    exchange.send(zeros);
                    if (rank < Exchange::SHARES) exchange.receive(zeros, sum);
                } else {
                    multiply(mainloop, range, d);
                    exchange.send(d);
                    if (rank < Exchange::SHARES) exchange.receive(d, sum);
                }
                if (rank < Exchange::SHARES) epilogue.store(sum);
                break;  // there is a block for every tile and rank
            }
        }
        if (p.band == FOLLOWING) await_kernel_before();  // what follows waits for this band alone, and needs the first one, too
    }
}

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) CLUSTER sparse_gemm
