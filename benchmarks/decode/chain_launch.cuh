// An experiment: the chain of a transformer block in one launch. Four linears, o, gate_up, down and qkv, with what lies between
// them; blocks stay from the first to the last, so all of them must be resident: the grid is the blocks of a multiprocessor
// times the multiprocessors. It is compiled in place of the kernel of a mainloop (chain_launch.py).
//
//     lift of the input | o | lift: add, norm | gate_up | lift: SiLU x up | down | lift: add, norm | qkv | rounding
//
// Every block multiplies the same number of steps of a product, whatever tiles they are of, and adds its INT8 sums, which are
// integers, to a row-major buffer in global memory: in any order they have the same bits. Whoever reads sums scales and rounds
// them, and leaves zeros for the next launch.
//
// Two threads fill the ring. One copies weights and knows nothing of boundaries: it runs ahead as far as the ring goes. The other
// copies activations, and waits for those of each product. So between two products are
//
//     sums of all blocks -> `summed`   those who lift wait for it    (rows are dealt to blocks, or parts of rows)
//     values of all lifts -> `lifted`  who copies activations waits for it
//
// Counters only grow in a launch; the last block to leave sets all to zero. A wait gives up after a second or so, and says so.

#pragma once

enum { LINEARS = 4, NONE = 0, NORM = 1, SILU = 2 };
enum Flags { LIFTS = 1, SYNCS = 2, STEPS = 4, AHEAD_OF_LIFTS = 8, EARLY = 16, REST = 32, FURTHER = 64 };

struct Linear {
    u8* x;                 // [slabs][tokens][SLAB], 128-byte swizzle: written by the lift, read by bulk copies
    const u8* sparse;
    const float* scale_w;  // [channels]
    int* sums;             // [tokens][channels], zeros before the launch and after it
    u16* y;                // [tokens][channels], or null: the product, BF16; of the last linear never null
    float* scale_x;        // [tokens]
    const u16* gain;       // [columns], of NORM
    int channels, slabs, columns;
    int prologue;          // of its activations
    int parts;             // blocks that lift a row of them together; more than one of SILU alone
    int unit;              // steps that are not divided between blocks
};

struct Chain {
    Linear linear[LINEARS];
    const u16* input;      // [tokens, input_stride]
    const u16* residual;   // [tokens, columns], of the first NORM; the others read what the one before wrote
    u16* residual_mid;
    u16* residual_out;
    u32* counters;         // zeros: summed and lifted of every linear, then `done`, and whether a wait gave up; COUNTER words apart
    u32* largest;          // zeros: [tokens][parts], of SILU
    u64* trace;            // [blocks][STAMPS] nanoseconds, or null
    int input_stride, tokens;
    float eps;
    int flags;
};

constexpr int COUNTER = 32;            // words: a line of L2 each
constexpr int NORM_STEPS = 7;          // columns / 4 / threads of a row that one block lifts
constexpr int NORM_COLUMNS = NORM_STEPS * 512;
constexpr int SCRATCH = 2 * NORM_COLUMNS;  // BF16 numbers: of a part, or of the gain and of a residual
constexpr int SILU_STEPS = TOKENS < 64 ? 2 : BLOCKS > 2 ? 2 : 5;  // loaded at once
constexpr int STEPS_FURTHER = 8;       // past the ring, into L2
constexpr u32 PATIENCE = 1 << 20;      // polls of a microsecond or so

constexpr int STAMPS = 4 * LINEARS + 3;  // start; of each linear: who lifts may, has, X may come, product ended; all summed; end
constexpr int CHAIN_PRODUCER_REGISTERS = BLOCKS < 3 ? 40 : ROW_BLOCKS == 1 ? 32 : 24;  // with others something spills
constexpr int CHAIN_LEFT = 2 * LAUNCH_REGISTERS - CHAIN_PRODUCER_REGISTERS;
constexpr int CHAIN_CONSUMER_REGISTERS = CHAIN_LEFT < 240 ? CHAIN_LEFT : 240;

static_assert(WARPGROUPS == 1 && SPLIT == 1 && COUNT_BITS == 0 && !GROUPED, "not written for others");

// ---- memory that other blocks write in this launch: none of it may come from L1 ----------------------------------------

__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
__device__ __forceinline__ u32 load_relaxed(const u32* p) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
__device__ __forceinline__ void store_relaxed(u32* p, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ void add_release(u32* p) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}
__device__ __forceinline__ u32 count_up(u32* p) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}
__device__ __forceinline__ void add_sum(int* p, int value) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ int4 load_sums(const int* p) {
    int4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ uint2 load_pairs(const u16* p) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void clear_sums(int* p) {
    asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(p), "r"(0) : "memory");
}
__device__ __forceinline__ void generic_before_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ u32* summed_of(const Chain& c, int at) { return c.counters + at * COUNTER; }
__device__ __forceinline__ u32* lifted_of(const Chain& c, int at) { return c.counters + (LINEARS + at) * COUNTER; }

__device__ __forceinline__ void stamp(const Chain& c, int at) {
    if (!c.trace) return;
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    c.trace[blockIdx.x * STAMPS + at] = now;
}

// Each of three threads of a block leaves once it reads no counter any more; the last one of all sets them to zero.
__device__ __forceinline__ void leave(const Chain& c) {
    if ((c.flags & SYNCS) && count_up(c.counters + 2 * LINEARS * COUNTER) == 3 * gridDim.x - 1)
        for (int i = 0; i <= 2 * LINEARS; i++) store_relaxed(c.counters + i * COUNTER, 0);
}

// A fault must not hang the GPU: a wait gives up, says so, and all that follows runs on wrong numbers. (With a trap the compiler
// serialises wgmma.)
__device__ __forceinline__ void give_up(const Chain& c) { store_relaxed(c.counters + (2 * LINEARS + 1) * COUNTER, 1); }

// One thread waits.
__device__ __forceinline__ void await_count(const Chain& c, const u32* counter, u32 target) {
    u32 polls = 0;
    while (load_acquire(counter) < target && polls < PATIENCE) {
        polls++;
        if (c.flags & REST) __nanosleep(40);
    }
    if (polls == PATIENCE) give_up(c);
}

__device__ __forceinline__ void consumers_sync() { warpgroup_sync(0); }

// All consumers have written: their writes come before the count, for everyone who acquires it.
__device__ __forceinline__ void publish(u32* counter) {
    consumers_sync();
    if (threadIdx.x == 0) {
        fence_gpu();
        add_release(counter);
    }
}

__device__ __forceinline__ void all_await_count(const Chain& c, const u32* counter, u32 target) {
    if (threadIdx.x == 0) {
        await_count(c, counter, target);
        fence_gpu();
    }
    consumers_sync();
}

// ---- shares ------------------------------------------------------------------------------------------------------------

// The steps of a product that this block multiplies, counted tile by tile.
struct Share {
    int at, end, slabs;
    __device__ __forceinline__ Share(const Chain& c, const Linear& linear) : slabs(linear.slabs) {
        const int units = linear.channels / (TILE_BLOCKS * ROWS) * slabs / linear.unit;
        const int grid = gridDim.x, block = blockIdx.x;
        at = units * block / grid * linear.unit, end = units * (block + 1) / grid * linear.unit;
        if (!(c.flags & STEPS)) at = end = 0;
    }
};

// ---- lifts -------------------------------------------------------------------------------------------------------------

struct Scratch {
    u16* values;     // [SCRATCH] BF16 numbers that are quantised
    float* partial;  // [8] of warps
};

__device__ __forceinline__ float low_of(u32 pair) { return __int_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __int_as_float(pair & 0xFFFF0000); }
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float scaled(int sum, float scale_w, float scale_x) { return scale_x * __fmul_rn(scale_w, (float)sum); }

// Four neighbouring channels of the product, as BF16.
__device__ __forceinline__ uint2 rounded(const int4& sums, const float4& w, float x) {
    return make_uint2(bf16_pair(scaled(sums.x, w.x, x), scaled(sums.y, w.y, x)),
                      bf16_pair(scaled(sums.z, w.z, x), scaled(sums.w, w.w, x)));
}

__device__ __forceinline__ float over_lanes(float value, bool largest) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFF, value, by);
        value = largest ? fmaxf(value, other) : value + other;
    }
    return value;
}
__device__ __forceinline__ float over_block(float value, bool largest, float* partial) {
    value = over_lanes(value, largest);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    consumers_sync();
    return largest ? fmaxf(fmaxf(partial[0], partial[1]), fmaxf(partial[2], partial[3]))
                   : (partial[0] + partial[1]) + (partial[2] + partial[3]);
}

__device__ __forceinline__ float larger(float largest, const uint2& four) {
    const float a = fmaxf(fabsf(low_of(four.x)), fabsf(high_of(four.x))), b = fmaxf(fabsf(low_of(four.y)), fabsf(high_of(four.y)));
    return fmaxf(largest, fmaxf(a, b));
}

__device__ __forceinline__ float4 load_scales(const float* p) {  // which no one writes in this launch
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_gain(const u16* p) {
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// Wait for the sums from which the activations of a linear are made.
__device__ __forceinline__ void await_sums(const Chain& c, int at) {
    if (at > 0) all_await_count(c, summed_of(c, at - 1), gridDim.x);
    if (threadIdx.x == 0) stamp(c, 4 * at + 1);
}

// Each of these waits for what it reads, leaves BF16 numbers in the scratch memory, and returns the largest magnitude of this thread's.

__device__ __forceinline__ float hold_input(const Chain& c, int row, const Scratch& s) {
    float largest = 0;
    uint2 four[NORM_STEPS];
    await_sums(c, 0);
#pragma unroll
    for (int i = 0; i < NORM_STEPS; i++) {
        const int column = (i * 128 + threadIdx.x) * 4;
        four[i] = make_uint2(0, 0);
        if (column < c.linear[0].columns) four[i] = load_pairs(c.input + (i64)row * c.input_stride + column);
    }
#pragma unroll
    for (int i = 0; i < NORM_STEPS; i++) {
        const int column = (i * 128 + threadIdx.x) * 4;
        if (column < SCRATCH) *(uint2*)(s.values + column) = four[i];
        largest = larger(largest, four[i]);
    }
    return largest;
}

__device__ __forceinline__ float hold_normed(const Chain& c, const Linear& from, const Linear& to, int at, int row,
                                             const Scratch& s) {
    const bool first = at == 1;
    const int columns = to.columns;
    const u16* residual = (first ? c.residual : c.residual_mid) + row * columns;
    u16* residual_out = (first ? c.residual_mid : c.residual_out) + row * columns;
    int* sums = from.sums + row * from.channels;
    float4 w[NORM_STEPS];
#pragma unroll
    for (int i = 0; i < NORM_STEPS; i++) {
        const int column = (i * 128 + threadIdx.x) * 4;
        w[i] = make_float4(0, 0, 0, 0);
        if (column < columns) {
            w[i] = load_scales(from.scale_w + column);
            // These wait in shared memory, since registers are few. The residual of the second norm this thread itself wrote.
            *(uint2*)(s.values + column) = load_gain(to.gain + column);
            *(uint2*)(s.values + NORM_COLUMNS + column) = load_pairs(residual + column);
        }
    }
    await_sums(c, at);
    const float scale_x = __ldcg(from.scale_x + row);
    int4 acc[NORM_STEPS];
#pragma unroll
    for (int i = 0; i < NORM_STEPS; i++) {
        const int column = (i * 128 + threadIdx.x) * 4;
        acc[i] = make_int4(0, 0, 0, 0);
        if (column < columns) acc[i] = load_sums(sums + column);
    }
    float total[NORM_STEPS][4], squares = 0;
#pragma unroll
    for (int i = 0; i < NORM_STEPS; i++) {
        const int column = (i * 128 + threadIdx.x) * 4;
        if (column < columns) {
            const uint2 added = *(const uint2*)(s.values + NORM_COLUMNS + column);
            const uint2 y = rounded(acc[i], w[i], scale_x);
            if (from.y) *(uint2*)(from.y + row * from.channels + column) = y;
            clear_sums(sums + column);
            total[i][0] = low_of(y.x) + low_of(added.x), total[i][1] = high_of(y.x) + high_of(added.x);
            total[i][2] = low_of(y.y) + low_of(added.y), total[i][3] = high_of(y.y) + high_of(added.y);
            *(uint2*)(residual_out + column) = make_uint2(bf16_pair(total[i][0], total[i][1]), bf16_pair(total[i][2], total[i][3]));
        } else {
            total[i][0] = total[i][1] = total[i][2] = total[i][3] = 0;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) squares += total[i][j] * total[i][j];
    }
    squares = over_block(squares, false, s.partial);
    const float rstd = __fdiv_rn(1.f, __fsqrt_rn(__fdiv_rn(squares, (float)columns) + c.eps));
    float largest = 0;
#pragma unroll
    for (int i = 0; i < NORM_STEPS; i++) {
        const int column = (i * 128 + threadIdx.x) * 4;
        if (column < columns) {
            const uint2 gain = *(const uint2*)(s.values + column);
            const uint2 four = make_uint2(
                bf16_pair(total[i][0] * rstd * low_of(gain.x), total[i][1] * rstd * high_of(gain.x)),
                bf16_pair(total[i][2] * rstd * low_of(gain.y), total[i][3] * rstd * high_of(gain.y)));
            *(uint2*)(s.values + column) = four;
            largest = larger(largest, four);
        }
    }
    return largest;
}

__device__ __forceinline__ float silu_times(float gate, float up) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(gate * -1.4426950408889634f));
    e += 1.f;
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(e));
    return gate * e * up;
}

// Columns [start, end) of a row.
__device__ __forceinline__ float hold_silu(const Chain& c, const Linear& from, const Linear& to, int at, int row, int start, int end, const Scratch& s) {
    int* sums = from.sums + row * from.channels;
    await_sums(c, at);
    const float scale_x = __ldcg(from.scale_x + row);
    float largest = 0;
#pragma unroll 1
    for (int first = start; first < end; first += SILU_STEPS * 512) {
        int4 gate[SILU_STEPS], up[SILU_STEPS];
        float4 gate_w[SILU_STEPS], up_w[SILU_STEPS];
#pragma unroll
        for (int i = 0; i < SILU_STEPS; i++) {
            const int column = first + (i * 128 + threadIdx.x) * 4;
            gate[i] = up[i] = make_int4(0, 0, 0, 0), gate_w[i] = up_w[i] = make_float4(0, 0, 0, 0);
            if (column < end) {
                gate[i] = load_sums(sums + column), up[i] = load_sums(sums + to.columns + column);
                gate_w[i] = load_scales(from.scale_w + column), up_w[i] = load_scales(from.scale_w + to.columns + column);
            }
        }
#pragma unroll
        for (int i = 0; i < SILU_STEPS; i++) {
            const int column = first + (i * 128 + threadIdx.x) * 4;
            if (column >= end) continue;
            const uint2 g = rounded(gate[i], gate_w[i], scale_x);
            const uint2 u = rounded(up[i], up_w[i], scale_x);
            if (from.y) {
                *(uint2*)(from.y + row * from.channels + column) = g;
                *(uint2*)(from.y + row * from.channels + to.columns + column) = u;
            }
            clear_sums(sums + column);
            clear_sums(sums + to.columns + column);
            const uint2 four = make_uint2(
                bf16_pair(silu_times(low_of(g.x), low_of(u.x)), silu_times(high_of(g.x), high_of(u.x))),
                bf16_pair(silu_times(low_of(g.y), low_of(u.y)), silu_times(high_of(g.y), high_of(u.y))));
            *(uint2*)(s.values + column - start) = four;
            largest = larger(largest, four);
        }
    }
    return largest;
}

// The largest magnitude of a row of which other blocks have the other parts: each leaves its own, with the sign bit to tell it
// from none. The number is all that is passed on, so no other memory has to be ordered.
__device__ __forceinline__ float over_parts(const Chain& c, float largest, u32* slots, int part, int parts, float* partial) {
    if (threadIdx.x == 0) store_relaxed(slots + part, __float_as_int(largest) | 0x80000000);
    if (threadIdx.x < 32) {
        float found = 0;
        for (int other = threadIdx.x; other < parts; other += 32) {
            u32 bits = 0, polls = 0;
            while ((bits = load_relaxed(slots + other)) == 0 && polls < PATIENCE) polls++;
            if (polls == PATIENCE) give_up(c);
            found = fmaxf(found, __int_as_float(bits & 0x7FFFFFFF));
        }
        __syncwarp();
        found = over_lanes(found, true);
        if (threadIdx.x == 0) partial[0] = found;
    }
    consumers_sync();
    return partial[0];
}

__device__ __forceinline__ u32 quantised(const u16* values, float inverse, bool first, bool second) {
    const u32 a = first ? *(const u32*)values : 0, b = second ? *(const u32*)(values + 2) : 0;
    const u32 low = (__float2int_rn(low_of(a) * inverse) & 0xFF) | (__float2int_rn(high_of(a) * inverse) & 0xFF) << 8;
    return low | (__float2int_rn(low_of(b) * inverse) & 0xFF) << 16 | (__float2int_rn(high_of(b) * inverse) & 0xFF) << 24;
}

// Make the activations of linear `at`: a row of them, or a part of one.
__device__ __forceinline__ void lift(const Chain& c, int at, int row, int part, const Scratch& s) {
    const Linear& to = c.linear[at];
    const Linear& from = c.linear[at > 0 ? at - 1 : 0];
    const int unit = 32 * GROUP_COLUMNS, units = (to.slabs + WINDOWS - 1) / WINDOWS;  // 32 groups are WINDOWS slabs
    const int first = units * part / to.parts, last = units * (part + 1) / to.parts;
    const int start = first * unit, end = min(last * unit, to.columns);
    float largest = to.prologue == NONE   ? hold_input(c, row, s)
                    : to.prologue == NORM ? hold_normed(c, from, to, at, row, s)
                                          : hold_silu(c, from, to, at, row, start, end, s);
    largest = over_block(largest, true, s.partial + 4);
    if (to.parts > 1) {
        consumers_sync();
        largest = over_parts(c, largest, c.largest + row * to.parts, part, to.parts, s.partial);
    }
    const float inverse = largest == 0 ? 0.f : __fdiv_rn(127.f, largest);
    if (part == 0 && threadIdx.x == 0) to.scale_x[row] = __fdiv_rn(largest, 127.f);
    const int slab = first * WINDOWS, chunks = (min(last * WINDOWS, to.slabs) - slab) * (SLAB / 16);
    u8* const x = to.x + (i64)row * SLAB;
#pragma unroll 1
    for (int i = threadIdx.x; i < chunks; i += 128) {
        u32 words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int window = slab * 32 + i * 4 + k;
            const int column = window / WINDOWS * GROUP_COLUMNS + window % WINDOWS * 2;
            words[k] = quantised(s.values + column - start, inverse, column < end, column + 2 < end);
        }
        *(uint4*)(x + (i64)(slab + i / 8) * c.tokens * SLAB + (i % 8 ^ row % 8) * 16) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
    generic_before_async();
}

// ---- products ----------------------------------------------------------------------------------------------------------

// Add the sums of a tile, or of a part of its steps.
__device__ __forceinline__ void add_sums(const Chain& c, const Linear& linear, int tile, bool whole, const acc_t (*d)[TOKENS / 2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channels = linear.channels;
    int* to = linear.sums + (lane % 4 * 2) * channels + tile * (TILE_BLOCKS * ROWS) + warp * 16 + lane / 4;
#pragma unroll
    for (int q = 0; q < TOKENS / 8; q++, to += 8 * channels) {
        if (q * 8 >= c.tokens) break;
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int* const own = to + j * ROWS + h * 8 + e * channels;
                    const int value = d[j][q * 4 + h * 2 + e];
                    if (whole) *own = value;
                    else add_sum(own, value);
                }
    }
}

// The product of the last linear: its sums, scaled and rounded, some of them by each block.
__device__ __forceinline__ void finish(const Chain& c) {
    const Linear& linear = c.linear[LINEARS - 1];
    const int fours = linear.channels / 4;
    for (int i = blockIdx.x * 128 + threadIdx.x; i < c.tokens * fours; i += gridDim.x * 128) {
        const int row = i / fours, column = i % fours * 4, at = row * linear.channels + column;
        const int4 sums = load_sums(linear.sums + at);
        *(uint2*)(linear.y + at) = rounded(sums, *(const float4*)(linear.scale_w + column), __ldcg(linear.scale_x + row));
        clear_sums(linear.sums + at);
    }
}

template <class Mainloop>
__device__ __forceinline__ void consume(const Chain& c, const Ring& ring, const Scratch& s) {
    Mainloop mainloop{ring, 0, threadIdx.x % 32 == 0, NoState(Range{}, Arguments{})};
    acc_t d[ROW_BLOCKS][TOKENS / 2];
    const bool syncs = c.flags & SYNCS, lifts = c.flags & LIFTS;
    await_kernel_before();
    if (threadIdx.x == 0) stamp(c, 0);
#pragma unroll 1
    for (int at = 0; at < LINEARS; at++) {
        const Linear& linear = c.linear[at];
        if (syncs && blockIdx.x < c.tokens * linear.parts) {
            const int row = blockIdx.x % c.tokens, part = blockIdx.x / c.tokens;
            if (lifts) lift(c, at, row, part, s);
            else await_sums(c, at);
            // Everyone is past its polls of the largest numbers when all have added their sums of the next product.
            if (at == LINEARS - 1 && part == 0 && threadIdx.x < c.linear[at - 1].parts)
                store_relaxed(c.largest + row * c.linear[at - 1].parts + threadIdx.x, 0);
            publish(lifted_of(c, at));
            if (threadIdx.x == 0) stamp(c, 4 * at + 2);
        }
        const Share share(c, linear);
        for (int step = share.at; step < share.end;) {
            const int tile = step / share.slabs, from = step % share.slabs;
            const int count = min(share.slabs - from, share.end - step);
            multiply(mainloop, Range{0, 0, 0, count}, d);
            add_sums(c, linear, tile, count == share.slabs, d);
            step += count;
        }
        if (threadIdx.x == 0) stamp(c, 4 * at + 4);
        if (syncs) publish(summed_of(c, at));
    }
    if (syncs) all_await_count(c, summed_of(c, LINEARS - 1), gridDim.x);
    if (threadIdx.x == 0) stamp(c, STAMPS - 2);
    if (lifts) finish(c);
    consumers_sync();
    if (threadIdx.x == 0) {
        stamp(c, STAMPS - 1);
        leave(c);
    }
}

__device__ __forceinline__ void produce_weights(const Chain& c, const Ring& ring) {
    Place place;
    const u32 x_bytes = c.tokens * SLAB, w_bytes = TILE_BLOCKS * SPARSE_BYTES;
#pragma unroll 1
    for (int at = 0; at < LINEARS; at++) {
        const Linear& linear = c.linear[at];
        const Share share(c, linear);
        if ((c.flags & SYNCS) && !(c.flags & AHEAD_OF_LIFTS)) {
            if (at == 0) await_kernel_before();
            await_count(c, lifted_of(c, at), c.tokens * linear.parts);
        }
#pragma unroll 1
        for (int step = share.at; step < share.end; step++, place.next()) {
            const int tile = step / share.slabs, slab = step - tile * share.slabs;
            barrier_wait(ring.empty_of(place), place.phase ^ 1);
            barrier_expect(ring.full_of(place), x_bytes + w_bytes);
            copy_weights(ring.stage(place) + X_BYTES, weights_at(linear.sparse, tile * TILE_BLOCKS, share.slabs, slab, SPARSE_BYTES),
                         w_bytes, ring.full_of(place), c.tokens);
        }
    }
    await_kernel_before();  // whose counters these may be
    leave(c);
}

__device__ __forceinline__ void produce_activations(const Chain& c, const Ring& ring) {
    Place place;
    await_kernel_before();  // which may be a launch like this one, with the same counters
#pragma unroll 1
    for (int at = 0; at < LINEARS; at++) {
        const Linear& linear = c.linear[at];
        const Share share(c, linear);
        if (at == LINEARS - 1 && c.flags & EARLY) allow_kernel_after();
        if (c.flags & FURTHER) {  // the other producer fills the ring with what comes before these
            const int first = share.at + STAGES, end = min(first + STEPS_FURTHER, share.end);
#pragma unroll 1
            for (int step = first; step < end; step++) {
                const int tile = step / share.slabs, slab = step - tile * share.slabs;
                asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                                 weights_at(linear.sparse, tile * TILE_BLOCKS, share.slabs, slab, SPARSE_BYTES)),
                             "r"(TILE_BLOCKS * SPARSE_BYTES) : "memory");
            }
        }
        if (c.flags & SYNCS) {
            await_count(c, lifted_of(c, at), c.tokens * linear.parts);
            fence_gpu();
        }
        generic_before_async();
        stamp(c, 4 * at + 3);
#pragma unroll 1
        for (int step = share.at; step < share.end; step++, place.next()) {
            barrier_wait(ring.empty_of(place), place.phase ^ 1);
            copy(ring.stage(place), linear.x + (i64)(step % share.slabs) * c.tokens * SLAB, c.tokens * SLAB, ring.full_of(place));
        }
    }
    leave(c);
}

template <class Mainloop>
__device__ __forceinline__ void run_chain(const Chain& c) {
    extern __shared__ u8 raw[];
    u8* const base = raw + (1024 - shared_address(raw) % 1024) % 1024;
    u8* const after = base + STAGES * STAGE_BYTES;
    const Scratch scratch{(u16*)after, (float*)(after + SCRATCH * 2)};
    const u32 barriers = shared_address(after + SCRATCH * 2 + 32);
    const Ring ring{shared_address(base), barriers, barriers + STAGES * 8, 0};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(ring.full + s * 8, 1);
            barrier_init(ring.empty + s * 8, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CHAIN_PRODUCER_REGISTERS));
        if (threadIdx.x == 128) produce_weights(c, ring);
        if (threadIdx.x == 160) produce_activations(c, ring);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CHAIN_CONSUMER_REGISTERS));
        consume<Mainloop>(c, ring, scratch);
    }
}
