// The mainloop for few tokens: the 2:4 form of W, spread into dense fragments and multiplied by activations that are not
// lifted. It does the work of a dense kernel and reads 0.94 bytes a weight at 6:8 where a dense kernel reads 1.
//
// A window's two kept values lie in 4 of the group's columns, and windows overlap by two columns:
//
//     window 0     v0  0 v1  0                 v: a kept value
//     window 1           0 v2  0 v3
//     window 2                 v4  0  0 v5
//                 -------------------------
//     dense group  v0  0 v1 v2 v4 v3  0 v5     one byte permutation a window, and an addition where two overlap
//
// Weights reach wgmma in registers, so that a thread spreads its own part. Of a row's kept values a *lane* of the four that
// share it takes LANE_BYTES that lie together: the fewest that hold whole groups and fill whole instructions. The order of
// the columns within an instruction is free as long as X has the same, so a lane's groups become LANE_COLUMNS columns that
// lie together, too, and instruction i of a *round* multiplies columns 8 i ... 8 i + 7 of each of the four lanes:
//
//     a round of a row     2:4 form, LANE_SLABS slabs   |  lane 0   |  lane 1   |  lane 2   |  lane 3   |   16 bytes a slab each
//                                                             | spread
//     columns of W         4 * LANE_COLUMNS             | 0 ..      | C ..      | 2C ..     | 3C ..     |
//     columns of X         as instructions read them    | 0-3 C-C+3 2C-2C+3 3C-3C+3 | 4-7 C+4-C+7 ... |
//
// Weights and activations have rings of their own, since a round of weights is no whole number of slabs of X. A stage of
// weights is free again as soon as it was read into registers.

constexpr int WINDOWS = SPREAD;  // of a group: N - 1 at (2N-2):2N
constexpr int GROUP_COLUMNS = 2 * WINDOWS + 2, GROUP_KEPT = 2 * WINDOWS;

__host__ __device__ constexpr int lane_slabs() {
    int slabs = 1;
    while (16 * slabs % GROUP_KEPT != 0 || 16 * slabs / GROUP_KEPT * GROUP_COLUMNS % 8 != 0) slabs++;
    return slabs;
}

constexpr int LANE_SLABS = lane_slabs();
constexpr int LANE_COLUMNS = 16 * LANE_SLABS / GROUP_KEPT * GROUP_COLUMNS;
constexpr int LANE_WINDOWS = 8 * LANE_SLABS;
constexpr int STEPS = LANE_COLUMNS / 8;  // instructions of a round, each of 32 columns: a quarter of a slab of X
constexpr int W_BYTES = TILE_BLOCKS * SPARSE_BYTES;

static_assert(ROW_BLOCKS == 1 && META_WORDS == 2, "a warpgroup spreads one row block of 8-bit weights");
static_assert(STAGES >= LANE_SLABS && X_STAGES >= 3, "a round must fit; two slabs of X are in use while a third is awaited");

struct Ring {
    static constexpr int TOTAL_BYTES = X_STAGES * X_BYTES + STAGES * W_BYTES;
    static constexpr int BARRIER_BYTES = 2 * (X_STAGES + STAGES) * 8;
    using X = RingOf<X_STAGES, X_BYTES>;
    using W = RingOf<STAGES, W_BYTES>;
    X x;
    W w;
    __device__ __forceinline__ Ring(u32 memory, u32 barriers)
        : x(memory, barriers), w(memory + X::TOTAL_BYTES, barriers + X::BARRIER_BYTES) {}
    __device__ __forceinline__ void make_barriers() const { x.make_barriers(), w.make_barriers(); }
};

// The rounds of a tile that a block multiplies: [first, end).
struct Range {
    int first, end;
    __device__ __forceinline__ bool empty() const { return first == end; }
};

__device__ __forceinline__ Range range_of(const Arguments& p, int rank) {
    const int rounds = p.sparse_slabs / LANE_SLABS;
    return {rounds * rank / SPLIT, rounds * (rank + 1) / SPLIT};
}

// ---- producer --------------------------------------------------------------------------------------------------------

struct Producer {
    const Arguments& p;
    const Ring& ring;
    const Range range;
    const Tiles tiles;

    __device__ __forceinline__ Producer(const Arguments& p, const Ring& ring, int rank)
        : p(p), ring(ring), range(range_of(p, rank)), tiles(p) {}

    __device__ __forceinline__ int first_tile() const { return blockIdx.x / SPLIT; }
    __device__ __forceinline__ int early_end() const { return min(range.first + STAGES / LANE_SLABS, range.end); }

    // Load the weights of the first rounds, as many as the ring holds.
    __device__ __forceinline__ void load_early() const {
        Ring::W::Place w;
        int row_tile, token_tile;
        tiles.locate(first_tile(), row_tile, token_tile);
        for (int round = range.first; round < early_end(); round++) load_weights(w, row_tile, round);
    }

    // Load everything else, in the order in which it is used.
    __device__ __forceinline__ void load_rest() const {
        Ring::W::Place w;
        Ring::X::Place x;
        for (int slab = (early_end() - range.first) * LANE_SLABS; slab > 0; slab--) w.next();
        int loaded = early_end();
        for (int tile = first_tile(); tile < tiles.count(); tile += gridDim.x / SPLIT, loaded = range.first) {
            int row_tile, token_tile;
            tiles.locate(tile, row_tile, token_tile);
            int slab = range.first * STEPS / 4;
#pragma unroll 1
            for (int round = range.first; round < range.end; round++) {
                if (round >= loaded) load_weights(w, row_tile, round);
#pragma unroll 1
                for (; slab * 4 < (round + 1) * STEPS; slab++) load_slab(x, token_tile * TOKENS, slab);
            }
        }
    }

    __device__ __forceinline__ void load_weights(Ring::W::Place& place, int row_tile, int round) const {
#pragma unroll 1
        for (int i = 0; i < LANE_SLABS; i++, place.next()) {
            barrier_wait(ring.w.empty_of(place), place.phase ^ 1);
            barrier_expect(ring.w.full_of(place), W_BYTES);
            copy(ring.w.stage(place),
                 weights_at(p.sparse, row_tile * TILE_BLOCKS, p.sparse_slabs, round * LANE_SLABS + i, SPARSE_BYTES), W_BYTES,
                 ring.w.full_of(place));
        }
    }

    __device__ __forceinline__ void load_slab(Ring::X::Place& place, int token, int slab) const {
        const int rows = ceil_div(p.tokens, 8) * 8, bytes = min(TOKENS, rows - token) * SLAB;
        barrier_wait(ring.x.empty_of(place), place.phase ^ 1);
        barrier_expect(ring.x.full_of(place), bytes);
        copy(ring.x.stage(place), p.x + ((i64)slab * rows + token) * SLAB, bytes, ring.x.full_of(place));
        place.next();
    }
};

// ---- spreading -------------------------------------------------------------------------------------------------------

// A byte for each of four selectors of the low half of `selectors`: 0 to 3 of `low`, 4 to 7 of `high`.
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selectors) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

// What a lane holds of a round, for the rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Held {
    u32 values[LANE_SLABS][2][4];  // 16 kept values a slab
    u32 metadata[LANE_SLABS][2];   // the nibbles of their 8 windows

    // The selectors that spread windows 2 i and 2 i + 1 of a slab out of the register that holds the values of both; the
    // second ones are in the high half. A legal nibble n (4, 8, 9, C, D, E) has (n ^ n >> 1) % 8 to itself, so a byte
    // permutation looks up four windows at once: for the columns 0 and 1 of each, then for 2 and 3, the number of the kept
    // value (0 or 1) or 4, which selects a zero.
    __device__ __forceinline__ u32 selectors(int slab, int row, int i) const {
        const u32 m = metadata[slab][row], keys = ((m ^ m >> 1) & 0x77777777) >> (i / 2 * 16);
        const u32 left = permute(0x04404444, 0x44100440, keys), right = permute(0x14141044, 0x44444141, keys);
        return permute(left, right, i % 2 == 0 ? 0x5140 : 0x7362) ^ 0x22220000;  // the second window's values are 2 and 3
    }

    // The four columns of a window.
    __device__ __forceinline__ u32 window(int row, int w) const {
        const u32 both = selectors(w / 8, row, w % 8 / 2);
        return permute(values[w / 8][row][w % 8 / 2], 0, w % 2 == 0 ? both : both >> 16);
    }

    // Columns 4 i ... 4 i + 3 of the lane's LANE_COLUMNS.
    __device__ __forceinline__ u32 columns(int row, int i) const {
        u32 bytes = 0;
#pragma unroll
        for (int w = 0; w < LANE_WINDOWS; w++) {
            const int first = w / WINDOWS * GROUP_COLUMNS + w % WINDOWS * 2 - 4 * i;
            if (first == 0) bytes += window(row, w);
            if (first == 2) bytes += window(row, w) << 16;
            if (first == -2) bytes += window(row, w) >> 16;
        }
        return bytes;
    }
};

// ---- consumer --------------------------------------------------------------------------------------------------------

// An instruction in flight still reads these registers: the compiler must not use them for anything else before this.
__device__ __forceinline__ void keep(u32* a) { asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])); }

struct Consumer {
    const Ring& ring;
    const int warpgroup, lane_zero;
    Ring::W::Place weights;                // of the next round
    Ring::X::Place activations, oldest;    // of the next instruction; the oldest slab not yet given back

    // Read a round of weights, and give its stages back. A lane's chunks of 16 bytes follow each other over the stages.
    __device__ __forceinline__ void read(Held& held) {
        const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
        Ring::W::Place place = weights;
#pragma unroll
        for (int i = 0; i < LANE_SLABS; i++, place.next()) barrier_wait(ring.w.full_of(place), place.phase);
#pragma unroll
        for (int i = 0; i < LANE_SLABS; i++) {
            const int chunk = lane % 4 * LANE_SLABS + i, within = chunk % 4;
            int stage = weights.stage + chunk / 4;
            if (LANE_SLABS > 1 && stage >= STAGES) stage -= STAGES;
            const u32 block = ring.w.stages + stage * W_BYTES + warpgroup * SPARSE_BYTES;
            const u32 values = block + row * HALF + (within ^ row / 2 % 4) * 16;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                u32* v = held.values[i][r];
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(values + r * 8 * HALF) : "memory");
            }
            const u32 nibbles = block + VALUE_BYTES + within / 2 * 512 + thread / 32 * 128 + lane / 4 * 16 + within % 2 * 8;
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                         : "=r"(held.metadata[i][0]), "=r"(held.metadata[i][1]) : "r"(nibbles) : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < LANE_SLABS; i++, weights.next())
            if (lane_zero) barrier_arrive(ring.w.empty_of(weights));
    }

    __device__ __forceinline__ void release() {
        if (lane_zero) barrier_arrive(ring.x.empty_of(oldest));
        oldest.next();
    }

    // Compute W X^T of one tile over a range of rounds into d. One instruction is in flight while the weights of the next one
    // are spread; what it reads is not written again before it has been waited for.
    __device__ __forceinline__ void multiply(const Range& range, acc_t (*d)[TOKENS / 2]) {
        int quarter = range.first * STEPS % 4;  // of the slab of X
        // The instruction in flight has registers of its own; a round's last one and the next round's first one are neighbours.
        u32 a[3][4] = {};
        auto of = [](int i) { return STEPS % 2 == 1 && (i + STEPS) % STEPS == STEPS - 1 ? 2 : (i + STEPS) % STEPS % 2; };
#pragma unroll 1
        for (int round = range.first; round < range.end; round++) {
            Held held;
            read(held);
            if (STEPS < 8) mma_wait<0>();  // else the compiler waits after each instruction of such a short round
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                u32* own = a[of(i)];
#pragma unroll
                for (int r = 0; r < 2; r++) own[r] = held.columns(r, 2 * i), own[2 + r] = held.columns(r, 2 * i + 1);
                const bool first = i == 0 && round == range.first, fresh = first || quarter == 0;
                if (fresh) barrier_wait(ring.x.full_of(activations), activations.phase);
                keep(own);
                mma_fence();
                mma_dense_held(d[0], own, describe(ring.x.stage(activations) + quarter * 32, SLAB), !first);
                mma_commit();
                mma_wait<1>();
                keep(a[of(i - 1)]);
                if (fresh && !first) release();
                quarter = (quarter + 1) % 4;
                if (quarter == 0) activations.next();
            }
        }
        mma_wait<0>();
        keep(a[of(-1)]);
        release();
        if (quarter != 0) activations.next();
    }
};
