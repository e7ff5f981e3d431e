"""The variants: each an idea, a prediction with its count, and the texts that it replaces.

Predictions are per cent of time, negative is faster, at 16 tokens and 6:8 in six bits on an H200: of the 32B's gate and
up, or of a block of the 7B for variants that start early. Counts are of its records: a product streams at 3.93 TB/s
after 2.9 us (gate and up at 6:8 and 2:4), a copy moves 4.3 TB/s, and a block takes 67 us where its 175 MB take 45.

To try an idea, add a variant to ``VARIANTS``: tests/gemm/test_decode_variants.py compiles it and compares its products,
without a GPU.
"""

from __future__ import annotations

from decode.patching import Edit, Variant
from slidesparse.gemm.hopper.tiles import TILES, Tile

ONE_ROW_BLOCK = {str(tile): tile for tile in TILES if tile.channels == 64}
MORE_BLOCKS = {"16x64b3": Tile(16, 1, 1, stages=8, blocks=4), "64x64b2": Tile(64, 1, 1, stages=5, blocks=3)}
TWO_ROW_BLOCKS = {"16x64b3": Tile(16, 1, 2, stages=6, blocks=3), "64x64b2": Tile(64, 1, 2, stages=6, blocks=2)}
for tiles in (ONE_ROW_BLOCK, MORE_BLOCKS, TWO_ROW_BLOCKS):
    tiles["96x256"] = tiles["64x64b2"]  # in place of the choice for gate and up of the 32B at 64 tokens

# -- bytes in flight ---------------------------------------------------------------------------------------------------

PLACE = "// A place in the ring:"
COPY_X = "copy(ring.stage(place), p.x"

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

# -- starting early ----------------------------------------------------------------------------------------------------

STARTED = "    __syncthreads();\n    const int warpgroup"
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

V = Variant
VARIANTS = (
    V("no hint", "L2 keeps weights as long as activations", 3, "what the hint gained as a variant", edits=(NO_HINT,)),
    V("kept X", "L2 keeps activations longest", 0, "every tile reads them, so they stay as it is", edits=KEPT_X),
    V("more blocks", "four blocks of 16 tokens, or three of 64, a multiprocessor", -2,
        "2.2 waves of the 864 tiles become 1.6; at 64 tokens 3.3 become 2.2, -4 %",
        tiles=MORE_BLOCKS, only_these=True, only_six_bits=True),
    V("two producers", "weights and activations have a thread each", 0,
        "a step of a block has 1100 cycles, and its copies take 200",
        edits=TWO_PRODUCERS, tiles=ONE_ROW_BLOCK, only_these=True),
    V("two row blocks", "tiles of 128 channels, with six stages of 8 KB of weights and 2 KB of X", 2,
        "half the copies and 0.83 of the bytes, but 432 tiles are 1.1 waves of 396 blocks: a fifth of the end is empty",
        tiles=TWO_ROW_BLOCKS, only_these=True, only_six_bits=True),
    V("start", "product and lift allow the next kernel at once", -5,
        "4 boundaries of 2 us a block, and a quarter of a launch some multiprocessor is empty",
        starts_early=True, edits=(START, LIFT)),
    V("half", "the product after half of its last tile, the lift at once", -5, "the same",
        starts_early=True, edits=(HALF, LIFT)),
)  # fmt: skip
