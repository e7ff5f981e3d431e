// Y[token, channel] = scale_x[token] * (scale_w[channel] * (W X^T)[channel, token]) + bias[channel]   on Hopper (sm_90a)
//
// W has a dense segment and a 2:4 segment along K (either may be empty), and X is lifted to match. Both segments run in one
// launch into one accumulator. wgmma takes 2:4 weights as its A operand only, so the weights are A (64 rows an instruction)
// and the tokens are B.
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
// Along K a tile is a sequence of *steps* of 128 bytes of an X row (a *slab*), or of half a slab where the weight is dense,
// since a dense weight has twice the bytes:
//
//     2:4 step     64 x 64 bytes of kept values and their metadata a row block; TOKENS x 128 bytes of X
//     dense steps  64 x 64 bytes of weights a row block; X once for the two of them
//
// FIELD > 0: the 2:4 steps come in bundles of `windows` slabs, and step j has window j of 32 groups. What would be metadata
// are two counts of FIELD bits a group, once a bundle; they have a ring of their own, of SLOTS slots (see "metadata"):
//
//     bundle       FIELD words a thread and row block | step 0: values | step 1: values | ... | step windows - 1: values
//
// WIDTH = 6: kept values of an INT8 weight that are all multiples of 4 have six bits in memory. A thread loads those that it
// gives to wgmma, which takes A from registers then, and makes eight bits of each (see "values of six bits"). Metadata come with
// them, or as FIELD says.
//
// Every operand lies in memory in the order that shared memory needs (gemm/hopper/weights.py), so a step is two 1-D bulk
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
// With few tokens there are fewer tiles than multiprocessors. Then the SPLIT blocks of a cluster share the steps of a tile
// and add their sums through distributed shared memory; each block completes and stores a share of the tile's tokens. The sums
// of a tile of 256 channels need the memory of the ring, so its blocks wait until all of them have read theirs.
//
// A product may be launched in two bands, each of neighbouring channels and with its own tiles (gemm/hopper/tiles.py): the first
// fills every multiprocessor some times over, and the second, of smaller tiles, takes each one that the first leaves.
//
// GROUPED is for mixtures of experts: each token tile belongs to one expert, whose weights, scales and bias follow those of
// the expert before it. Which expert, and how many tiles have work, only the device knows; the other blocks leave at once.
//
// The compiler's options (gemm/hopper/compile.py) define TYPE_S8 / E4M3 / BF16 / F16, OUT_BF16 / F16 / F32, TOKENS,
// WARPGROUPS, ROW_BLOCKS, STAGES, SPLIT, BLOCKS (of a multiprocessor), GROUPED, FIELD and WIDTH. Since a preprocessor cannot count,
// they define the accumulator operands of wgmma, too: ACC_NAMES is the string "%0, %1, ..." of TOKENS / 2 registers, ACC(d) the
// constraints "+r"(d[0]), ..., and OPERAND(n) the string of the n-th operand after them (options define OPERAND_0 ... OPERAND_7).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- types -----------------------------------------------------------------------------------------------------------

#if defined(TYPE_S8)
typedef int acc_t;
#define MMA_TYPES "s32.s8.s8"
#define MMA_TAIL ""
#elif defined(TYPE_E4M3)
typedef float acc_t;
#define MMA_TYPES "f32.e4m3.e4m3"
#define MMA_TAIL ", 1, 1"
#elif defined(TYPE_BF16)
typedef float acc_t;
#define MMA_TYPES "f32.bf16.bf16"
#define MMA_TAIL ", 1, 1, 0, 0"
#elif defined(TYPE_F16)
typedef float acc_t;
#define MMA_TYPES "f32.f16.f16"
#define MMA_TAIL ", 1, 1, 0, 0"
#endif

#if defined(TYPE_S8) || defined(TYPE_E4M3)
#define K_SPARSE "k64"
#define K_DENSE "k32"
constexpr int META_WORDS = 2;  // metadata registers of a thread a step: one for each of its two instructions
#else
#define K_SPARSE "k32"
#define K_DENSE "k16"
constexpr int META_WORDS = 1;  // the two instructions of a step share one and select their half of the lanes
#endif

#define OPERAND(n) OPERAND_##n
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

#if defined(OUT_F32)
typedef float out_t;
#else
typedef u16 out_t;
#endif

// ---- geometry --------------------------------------------------------------------------------------------------------

constexpr int ROWS = 64;                    // channels of a row block: the M of wgmma
constexpr int SLAB = 128;                   // bytes of an X row in a slab
constexpr int HALF = 64;                    // bytes of a weight row in a step
constexpr int W_TILE = 4;                   // row blocks that are contiguous in memory, step by step
constexpr int TILE_BLOCKS = WARPGROUPS * ROW_BLOCKS;
constexpr int X_BYTES = TOKENS * SLAB;
constexpr int VALUE_BYTES = ROWS * HALF;
constexpr int META_BYTES = FIELD == 0 ? META_WORDS * 512 : 0;
constexpr int SPARSE_BYTES = VALUE_BYTES / 8 * WIDTH + META_BYTES;  // of a row block in a 2:4 step; in a dense step VALUE_BYTES
constexpr int WEIGHT_BYTES = SPARSE_BYTES > VALUE_BYTES ? SPARSE_BYTES : VALUE_BYTES;
constexpr int STAGE_BYTES = (X_BYTES + TILE_BLOCKS * WEIGHT_BYTES + 1023) / 1024 * 1024;  // X's swizzle repeats after 1024

// A bundle's words have a slot from its first step on. It is filled again for the first step of the bundle SLOTS later, when
// consumers have given back the step STAGES before that. The old bundle's last step is (SLOTS - 1) * windows + 1 >= STAGES
// steps before it, or more where dense steps lie between, so they have read its words. SLOTS is for the fewest windows.
constexpr int COUNT_BYTES = FIELD * 512;                  // of a row block in a bundle
constexpr int SLOT_BYTES = TILE_BLOCKS * COUNT_BYTES;
constexpr int FEWEST_WINDOWS = FIELD == 3 ? 2 : 4;
constexpr int SLOTS = FIELD == 0 ? 0 : 1 + (STAGES - 1 + FEWEST_WINDOWS - 1) / FEWEST_WINDOWS;

// Tokens that a block completes and stores: the fewest, in multiples of 16, that make at most one share a block.
__host__ __device__ constexpr int share_of(int tokens, int split) {
    int share = 16;
    while (tokens % share != 0 || tokens / share > split) share += 16;
    return share;
}

constexpr int SHARE = share_of(TOKENS, SPLIT);
constexpr int CHANNELS = ROW_BLOCKS * ROWS;               // channels of a warpgroup
constexpr int PIECE = 32;                                 // tokens that a warpgroup transposes at a time
constexpr int ROW_BYTES = CHANNELS * 2;
constexpr int PIECE_BYTES = PIECE * ROW_BYTES;
constexpr int FACTOR_BYTES = (SHARE + 2 * CHANNELS) * 4;  // token scales, channel scales and bias of a block's share
constexpr int RESULT_BYTES = PIECE_BYTES + FACTOR_BYTES;
constexpr int SUM_BYTES = TILE_BLOCKS * ROWS * SHARE * 4;  // the sums that one block gives another
constexpr int EXCHANGE_BYTES = (SPLIT - 1) * SUM_BYTES;
constexpr bool SUMS_IN_RING = SPLIT > 1 && TILE_BLOCKS == W_TILE;  // shared memory does not hold both
constexpr int APART_BYTES = SUMS_IN_RING ? 0 : EXCHANGE_BYTES;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int PRODUCER_REGISTERS = FIELD > 0 && SPLIT > 1 ? 40 : 24;  // with 24 that one spills
constexpr int LAUNCH_REGISTERS = 65536 / (BLOCKS * THREADS) / 8 * 8;
constexpr int LEFT_REGISTERS = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * 128) / (128 * WARPGROUPS) / 8 * 8;
constexpr int CONSUMER_REGISTERS = LEFT_REGISTERS < 240 ? LEFT_REGISTERS : 240;

static_assert(TOKENS % 16 == 0 && W_TILE % TILE_BLOCKS == 0, "tokens go in sixteens, and the weights of a tile are contiguous");
static_assert(X_BYTES % 512 == 0 && SPARSE_BYTES % 512 == 0, "the swizzle of weights repeats every 512 bytes");
static_assert(STAGES >= 3, "a dense slab holds two stages while the next step is awaited");
static_assert(FIELD == 0 || (META_WORDS == 2 && (FIELD == 3 || FIELD == 4)), "counts of groups of 6 to 16 columns, 8-bit types");
#if WIDTH == 6
#if !defined(TYPE_S8)
#error "values of six bits are INT8"
#endif
#endif
static_assert(!SUMS_IN_RING || EXCHANGE_BYTES <= STAGES * STAGE_BYTES, "the ring holds the sums");
static_assert(!GROUPED || SPLIT == 1, "the blocks of a cluster must all have work, or none");

struct Arguments {
    const u8* x;          // [slabs][tokens padded to 8][SLAB], 128-byte swizzle
    const u8* dense;      // [row tiles][2 * dense slabs][W_TILE][64][HALF], 64-byte swizzle
    const u8* sparse;     // [row tiles][sparse slabs][W_TILE]{[64][HALF] values, 64-byte swizzle; metadata}
                          // WIDTH = 6: [row tiles][sparse slabs][W_TILE][2 instructions][128 threads]{3 words of values; metadata}
                          // FIELD > 0: [row tiles][bundles]{[W_TILE][FIELD][128] words; [windows][W_TILE][64][HALF] values}
                          // both: values [2 instructions]{[128 threads][2 words]; [128 threads][word]}
    const float* scale_x; // [tokens] or null
    const float* scale_w; // [channels] or null
    const void* bias;     // [channels] of bias_type
    out_t* y;             // [tokens, row]
    int tokens;
    int channels;
    int dense_slabs;
    int sparse_slabs;
    int bias_type;        // 0 none, 1 float32, 2 bfloat16, 3 float16
    int group;            // row tiles that neighbouring tiles cycle through, so that they share them in L2
    const int* experts;   // GROUPED: [token tiles] the expert of each
    const int* used;      // GROUPED: [1] token tiles with work, the first ones
    int windows;          // FIELD > 0: slabs of a bundle
    int row;              // channels of a row of y: with two bands, those of both
    int band;             // WHOLE, LEADING or FOLLOWING
};

enum Band { WHOLE, LEADING, FOLLOWING };

// ---- barriers and copies ---------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(bar), "r"(phase) : "memory");
}

// As barrier_wait, but also acquires what other blocks of the cluster have written.
__device__ __forceinline__ void barrier_wait_cluster(u32 bar, u32 phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(bar), "r"(phase) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const u8* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar) : "memory");
}

// A place in the ring: a stage, and the parity of its current use.
struct Place {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
};

// A place among the bundles (FIELD > 0): a slot, and the window of its groups that the next step has.
struct Bundle {
    int window;
    u32 slot = 0;
    __device__ __forceinline__ explicit Bundle(int first_step, int windows)
        : window(FIELD > 0 && SPLIT > 1 ? first_step % windows : 0) {}
    // Go to the next step; whether it is in another bundle.
    __device__ __forceinline__ bool next(int windows) {
        if (++window < windows) return false;
        window = 0;
        if (++slot == SLOTS) slot = 0;
        return true;
    }
};

struct Ring {
    u32 stages, full, empty, slots;  // shared addresses
    __device__ __forceinline__ u32 stage(const Place& p) const { return stages + p.stage * STAGE_BYTES; }
    __device__ __forceinline__ u32 full_of(const Place& p) const { return full + p.stage * 8; }
    __device__ __forceinline__ u32 empty_of(const Place& p) const { return empty + p.stage * 8; }
    __device__ __forceinline__ u32 slot(const Bundle& b) const { return slots + b.slot * SLOT_BYTES; }
};

// ---- tiles -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Tiles {
    int row_tiles, token_tiles, group;
    __device__ __forceinline__ explicit Tiles(const Arguments& p)
        : row_tiles(ceil_div(p.channels, TILE_BLOCKS * ROWS)),
          token_tiles(GROUPED ? __ldcg(p.used) : ceil_div(p.tokens, TOKENS)), group(p.group) {}
    __device__ __forceinline__ int count() const { return row_tiles * token_tiles; }
    // Tiles are numbered group by group of `group` row tiles; within a group, token tile by token tile.
    __device__ __forceinline__ void locate(int tile, int& row_tile, int& token_tile) const {
        int first = tile / (group * token_tiles) * group;
        int height = min(group, row_tiles - first);
        int within = tile - first * token_tiles;
        row_tile = first + within % height;
        token_tile = within / height;
    }
};

__device__ __forceinline__ int expert_of(const Arguments& p, int token_tile) {
    return GROUPED ? __ldcg(p.experts + token_tile) : 0;
}

// The first row block of an expert, whose weights are padded to whole row tiles.
__device__ __forceinline__ int first_block(const Arguments& p, int expert) {
    return GROUPED ? expert * ceil_div(p.channels, W_TILE * ROWS) * W_TILE : 0;
}

// The slabs of a tile that a block multiplies: [dense, dense_end) and [sparse, sparse_end).
struct Range {
    int dense, dense_end, sparse, sparse_end;
    __device__ __forceinline__ bool empty() const { return dense == dense_end && sparse == sparse_end; }
};

// Cut the steps into SPLIT equal parts, except that none ends within a dense slab, whose X serves two steps.
__device__ __forceinline__ Range range_of(const Arguments& p, int rank) {
    if (SPLIT == 1) return {0, p.dense_slabs, 0, p.sparse_slabs};
    const int dense = 2 * p.dense_slabs, steps = dense + p.sparse_slabs;
    auto bound = [&](int part) {
        const int step = steps * part / SPLIT;
        return step < dense ? step / 2 * 2 : step;
    };
    const int first = bound(rank), end = bound(rank + 1);
    return {min(first, dense) / 2, min(end, dense) / 2, max(first - dense, 0), max(end - dense, 0)};
}

// ---- producer --------------------------------------------------------------------------------------------------------

// The address of row block `block` of a step: W_TILE row blocks are contiguous, step by step.
__device__ __forceinline__ const u8* weights_at(const u8* weights, int block, int steps, int step, int bytes) {
    return weights + ((i64)(block / W_TILE * steps + step) * W_TILE + block % W_TILE) * bytes;
}

// With bundles, the address of row block `block` of a step: before the W_TILE row blocks of a bundle's steps stand their words.
__device__ __forceinline__ const u8* values_at(const Arguments& p, int block, int step) {
    const i64 words = (i64)(block / W_TILE) * (p.sparse_slabs / p.windows) + step / p.windows + 1;
    return weights_at(p.sparse, block, p.sparse_slabs, step, SPARSE_BYTES) + words * (W_TILE * COUNT_BYTES);
}

// The address of the words of a row block, from that of its step with this window.
__device__ __forceinline__ const u8* words_before(const u8* values, int block, int window) {
    return values - (W_TILE - block % W_TILE) * COUNT_BYTES - (window * W_TILE + block % W_TILE) * SPARSE_BYTES;
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
        Bundle bundle(range.sparse, p.windows);
        load<WEIGHTS>(place, bundle, first_tile(), 0, early_steps());
    }

    // Load everything else.
    __device__ __forceinline__ void load_rest() const {
        if (GROUPED && first_tile() >= tiles.count()) return;
        Place place;
        Bundle bundle(range.sparse, p.windows);
        load<ACTIVATIONS>(place, bundle, first_tile(), 0, early_steps());
        int from = early_steps();
        for (int tile = first_tile(); tile < tiles.count(); tile += gridDim.x / SPLIT, from = 0)
            load<WEIGHTS | ACTIVATIONS>(place, bundle, tile, from, steps());
    }

    // Load steps [from, to) of a tile. Loading the weights also sets the number of bytes that the step waits for.
    template <int OPERANDS>
    __device__ __forceinline__ void load(Place& place, Bundle& bundle, int tile, int from, int to) const {
        int row_tile, token_tile;
        tiles.locate(tile, row_tile, token_tile);
        const int rows = ceil_div(p.tokens, 8) * 8, token = token_tile * TOKENS;
        const int block = first_block(p, expert_of(p, token_tile)) + row_tile * TILE_BLOCKS;
        const int x_bytes = min(TOKENS, rows - token) * SLAB;  // no result of the stage's bytes past them is stored
        auto copy_x = [&](int slab) {
            copy(ring.stage(place), p.x + ((i64)slab * rows + token) * SLAB, x_bytes, ring.full_of(place));
        };
        const int dense_end = min(2 * range.dense + to, 2 * range.dense_end);
#pragma unroll 1
        for (int step = 2 * range.dense + from; step < dense_end; step++, place.next()) {
            const bool first_half = step % 2 == 0;
            if (OPERANDS & WEIGHTS) {
                barrier_wait(ring.empty_of(place), place.phase ^ 1);
                barrier_expect(ring.full_of(place), (first_half ? x_bytes : 0) + TILE_BLOCKS * VALUE_BYTES);
            }
            if (OPERANDS & ACTIVATIONS && first_half) copy_x(step / 2);
            if (OPERANDS & WEIGHTS)
                copy(ring.stage(place) + X_BYTES, weights_at(p.dense, block, 2 * p.dense_slabs, step, VALUE_BYTES),
                     TILE_BLOCKS * VALUE_BYTES, ring.full_of(place));
        }
        const int sparse_end = range.sparse + to - dense_steps();
#if FIELD == 0
#pragma unroll 1
        for (int step = range.sparse + max(from - dense_steps(), 0); step < sparse_end; step++, place.next()) {
            if (OPERANDS & WEIGHTS) {
                barrier_wait(ring.empty_of(place), place.phase ^ 1);
                barrier_expect(ring.full_of(place), x_bytes + TILE_BLOCKS * SPARSE_BYTES);
            }
            if (OPERANDS & ACTIVATIONS) copy_x(p.dense_slabs + step);
            if (OPERANDS & WEIGHTS)
                copy(ring.stage(place) + X_BYTES, weights_at(p.sparse, block, p.sparse_slabs, step, SPARSE_BYTES),
                     TILE_BLOCKS * SPARSE_BYTES, ring.full_of(place));
        }
#else
        int step = range.sparse + max(from - dense_steps(), 0);
        const u8* values = values_at(p, block, step);
        bool words = step == range.sparse || bundle.window == 0;  // those of a bundle come with its first step here
#pragma unroll 1
        for (; step < sparse_end; step++, place.next()) {
            if (OPERANDS & WEIGHTS) {
                barrier_wait(ring.empty_of(place), place.phase ^ 1);
                barrier_expect(ring.full_of(place), x_bytes + TILE_BLOCKS * SPARSE_BYTES + (words ? SLOT_BYTES : 0));
                if (words)
                    copy(ring.slot(bundle), words_before(values, block, bundle.window), SLOT_BYTES, ring.full_of(place));
            }
            if (OPERANDS & ACTIVATIONS) copy_x(p.dense_slabs + step);
            if (OPERANDS & WEIGHTS)
                copy(ring.stage(place) + X_BYTES, values, TILE_BLOCKS * SPARSE_BYTES, ring.full_of(place));
            words = bundle.next(p.windows);
            values += W_TILE * (SPARSE_BYTES + (words ? COUNT_BYTES : 0));
        }
#endif
    }
};

// ---- matrix instructions ---------------------------------------------------------------------------------------------

// Matrix descriptors (PTX ISA, "Matrix Descriptor Format"): rows of 128 or 64 bytes, swizzled over their whole length,
// groups of 8 rows one after another.
__device__ __forceinline__ u64 describe(u32 address, u32 row_bytes) {
    const u64 swizzle = row_bytes == 128 ? 1 : 2;
    return (u64)((address >> 4) & 0x3FFF) | 1ull << 16 | (u64)(8 * row_bytes >> 4) << 32 | swizzle << 62;
}

// SELECTOR: the half of the lanes that holds the metadata (for 16-bit types; 0 for 8-bit ones, where all lanes do).
template <int SELECTOR>
__device__ __forceinline__ void mma_sparse(acc_t* d, u64 a, u64 b, u32 meta, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, " OPERAND(3) ", 0;\n"
        "wgmma.mma_async.sp.sync.aligned.m64n" TEXT(TOKENS) K_SPARSE "." MMA_TYPES " {" ACC_NAMES "}, " OPERAND(0) ", "
        OPERAND(1) ", " OPERAND(2) ", " OPERAND(4) ", p" MMA_TAIL "; }"
        : ACC(d) : "l"(a), "l"(b), "r"(meta), "r"(accumulate), "n"(SELECTOR));
}

#if WIDTH == 6
// The same with the kept values in registers. They must not be written before the instruction has ended.
__device__ __forceinline__ void mma_sparse(acc_t* d, const u32* a, u64 b, u32 meta, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, " OPERAND(6) ", 0;\n"
        "wgmma.mma_async.sp.sync.aligned.m64n" TEXT(TOKENS) K_SPARSE "." MMA_TYPES " {" ACC_NAMES "}, {" OPERAND(0) ", "
        OPERAND(1) ", " OPERAND(2) ", " OPERAND(3) "}, " OPERAND(4) ", " OPERAND(5) ", " OPERAND(7) ", p" MMA_TAIL "; }"
        : ACC(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(meta), "r"(accumulate), "n"(0));
}
#endif

__device__ __forceinline__ void mma_dense(acc_t* d, u64 a, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, " OPERAND(2) ", 0;\n"
        "wgmma.mma_async.sync.aligned.m64n" TEXT(TOKENS) K_DENSE "." MMA_TYPES " {" ACC_NAMES "}, " OPERAND(0) ", "
        OPERAND(1) ", p" MMA_TAIL "; }"
        : ACC(d) : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// ---- metadata --------------------------------------------------------------------------------------------------------

#if FIELD > 0
// A logical operation of three words, bit by bit; TABLE is its value for a = 0xF0, b = 0xCC, c = 0xAA. The compiler would
// take two instructions for those below.
template <int TABLE>
__device__ __forceinline__ u32 logic(u32 a, u32 b, u32 c) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
    return result;
}

// Numbers that are compared bit by bit, from the lowest up: whether x is at most k, by their bit and those before. It is
// ~x & k | ~(x ^ k) & before.
__device__ __forceinline__ u32 at_most(u32 x, u32 k, u32 before) { return logic<0x8E>(x, k, before); }

// mask & a | ~mask & b.
__device__ __forceinline__ u32 select(u32 mask, u32 a, u32 b) { return logic<0xCA>(mask, a, b); }

// Of a group with kept entries 0 .. 2 * windows - 1 two positions are left out: before the first one stand a kept entries,
// before the second b, a <= b. Kept entry k stands at position k + s, where s of the two counts are at most k. In window
// j = k / 2, which shows positions 2j .. 2j + 3, that is index k % 2 + s. So a window's metadata are s of entry 2j, and 1 + s
// of entry 2j + 1.
//
// A thread needs those of 16 groups at once: of 0 .. 7 in its first register, four bits each, and of 8 .. 15 in its second.
// Word f has bit f of all their counts, so one instruction a word compares all 32 of them with k:
//
//     bit      0      1      2      3    |   4      5      6      7    |        |  28 ... 31
//            a of 0 b of 0 a of 8 b of 8 | a of 1 b of 1 a of 9 b of 9 |  ...   |  7 and 15
__device__ __forceinline__ void metadata_of(const u32* words, int window, u32* meta) {
    constexpr u32 LOW = 0x55555555, FIRST = 0x33333333;
    u32 even = ~words[0], odd = ~0u;  // which counts are at most 2 * window, and which at most 2 * window + 1
#pragma unroll
    for (int f = 1; f < FIELD; f++) {
        const u32 k = 0 - (window >> (f - 1) & 1);  // bit f of both numbers, for all counts
        even = at_most(words[f], k, even);
        odd = at_most(words[f], k, odd);
    }
    // Now two bits have (b <= k, a <= k): 11 for s = 2, 01 for 1, and never 10.
    even ^= even >> 1 & LOW;
    odd = (odd ^ (odd >> 1 & LOW)) + LOW;
    meta[0] = select(FIRST, even, odd << 2);
    meta[1] = select(FIRST, even >> 2, odd);
}
#endif

// ---- values of six bits ----------------------------------------------------------------------------------------------

#if WIDTH == 6
// What a thread gives to one instruction: the kept values of its rows lane / 4 and lane / 4 + 8, four a register (PTX ISA,
// "Register Fragments for sparse wgmma.mma_async.m64nNk64"), and metadata. In memory these are four words. Byte i of the four
// registers has its upper four bits in the nibbles of byte i of the first two words, and the next two in byte i of the third:
//
//     byte of    word 0: register 0 | register 1    word 1: register 2 | register 3    word 2: of registers 3 | 2 | 0 | 1
//     its bits           7654       | 3210                  7654       | 3210                              76  54  32  10
//
// The lowest two bits of every value are zeros. With counts in place of metadata the third words lie apart: a warp loads words
// that are neighbours, or 16 bytes a thread.
struct Words {
    u32 high0, high1, low, meta;
    __device__ __forceinline__ void load(u32 instruction) {
        const u32 thread = threadIdx.x % 128;
#if FIELD == 0
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(high0), "=r"(high1), "=r"(low), "=r"(meta)
                     : "r"(instruction + thread * 16));
#else
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(high0), "=r"(high1) : "r"(instruction + thread * 8));
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(low) : "r"(instruction + 1024 + thread * 4));
#endif
    }
};

struct Fragment {
    u32 values[4], meta;

    __device__ __forceinline__ void take(const Words& from) {
        values[0] = join(from.high0, from.low);
        values[1] = join(from.high0 << 4, from.low << 2);
        values[2] = join(from.high1, from.low >> 2);
        values[3] = join(from.high1 << 4, from.low >> 4);
        meta = from.meta;
        asm volatile("" : "+r"(values[0]), "+r"(values[1]), "+r"(values[2]), "+r"(values[3]), "+r"(meta));  // now, not later
    }

    __device__ __forceinline__ static u32 join(u32 high, u32 low) { return high & 0xF0F0F0F0 | low & 0x0C0C0C0C; }
};
#endif

// ---- consumer --------------------------------------------------------------------------------------------------------

#if WIDTH == 6
// Groups in flight while values are made, and instructions of a step whose words are loaded at once: as many as registers
// allow. With more of either the compiler would let each instruction of the largest tiles wait for the one before.
constexpr int SUMS = ROW_BLOCKS * (TOKENS / 2) + (GROUPED ? 16 : 0);  // registers, and some for the expert
constexpr int IN_FLIGHT = SUMS <= 176 ? 2 : 1;
constexpr int AHEAD = SUMS <= 160 ? 2 * ROW_BLOCKS : SUMS == 192 ? 2 : 1;
#endif

struct Consumer {
    const Ring& ring;
    const int warpgroup, lane_zero, windows;
    Bundle bundle;        // of the next step to multiply
    Place place, oldest;  // the next step to multiply; the oldest stage not yet given back

    __device__ __forceinline__ u32 weights(u32 stage, int block_bytes) const {
        return stage + X_BYTES + warpgroup * ROW_BLOCKS * block_bytes;
    }

    __device__ __forceinline__ void release() {
        if (lane_zero) barrier_arrive(ring.empty_of(oldest));
        oldest.next();
    }

    // What a thread holds of a 2:4 step.
#if WIDTH == 6
    using Held = Fragment[2][ROW_BLOCKS];
#else
    using Held = u32[ROW_BLOCKS][META_WORDS];
#endif

#if WIDTH == 8 && FIELD == 0
    // Load the metadata registers of a step whose weights are at `w`.
    __device__ __forceinline__ void load_metadata(u32 w, Held& meta) const {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int i = 0; i < META_WORDS; i++)
                asm volatile("ld.shared.b32 %0, [%1];" : "=r"(meta[j][i])
                             : "r"(w + j * SPARSE_BYTES + VALUE_BYTES + i * 512 + (threadIdx.x % 128) * 4));
    }
#elif FIELD > 0
    // Make the metadata registers of the next step from the words of its bundle. They came with the bundle's first step, so
    // only that one has to be waited for.
    __device__ __forceinline__ void make_metadata(u32 (*meta)[META_WORDS]) {
        const u32 own = ring.slot(bundle) + warpgroup * ROW_BLOCKS * COUNT_BYTES + (threadIdx.x % 128) * 4;
        if (bundle.window == 0) barrier_wait(ring.full_of(place), place.phase);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++) {
            u32 words[FIELD];
#pragma unroll
            for (int f = 0; f < FIELD; f++)
                asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[f]) : "r"(own + (j * FIELD + f) * 512));
            metadata_of(words, bundle.window, meta[j]);
            asm volatile("" : "+r"(meta[j][0]), "+r"(meta[j][1]));  // now, while the group before multiplies
        }
        bundle.next(windows);
    }
#endif

    // Multiply one 2:4 step. `held` must not be written again before the group after this one has been waited for.
    __device__ __forceinline__ void sparse_step(acc_t (*d)[TOKENS / 2], Held& held, int accumulate) {
#if FIELD > 0 && WIDTH == 6
        u32 meta[ROW_BLOCKS][META_WORDS];
        make_metadata(meta);
#elif FIELD > 0
        make_metadata(held);
#endif
        barrier_wait(ring.full_of(place), place.phase);
        const u32 x = ring.stage(place), w = weights(x, SPARSE_BYTES);
#if WIDTH == 6
        // Each instruction is a group. While others multiply, the values of the next one are made of words loaded before.
        auto load = [&](Words& words, int q) {
            words.load(w + q % ROW_BLOCKS * SPARSE_BYTES + q / ROW_BLOCKS * (SPARSE_BYTES / 2));
        };
        Words words[AHEAD];
#pragma unroll
        for (int q = 0; q < AHEAD; q++) load(words[q], q);
#pragma unroll
        for (int q = 0; q < 2 * ROW_BLOCKS; q++) {
            const int i = q / ROW_BLOCKS, j = q % ROW_BLOCKS;
#if FIELD > 0
            words[q % AHEAD].meta = meta[j][i];
#endif
            held[i][j].take(words[q % AHEAD]);
            if (q + AHEAD < 2 * ROW_BLOCKS) load(words[q % AHEAD], q + AHEAD);
            mma_wait<IN_FLIGHT - 1>();
            mma_fence();
            mma_sparse(d[j], held[i][j].values, describe(x + i * 64, SLAB), held[i][j].meta, i > 0 || accumulate);
            mma_commit();
        }
        place.next();
#else
#if FIELD == 0
        load_metadata(w, held);
#endif
        mma_fence();
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
            mma_sparse<0>(d[j], describe(w + j * SPARSE_BYTES, HALF), describe(x, SLAB), held[j][0], accumulate);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
            mma_sparse<META_WORDS == 1>(d[j], describe(w + j * SPARSE_BYTES + 32, HALF), describe(x + 64, SLAB),
                                        held[j][META_WORDS - 1], 1);
        mma_commit();
        place.next();
        mma_wait<1>();
#endif
    }

    // Multiply half a slab of dense weights by the bytes at `x` of every X row.
    __device__ __forceinline__ void dense_step(acc_t (*d)[TOKENS / 2], u32 x, int accumulate) {
        barrier_wait(ring.full_of(place), place.phase);
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

    // Multiply a 2:4 step that may be the first of the range, or follow a dense slab.
    __device__ __forceinline__ void first_sparse_step(acc_t (*d)[TOKENS / 2], Held& held, int dense, int slab) {
        sparse_step(d, held, dense + slab > 0);
        if (dense + slab > 0) release();
        if (dense > 0 && slab == 0) release();
    }

    // Compute W X^T of one tile over a range of slabs into d. A stage is released when the group after its own is in flight,
    // except that the X of a dense slab serves two steps and is released with the second.
    __device__ __forceinline__ void multiply(const Range& range, acc_t (*d)[TOKENS / 2]) {
        const int dense = range.dense_end - range.dense, sparse = range.sparse_end - range.sparse;
        for (int slab = 0; slab < dense; slab++) {
            const u32 x = ring.stage(place);
            dense_step(d, x, slab > 0);
            if (slab > 0) release(), release();
            dense_step(d, x + HALF, 1);
        }
        // There are two sets of registers: a group in flight still reads its own.
        Held even, odd;
        if (FIELD > 0 && bundle.window > 0) barrier_wait(ring.full_of(place), place.phase);  // its words came with it
        int slab = 0;
        for (; slab + 1 < sparse; slab += 2) {
            first_sparse_step(d, even, dense, slab);
            sparse_step(d, odd, 1);
            release();
        }
        if (slab < sparse) first_sparse_step(d, even, dense, slab);
        mma_wait<0>();
        release();
        if (sparse == 0) release();
    }
};

// ---- exchange --------------------------------------------------------------------------------------------------------

#if SPLIT > 1
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// When every thread of every block of the cluster has arrived, all blocks have started and made their barriers. The fence
// after making them has released them; a release here would be a fence of the whole GPU. Threads that have exited count.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 in_block(u32 rank, u32 address) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Send four sums to another block's memory, whose barrier counts the bytes. The registers of wgmma are passed as they are: a
// conversion of their type would be an instruction that the compiler moves before the wait for them.
#if defined(TYPE_S8)
#define SUM "r"
#else
#define SUM "f"
#endif
__device__ __forceinline__ void send_four(u32 to, const acc_t* d, u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 SUM(d[0]), SUM(d[1]), SUM(d[2]), SUM(d[3]), "r"(bar) : "memory");
}

// Adds the sums of a cluster's blocks, each over its own steps. Every block keeps the share of the tile's tokens that it
// completes, and sends every other share to the block that completes that. A block adds to its own sums those of the others in
// the order of their ranks, with the same bits every time. It does so once in its life, so it never waits to send again.
struct Exchange {
    static constexpr int SHARES = TOKENS / SHARE;               // with few tokens, fewer than there are blocks
    static constexpr int VECTORS = ROW_BLOCKS * SHARE / 2 / 4;  // of four sums, a thread
    const u8* const sums;  // [SPLIT - 1][VECTORS][consumer threads][4], in shared memory
    const u32 received;    // barrier, completed by SPLIT - 1 shares
    const int rank;

    // Where a vector from another block stands; the others are numbered in the order of their ranks.
    __device__ __forceinline__ static int place(int other, int vector) {
        return ((other * VECTORS + vector) * (128 * WARPGROUPS) + threadIdx.x) * 16;
    }

    // The four sums of a vector of a share.
    template <class Sums>
    __device__ __forceinline__ static Sums* four(Sums (*d)[TOKENS / 2], int share, int vector) {
        return d[vector / (SHARE / 8)] + share * (SHARE / 2) + vector % (SHARE / 8) * 4;
    }

    __device__ __forceinline__ void send(const acc_t (*d)[TOKENS / 2]) const {
        cluster_wait();
        if (SUMS_IN_RING) {  // Then all consumers have read their last stage. They release nothing: what they read is in
            cluster_arrive();  // registers, since wgmma has ended, and every copy was awaited.
            cluster_wait();
        }
#pragma unroll
        for (int share = 0; share < SHARES; share++) {
            if (share == rank) continue;
            const u32 to = in_block(share, shared_address(sums) + place(rank - (rank > share), 0)), bar = in_block(share, received);
#pragma unroll
            for (int v = 0; v < VECTORS; v++) send_four(to + v * (128 * WARPGROUPS * 16), four(d, share, v), bar);
        }
    }

    __device__ __forceinline__ void receive(const acc_t (*d)[TOKENS / 2], acc_t (*sum)[SHARE / 2]) const {
        struct alignas(16) Vector { acc_t of[4]; };
        barrier_wait_cluster(received, 0);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            acc_t* own = sum[v / (SHARE / 8)] + v % (SHARE / 8) * 4;
#pragma unroll
            for (int share = 0; share < SHARES; share++)  // whose number only the device knows, and no register has an address
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (share == 0 || share == rank) own[i] = four(d, share, v)[i];
#pragma unroll
            for (int other = 0; other < SPLIT - 1; other++) {
                const Vector theirs = *(const Vector*)(sums + place(other, v));
#pragma unroll
                for (int i = 0; i < 4; i++) own[i] += theirs.of[i];
            }
        }
    }
};
#endif

// ---- epilogue --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float bias_of(const Arguments& p, int channel) {
    float value = 0;
    if (p.bias_type == 1) value = ((const float*)p.bias)[channel];
    if (p.bias_type == 2) value = __int_as_float((u32)((const u16*)p.bias)[channel] << 16);
    if (p.bias_type == 3) asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(((const u16*)p.bias)[channel]));
    return value;
}

__device__ __forceinline__ u32 round_pair(float low, float high) {
    u32 both;
#if defined(OUT_F16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Scales, rounds and stores a warpgroup's part of a tile. A thread holds two channels of every row block, 8 apart, and two
// neighbouring tokens of every 8.
struct Epilogue {
    const Arguments& p;
    float* const factors;  // [SHARE] token scales, [CHANNELS] channel scales, [CHANNELS] bias, in shared memory
    u8* const piece;       // [PIECE][CHANNELS] of the result, in shared memory
    const int warpgroup, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    int first_channel, first_token;
    float token_scale[(SHARE + 127) / 128], channel_scale, channel_bias;

    __device__ __forceinline__ Epilogue(const Arguments& p, u8* shared, int warpgroup)
        : p(p), factors((float*)(shared + PIECE_BYTES)), piece(shared), warpgroup(warpgroup) {}

    // Fetch this thread's share of a tile's scales and bias, before the multiplication, which hides the latency.
    __device__ __forceinline__ void fetch(int row_tile, int token, int expert) {
        first_channel = (row_tile * TILE_BLOCKS + warpgroup * ROW_BLOCKS) * ROWS;
        first_token = token;
        const int channel = min(first_channel + thread, p.channels - 1);
        channel_scale = p.scale_w ? p.scale_w[expert * p.channels + channel] : 1.f;
        channel_bias = bias_of(p, expert * p.channels + channel);
#pragma unroll
        for (int i = 0; i < (SHARE + 127) / 128; i++)
            token_scale[i] = p.scale_x ? p.scale_x[min(first_token + thread + i * 128, p.tokens - 1)] : 1.f;
    }

    // Pass it to the other threads of the warpgroup.
    __device__ __forceinline__ void share() const {
#pragma unroll
        for (int i = 0; i < (SHARE + 127) / 128; i++)
            if (thread + i * 128 < SHARE) factors[thread + i * 128] = token_scale[i];
        if (thread < CHANNELS) {
            factors[SHARE + thread] = channel_scale;
            factors[SHARE + CHANNELS + thread] = channel_bias;
        }
        warpgroup_sync(warpgroup);
    }

    struct Channel { float scale, bias; };
    __device__ __forceinline__ Channel channel(int j, int h) const {
        const float* own = factors + SHARE + j * ROWS + warp * 16 + h * 8 + lane / 4;
        return {own[0], own[CHANNELS]};
    }

    // Round as vLLM's epilogue does: after the channel's scale, then after token scale and bias together.
    __device__ __forceinline__ static float finish(acc_t value, float token_scale, const Channel& c) {
        return fmaf(token_scale, __fmul_rn(c.scale, (float)value), c.bias);
    }

#if defined(OUT_F32)
    __device__ __forceinline__ void store(const acc_t (*d)[SHARE / 2]) const {
        share();
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const Channel c = channel(j, h);
                const int row = first_channel + j * ROWS + warp * 16 + h * 8 + lane / 4, column = lane % 4 * 2;
                const int left = row < p.channels ? p.tokens - first_token - column : 0;
                out_t* to = p.y + (i64)(first_token + column) * p.row + row;
#pragma unroll
                for (int q = 0; q < SHARE / 8; q++, to += (i64)8 * p.row) {
                    const float2 scale = *(const float2*)(factors + q * 8 + column);
                    if (q * 8 < left) to[0] = finish(d[j][q * 4 + h * 2], scale.x, c);
                    if (q * 8 + 1 < left) to[p.row] = finish(d[j][q * 4 + h * 2 + 1], scale.y, c);
                    asm volatile("" : "+l"(to));  // hides it: else all addresses are computed ahead, into registers
                }
            }
        warpgroup_sync(warpgroup);  // all have read the factors
    }
#else
    // Results go through shared memory, a piece of the tokens at a time: stmatrix turns channel-major fragments into rows of
    // tokens. Rows are chunks of 16 bytes; chunk c of row r is at c ^ r % 8, so that no two lanes use the same bank.
    __device__ __forceinline__ static int chunk_offset(int row, int chunk) {
        return row * ROW_BYTES + (chunk ^ row % 8) * 16;
    }

    __device__ __forceinline__ void store(const acc_t (*d)[SHARE / 2]) const {
        share();
        Channel c[ROW_BLOCKS][2];
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) c[j][h] = channel(j, h);
        store_from<0>(d, c);
    }

    template <int START>
    __device__ __forceinline__ void store_from(const acc_t (*d)[SHARE / 2], const Channel (*c)[2]) const {
        constexpr int LENGTH = SHARE - START < PIECE ? SHARE - START : PIECE;
        if (START > 0) warpgroup_sync(warpgroup);  // the piece before has been read
#pragma unroll
        for (int row = 0; row < LENGTH; row += 16) {
            const float* own = factors + START + row + lane % 4 * 2;
            const float2 s[2] = {*(const float2*)own, *(const float2*)(own + 8)};
#pragma unroll
            for (int j = 0; j < ROW_BLOCKS; j++) transpose(d[j] + (START + row) / 2, c[j], s, j, row);
        }
        warpgroup_sync(warpgroup);
        store_rows<START, LENGTH>();
        if constexpr (START + PIECE < SHARE) store_from<START + PIECE>(d, c);
    }

    // Write four 8 x 8 matrices into the piece: channels +0 and +8 of 8 tokens, then of the 8 tokens after them.
    __device__ __forceinline__ void transpose(const acc_t* d, const Channel* c, const float2* s, int j, int first_row) const {
        u32 m[4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const acc_t* pair = d + i * 4 + h * 2;
                m[i * 2 + h] = round_pair(finish(pair[0], s[i].x, c[h]), finish(pair[1], s[i].y, c[h]));
            }
        // first_row is a multiple of 16, so the swizzle is that of the lane's own row.
        const u32 own = shared_address(piece) + chunk_offset(lane / 16 * 8 + lane % 8, j * (ROWS / 8) + warp * 2 + lane / 8 % 2);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         own + first_row * ROW_BYTES), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]));
    }

    // Neighbouring lanes write neighbouring chunks, and a warp writes whole lines.
    template <int START, int LENGTH>
    __device__ __forceinline__ void store_rows() const {
        constexpr int CHUNKS = CHANNELS / 8;  // 16-byte chunks of a warpgroup's part of a Y row
        constexpr int STEP = 128 / CHUNKS;    // rows a pass: 8 or 16, so a thread's swizzle stays
        const int chunk = thread % CHUNKS, channel = first_channel + chunk * 8, first = thread / CHUNKS;
        const int rows = min(LENGTH, p.tokens - first_token - START), channels = min(8, p.channels - channel);
        const u8* from = piece + chunk_offset(first, chunk);
        out_t* to = p.y + (i64)(first_token + START + first) * p.row + channel;
        const i64 stride = (i64)STEP * p.row;
        if (rows == LENGTH && channels == 8 && p.row % 8 == 0) {
#pragma unroll
            for (int i = 0; i < LENGTH / STEP; i++)
                *(uint4*)(to + i * stride) = *(const uint4*)(from + i * STEP * ROW_BYTES);
        } else {
#pragma unroll 1
            for (int row = first; row < rows; row += STEP, from += STEP * ROW_BYTES, to += stride)
#pragma unroll 1
                for (int i = 0; i < channels; i++) to[i] = ((const u16*)from)[i];
        }
    }
#endif
};

// ---- kernel ----------------------------------------------------------------------------------------------------------

#if SPLIT > 1
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) CLUSTER sparse_gemm(const __grid_constant__ Arguments p) {
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
#if SPLIT > 1
    cluster_arrive();
    const int rank = cluster_rank();
#else
    const int rank = 0;
#endif
    __syncthreads();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (GROUPED) await_activations(p);  // and what says which tiles there are
        const Producer producer(p, ring, rank);
        const bool leader = threadIdx.x % 128 == 0;
        if (leader) producer.load_early();
#if SPLIT > 1
        __syncwarp();
        cluster_wait();  // no thread may exit before every block has made its barriers
#endif
        if (leader) {
            await_activations(p);
            if (p.band == LEADING) allow_kernel_after();
            producer.load_rest();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        if (GROUPED) await_activations(p);
        const Tiles tiles(p);
        Consumer consumer{ring, warpgroup, threadIdx.x % 32 == 0, p.windows, Bundle(range_of(p, rank).sparse, p.windows)};
        Epilogue epilogue(p, results + warpgroup * RESULT_BYTES, warpgroup);
        acc_t d[ROW_BLOCKS][TOKENS / 2];
        await_activations(p);  // and of their scales
        for (int tile = blockIdx.x / SPLIT; tile < tiles.count(); tile += gridDim.x / SPLIT) {
            int row_tile, token_tile;
            tiles.locate(tile, row_tile, token_tile);
            epilogue.fetch(row_tile, token_tile * TOKENS + rank * SHARE, expert_of(p, token_tile));
            const Range range = range_of(p, rank);
#if SPLIT == 1
            consumer.multiply(range, d);
            epilogue.store(d);
#else
            const Exchange exchange{SUMS_IN_RING ? base : apart, received, rank};
            acc_t sum[ROW_BLOCKS][SHARE / 2];
            if (range.empty()) {
                const acc_t zeros[ROW_BLOCKS][TOKENS / 2] = {};  // not in d: only wgmma may write its registers
                exchange.send(zeros);
                if (rank < Exchange::SHARES) exchange.receive(zeros, sum);
            } else {
                consumer.multiply(range, d);
                exchange.send(d);
                if (rank < Exchange::SHARES) exchange.receive(d, sum);
            }
            if (rank < Exchange::SHARES) epilogue.store(sum);
            break;  // there is a block for every tile and rank
#endif
        }
        if (p.band == FOLLOWING) await_kernel_before();  // what follows waits for this band alone, and needs the first one, too
    }
}
