"""The variants: each an idea, a prediction with its count, and the texts that it replaces.

Predictions are per cent of time, negative is faster, at 16 tokens and 6:8 in six bits on an H200: of the 32B's gate and
up, or of a block of the 7B for variants that start early. Counts are of its records: a product streams at 3.93 TB/s
after 2.9 us (gate and up at 6:8 and 2:4), a copy moves 4.3 TB/s, and a block takes 67 us where its 175 MB take 45.
"""

from __future__ import annotations

from decode.patching import Edit, Variant
from slidesparse.gemm.hopper.tiles import Tile


def one(tokens: int, stages: int, blocks: int, split: int = 1) -> Tile:
    """A tile of one row block."""
    return Tile(tokens, warpgroups=1, row_blocks=1, stages=stages, split=split, blocks=blocks)


ONE_ROW_BLOCK = {
    "16x64b3": one(16, 9, 3), "32x64b2": one(32, 11, 2), "64x64b2": one(64, 8, 2), "16x64/3b3": one(16, 8, 3, 3),
    "32x64/2b2": one(32, 11, 2, 2), "32x64/3b2": one(32, 11, 2, 3), "64x64/2b2": one(64, 7, 2, 2),
    "96x256": one(64, 8, 2),  # gate and up of the 32B at 64 tokens
}  # fmt: skip
EVEN = {name: one(t.tokens, t.stages // 2 * 2, t.blocks, t.split) for name, t in ONE_ROW_BLOCK.items()}
FEWER = {name: one(t.tokens, t.stages - 2, t.blocks, t.split) for name, t in ONE_ROW_BLOCK.items()}
DEEPER = {"16x64b3": one(16, 11, 3), "16x64/3b3": one(16, 10, 3, 3), "64x64/2b2": one(64, 8, 2, 2)}
MORE_BLOCKS = {"16x64b3": one(16, 8, 4), "64x64b2": one(64, 5, 3), "96x256": one(64, 5, 3)}
UNSPLIT = {
    **dict.fromkeys(("16x64b3", "16x64/3b3"), one(16, 9, 3)),
    **dict.fromkeys(("32x64b2", "32x64/2b2", "32x64/3b2"), one(32, 11, 2)),
    **dict.fromkeys(("64x64b2", "64x64/2b2", "64x128", "64x128/2", "64x128/4", "96x256"), one(64, 8, 2)),
}
SIXTEEN, SIXTY_FOUR = Tile(16, 1, 2, stages=6, blocks=3), Tile(64, 1, 2, stages=6, blocks=2)
TWO_ROW_BLOCKS = {"16x64b3": SIXTEEN, "64x64b2": SIXTY_FOUR, "96x256": SIXTY_FOUR}
TWO_UNSPLIT = {name: SIXTEEN if t.tokens == 16 else SIXTY_FOUR for name, t in UNSPLIT.items() if t.tokens != 32}
EVEN_UNSPLIT = {name: one(t.tokens, t.stages // 2 * 2, t.blocks) for name, t in UNSPLIT.items()}

# -- 1: bytes in flight ------------------------------------------------------------------------------------------------

PLACE = "// A place in the ring:"
COPY_X = "copy(ring.stage(place), p.x"
STEP_BYTES, COPIED = "TILE_BLOCKS * SPARSE_BYTES", "TILE_BLOCKS * SPARSE_BYTES, ring.full_of(place), p.tokens);\n"

NO_HINT: Edit = ("ring.cuh", "bytes.L2::cache_hint [%0], [%1], %2, [%3], policy; }", "bytes [%0], [%1], %2, [%3]; }")
KEPT_X: tuple[Edit, ...] = (
    ("ring.cuh", PLACE, """__device__ __forceinline__ void copy_kept(u32 to, const u8* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "l"(0x14F0000000000000) : "memory");
}
""" + PLACE),
    ("producer.cuh", COPY_X, COPY_X.replace("copy(", "copy_kept(")),
)  # fmt: skip
PREFETCH: Edit = ("ring.cuh", PLACE, """__device__ __forceinline__ void prefetch(const u8* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
""" + PLACE)  # fmt: skip


def ahead(steps: int) -> tuple[Edit, ...]:
    """Bring the weights of a later step into L2 with each step that is copied."""
    at = f"weights_at(p.sparse, source.block, p.sparse_slabs, step + {steps}, SPARSE_BYTES)"
    call = f"            if (OPERANDS & WEIGHTS && step + {steps} < last) prefetch({at}, {STEP_BYTES});\n"
    made = "    __device__ __forceinline__ StepsWithMetadata(const Range&, const Arguments&) {}"
    keeps = made.replace("Range&,", "Range& range,").replace(" {}", " : last(range.sparse_end) {}\n    const int last;")
    return PREFETCH, ("metadata.cuh", made, keeps), ("metadata.cuh", COPIED, COPIED + call)


TWO_PRODUCERS: tuple[Edit, ...] = (
    ("geometry.cuh", "? 40 : 24;", "? 40 : 40;"),
    ("sparse_gemm.cuh", "        if (leader) {\n", "        if (leader || threadIdx.x % 128 == 32) {\n"),
    ("sparse_gemm.cuh", "            await_activations(p);\n", "            if (!leader) await_activations(p);\n"),
    ("sparse_gemm.cuh", "load_rest();", "load_rest(leader);"),
    ("sparse_gemm.cuh", "if (p.band == LEADING)", "if (!leader && p.band == LEADING)"),
    ("producer.cuh", "load_rest() const {", "load_rest(bool weights) const {"),
    ("producer.cuh", "        load<ACTIVATIONS>(place, sparse, first_tile(), 0, early_steps());\n", ""),
    ("producer.cuh", "int from = early_steps();", "int from = 0;\n"
        "        if (weights) for (; from < early_steps(); from++) place.next();"),
    ("producer.cuh", "load<WEIGHTS | ACTIVATIONS>(place, sparse, tile, from, steps());",
        "if (weights) load<WEIGHTS>(place, sparse, tile, from, steps());\n"
        "            else load<ACTIVATIONS>(place, sparse, tile, 0, steps());"),
    ("metadata.cuh", "            if (OPERANDS & WEIGHTS) {\n                source.await_empty(place);",
        "            source.await_empty(place);\n            if (OPERANDS & WEIGHTS) {"),
)  # fmt: skip
ONE_STREAM: Edit = (
    "producer.cuh",
    "return weights + ((i64)(block / W_TILE * steps + step) * W_TILE + block % W_TILE) * bytes;",
    "return weights + ((i64)block * steps + step) * bytes;",
)
PAIRS: tuple[Edit, ...] = (
    ONE_STREAM,
    ("ring.cuh", "stages + p.stage * STAGE_BYTES;",
        "stages + (p.stage & ~1u) * STAGE_BYTES + (p.stage & 1) * X_BYTES;"),
    ("ring.cuh", "full + p.stage * 8;", "full + (p.stage & ~1u) * 8;"),
    ("ring.cuh", "empty + p.stage * 8;", "empty + (p.stage & ~1u) * 8;"),
    ("consumer.cuh", "return stage + X_BYTES + warpgroup * ROW_BLOCKS * block_bytes;",
        "return stage + (2 - (place.stage & 1)) * X_BYTES + (place.stage & 1) * block_bytes;"),
    ("consumer.cuh", "if (lane_zero) barrier_arrive", "if (lane_zero && (oldest.stage & 1)) barrier_arrive"),
    ("consumer.cuh", "    if (sparse == 0) loop.release();\n",
        "    if (loop.place.stage & 1) loop.place.next(), loop.release();  // a pair of which there is only one\n"),
    ("metadata.cuh", "        for (; step < end; step++, place.next()) {",
        """        for (; step < end; step += 2, place.next(), place.next()) {
            static_assert(STAGES % 2 == 0 && TILE_BLOCKS == 1 && STAGE_BYTES == X_BYTES + SPARSE_BYTES, "pairs");
            const int n = min(2, end - step);
            const bool joined = n == 2 && source.rows * SLAB == X_BYTES;"""),
    ("metadata.cuh", "source.x_bytes + TILE_BLOCKS * SPARSE_BYTES);", "n * (source.x_bytes + SPARSE_BYTES));"),
    ("metadata.cuh", "            if (OPERANDS & ACTIVATIONS) source.copy_x(place, p.dense_slabs + step);",
        """            for (int i = 0; OPERANDS & ACTIVATIONS && i < (joined ? 1 : n); i++)
                copy(ring.stage(place) + i * X_BYTES, p.x + ((i64)(step + i) * source.rows + source.token) * SLAB,
                     joined ? 2 * X_BYTES : source.x_bytes, ring.full_of(place));"""),
    ("metadata.cuh", "copy_weights(ring.stage(place) + X_BYTES,", "copy_weights(ring.stage(place) + 2 * X_BYTES,"),
    ("metadata.cuh", COPIED, "n * SPARSE_BYTES, ring.full_of(place), p.tokens);\n"),
)  # fmt: skip

# -- 2: equal shares ---------------------------------------------------------------------------------------------------

EQUAL_SHARES: tuple[Edit, ...] = tuple(
    edit
    for file in ("six_bits.cu", "metadata.cu")
    for edit in (
        (file, '#include "sparse_gemm.cuh"', '#include "equal_shares.cuh"'),
        (file, "{ run<StepsWithMetadata", "{ run_equal_shares<StepsWithMetadata"),
    )
)

# -- 3: starting early -------------------------------------------------------------------------------------------------

STARTED, REST = "    __syncthreads();\n    const int warpgroup", "            producer.load_rest();\n"
LIFT: Edit = (
    "lift_math.py",
    "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0",
    "griddepcontrol.launch_dependents; griddepcontrol.wait; // $0",
)
START: Edit = ("sparse_gemm.cuh", STARTED, f"    if (p.band != LEADING) allow_kernel_after();\n{STARTED}")
HALF: Edit = ("producer.cuh", "    load<WEIGHTS | ACTIVATIONS>(place, sparse, tile, from, steps());", """{
            const bool last = tile + gridDim.x / SPLIT >= tiles.count();
            const int middle = last ? max(from, steps() / 2) : from;
            load<WEIGHTS | ACTIVATIONS>(place, sparse, tile, from, middle);
            if (last && p.band != LEADING) allow_kernel_after();
            load<WEIGHTS | ACTIVATIONS>(place, sparse, tile, middle, steps());
        }""")  # fmt: skip
ROOM: tuple[Edit, ...] = (
    ("geometry.cuh", "65536 / (BLOCKS * THREADS)", "65536 / ((BLOCKS + 1) * THREADS)"),
    ("sparse_gemm.cuh", "__launch_bounds__(THREADS, BLOCKS)", "__launch_bounds__(THREADS, BLOCKS + 1)"),
)
MORE_OF_TILE: tuple[Edit, ...] = (
    PREFETCH,
    ("sparse_gemm.cuh", "if (leader) producer.load_early();", """if (leader) {
            producer.load_early();
            const TileSource source(p, ring, producer.tiles, producer.first_tile());
            const int first = producer.range.sparse + STAGES, end = min(first + 8, producer.range.sparse_end);
            for (int step = first; step < end; step++)
                prefetch(weights_at(p.sparse, source.block, p.sparse_slabs, step, SPARSE_BYTES),
                         TILE_BLOCKS * SPARSE_BYTES);
        }"""),
)  # fmt: skip
NEXT: tuple[Edit, ...] = (
    PREFETCH,
    ("sparse_gemm.cuh", REST, REST + """
            // Of every row tile of the next weight the first bytes; the launch says where they are in place of `used`.
            const i64* const next = (const i64*)p.used;  // address, bytes of a row tile, row tiles, bytes to bring
            for (i64 tile = blockIdx.x; next && tile < next[2]; tile += gridDim.x)
                prefetch((const u8*)next[0] + tile * next[1], (u32)next[3]);
"""),
)  # fmt: skip

V = Variant
VARIANTS = (
    V("no hint", "L2 keeps weights as long as activations", 3, "what the hint gained as a variant", edits=(NO_HINT,)),
    V("kept X", "L2 keeps activations longest", 0, "every tile reads them, so they stay as it is", edits=KEPT_X),
    V("4 ahead", "each step also brings one 4 steps past the ring into L2", -2,
        "16 KB more in flight a block, where the ring has 36", edits=ahead(13)),
    V("16 ahead", "the same, 16 steps", 1, "64 KB a block are 25 MB, half of L2: as in experiment 25", edits=ahead(25)),
    V("deeper", "as many stages as shared memory holds in six bits", -1, "11 stages in place of 9",
        tiles=DEEPER, only_these=True, only_six_bits=True),
    V("more blocks", "four blocks of 16 tokens, or three of 64, a multiprocessor", -2,
        "2.2 waves of the 864 tiles become 1.6; at 64 tokens 3.3 become 2.2, -4 %",
        tiles=MORE_BLOCKS, only_these=True, only_six_bits=True),
    V("small tiles", "64 x 64 where 96 x 256 is chosen, for the 32B's gate and up at 64 tokens", 0,
        "216 tiles are 1.6 waves, and 864 are 3.3", tiles={"96x256": one(64, 8, 2)}, only_these=True),
    V("two producers", "weights and activations have a thread each", 0,
        "a step of a block has 1100 cycles, and its copies take 200",
        edits=TWO_PRODUCERS, tiles=ONE_ROW_BLOCK, only_these=True),
    V("one stream", "a row block's weights lie together, not four row blocks side by side", -1,
        "pieces of 4 KB in 16 KB become one of 240 KB",
        edits=(ONE_STREAM,), tiles=ONE_ROW_BLOCK, only_these=True, contiguous=True),
    V("pairs", "two steps share a stage, its barriers and one copy of weights", -4,
        "half as many copies, of 8 KB: experiment 2 gained 20 % so, where 44 KB were ten",
        edits=PAIRS, tiles=EVEN, only_these=True, contiguous=True),
    V("two row blocks", "tiles of 128 channels, with six stages of 8 KB of weights and 2 KB of X", 2,
        "half the copies and 0.83 of the bytes, but 432 tiles are 1.1 waves of 396 blocks: a fifth of the end is empty",
        tiles=TWO_ROW_BLOCKS, only_these=True, only_six_bits=True),
    V("equal shares", "every block multiplies the same number of steps", -3,
        "0.8 of the third wave is empty, 4 us of 57, of which the sums take 2; at 64 tokens -8 %", stage=2,
        edits=EQUAL_SHARES, headers=("equal_shares.cuh",), tiles=UNSPLIT, only_these=True, shares=True),
    V("shares of two", "equal shares and two row blocks at once", -8,
        "half the copies, 0.83 of the bytes, no last wave", stage=2,
        edits=EQUAL_SHARES, headers=("equal_shares.cuh",), tiles=TWO_UNSPLIT, only_these=True, only_six_bits=True,
        shares=True),
    V("shares of pairs", "equal shares and pairs at once", -6, "the sum, less what they share", stage=2,
        edits=(*PAIRS, *EQUAL_SHARES), headers=("equal_shares.cuh",), tiles=EVEN_UNSPLIT, only_these=True,
        contiguous=True, shares=True),
    V("start", "product and lift allow the next kernel at once", -5,
        "4 boundaries of 2 us a block, and a quarter of a launch some multiprocessor is empty",
        stage=3, edits=(START, LIFT)),
    V("shares, start", "equal shares, and both allow the next kernel at once", -9,
        "of o and qkv a block has 6 and 8 steps: all of the weight is there before the activations", stage=3,
        edits=(*EQUAL_SHARES, ("types.cuh", "#pragma once", "#pragma once\n#define ALLOW_AT_START"), LIFT),
        headers=("equal_shares.cuh",), tiles=UNSPLIT, only_these=True, shares=True),
    V("half", "the product after half of its last tile, the lift at once", -5, "the same", stage=3, edits=(HALF, LIFT)),
    V("start, room", "and registers and memory for one block more", -6, "the lift starts beside a full multiprocessor",
        stage=3, edits=(START, LIFT, *ROOM), tiles=FEWER, only_these=True),
    V("start, more of a tile", "and 8 steps more of each first tile into L2", -6, "13 MB more wait for the lift",
        stage=3, edits=(START, LIFT, *MORE_OF_TILE)),
    V("next", "the end of a product brings 8 MB of the next weight into L2", -4,
        "8 MB are 2 us of 17; of three of four products half are hidden", stage=3, edits=NEXT),
    V("start, next", "start and next at once", -7, "what comes early must be asked for early",
        stage=3, edits=(START, LIFT, *NEXT)),
)  # fmt: skip
