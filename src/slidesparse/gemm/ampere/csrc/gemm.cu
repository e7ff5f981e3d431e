// Y[token, channel] = scale_x[token] * (scale_w[channel] * (W X^T)[channel, token]) + bias[channel]   by mma.sync (from sm_80 on)
//
// W is 2:4 along K, and X is lifted to match; or it is dense. mma.sp takes 2:4 weights as its A operand only, so the weights are A
// (16 rows an instruction) and the tokens are B (8 columns). W and X lie in memory as for Hopper: weights in steps
// (gemm/steps.py), activations in slabs (lifting/layout.py), both in the order that shared memory needs. ldmatrix reads
// the swizzled rows of both without bank conflicts, and a thread its values of six bits, with their metadata, as 16 bytes.
//
// A block has SPLIT teams of ROW_WARPS x TOKEN_WARPS warps. It is persistent: it walks over tiles of CHANNELS channels by TOKENS
// tokens, of which each team multiplies its part of the steps; the sums are added in a fixed order, so that floats have the same bits
// every time. A warp multiplies ROW_BLOCKS x TOKEN_BLOCKS blocks of 16 channels by 8 tokens.
//
// A team's ring has STAGES stages, each with one step of W and X, which all of its threads copy. In each step, before its last
// instructions, the team waits for the next stage, and fills the one before its own, which nobody reads any more:
//
//     stage 0: step i - 1, then i + STAGES - 1     stage 1: step i, multiplied     stage 2: step i + 1, awaited       ...
//
// So fragments of the next step are loaded while this one multiplies; AHEAD: those of weights, too. The steps of the next tile
// are on their way while results are stored.
//
// The compiler's options (gemm/ampere/tiles.py) define TYPE_S8 / E4M3 / BF16 / F16, OUT_BF16 / F16 / F32, ROW_BLOCKS, TOKEN_BLOCKS,
// ROW_WARPS, TOKEN_WARPS, SPLIT, STAGES, AHEAD, VALUE_BITS and DENSE.

#include "loader.cuh"
#include "operands.cuh"
#include "store.cuh"

// The fragments that a warp holds: those of the instructions being issued, and of the ones after them.
struct Held {
    Fragment w[AHEAD ? 2 : 1][ROW_BLOCKS];
    u32 x[2][4];
};

enum { LOADS = DENSE ? TOKEN_BLOCKS / 2 : TOKEN_BLOCKS };  // of activations for an instruction

// A team: its ring, its place there, and the operands that its warps hold.
struct Team {
    const int number;
    const u32 ring;
    Loader loader;
    const Operands operands;
    Held held;
    u32 stage, last;  // the one that is multiplied, and the one that is filled next

    __device__ __forceinline__ Team(const Arguments& p, const Walk& tiles, int number, int thread, u32 rings, int first, int end)
        : number(number), ring(rings + number * RING_BYTES), loader(p, tiles, thread, first, end),
          operands(thread / 32, thread % 32), stage(ring), last(ring + RING_BYTES - STAGE_BYTES) {
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            loader.template copy<0, 1>(ring + s * STAGE_BYTES);
            loader.next();
        }
        await_copies<STAGES - 2>();
        sync_team(number);
        operands.load_tokens(held.x[0], ring, 0, 0);
#pragma unroll
        for (int m = 0; m < ROW_BLOCKS; m++) operands.load(held.w[0][m], ring, 0, m);
    }

    // Multiply a step, from its instructions I on.
    template <int I>
    __device__ __forceinline__ void step(Sums& d) {
        if constexpr (I + 1 < INSTRUCTIONS) {
            multiply<I, 0>(d, stage, I + 1);
            step<I + 1>(d);
        } else {
            const u32 after = stage + STAGE_BYTES == ring + RING_BYTES ? ring : stage + STAGE_BYTES;
            await_copies<STAGES - 3>();
            sync_team(number);
            multiply<I, 0>(d, after, 0);
            loader.next();
            last = stage, stage = after;
        }
    }

    // Issue the instructions I of a step, from load Q of activations on, and load fragments of the ones after them, instructions
    // `next` of the stage `after`. With the last instructions a part of a later step is copied.
    template <int I, int Q>
    __device__ __forceinline__ void multiply(Sums& d, u32 after, int next) {
        constexpr bool ENDS = Q + 1 == LOADS;
        operands.load_tokens(held.x[(I * LOADS + Q + 1) % 2], ENDS ? after : stage, ENDS ? next : I, ENDS ? 0 : Q + 1);
#pragma unroll
        for (int m = Q; m < ROW_BLOCKS; m += LOADS)
            if (AHEAD) operands.load(held.w[(I + 1) % 2 * AHEAD][m], after, next, m);
        if constexpr (I + 1 == INSTRUCTIONS) loader.template copy<Q, LOADS>(last);
        const u32(&x)[4] = held.x[(I * LOADS + Q) % 2];
#pragma unroll
        for (int m = 0; m < ROW_BLOCKS; m++) {
            const Fragment& w = held.w[I % 2 * AHEAD][m];
            if constexpr (DENSE) {
                mma<0>(d[m][Q * 2], w, x);
                mma<0>(d[m][Q * 2 + 1], w, x + 2);
            } else {
                mma<META_WORDS == 1 ? I : 0>(d[m][Q], w, x);
            }
            if (!AHEAD && ENDS) operands.load(held.w[0][m], after, next, m);
        }
        if constexpr (!ENDS) multiply<I, Q + 1>(d, after, next);
    }
};

// Add the sums of all teams to those of the first: those of the second half to the first half's, again and again.
__device__ __forceinline__ void add_teams(Sums& d, acc_t* shared, int team, int thread) {
#pragma unroll
    for (int half = SPLIT / 2; half > 0; half /= 2) {
        acc_t* const own = shared + team % half * (CHANNELS * TOKENS) + thread;
        const bool gives = team / half == 1, takes = team < half;
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS * TOKEN_BLOCKS * 4; i++)
            if (gives) own[i * TEAM] = (&d[0][0][0])[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS * TOKEN_BLOCKS * 4; i++)
            if (takes) (&d[0][0][0])[i] += own[i * TEAM];
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_gemm(const __grid_constant__ Arguments p) {
    extern __shared__ u8 raw[];
    u8* const shared = raw + (128 - shared_address(raw) % 128) % 128;
    const int number = SPLIT == 1 ? 0 : threadIdx.x / TEAM, thread = threadIdx.x % TEAM;
    const Walk tiles{ceil_div(p.channels, CHANNELS), ceil_div(p.tokens, TOKENS), p.group};
    const int first = p.sparse_slabs * number / SPLIT, end = p.sparse_slabs * (number + 1) / SPLIT;
    u8* const sums = shared + SPLIT * RING_BYTES;
    Store store(p, sums + SUM_BYTES, thread, number);
    Team team(p, tiles, number, thread, shared_address(shared), first, end);
    for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
        constexpr bool FULL = ROW_BLOCKS * TOKEN_BLOCKS >= 40;  // sums leave no registers for scales
        if (!FULL) store.fetch(tiles, tile);
        Sums d = {};
#pragma unroll 1
        for (int slab = first; slab < end; slab++) team.step<0>(d);
        if (SPLIT > 1) add_teams(d, (acc_t*)sums, number, thread);
        if (FULL) store.fetch(tiles, tile);
        if (number == 0) store.store(d, shared + (team.last - shared_address(shared)));
    }
}
