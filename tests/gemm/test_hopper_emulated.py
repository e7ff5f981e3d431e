"""The Hopper kernel itself, run by an emulator of its PTX: every tile without a GPU."""

from __future__ import annotations

import pytest
import torch
from expert_weights import packed_experts
from hopper_forms import Bundles, ExpertsWithoutBundles, SixBitBundles
from ptx_emulator.state import Fault, GlobalMemory
from slab_views import slab_view
from step_ptx import OUT, EmulatedKernel, expected, problem, run_product
from tolerances import assert_product

from slidesparse.gemm.hopper import grouped
from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.choose_tiles import DENSE_GROUPED_TILES, GROUPED_TILES
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.hopper.tiles import DENSE_TILES, TILES, Tile
from slidesparse.gemm.launch import Band
from slidesparse.gemm.steps import SLABS
from slidesparse.lifting.expert_order import arrange
from slidesparse.lifting.layout import Lifted
from slidesparse.ops import quantize_lift
from slidesparse.weights.quant import quantize_rows

INT8, FP8, BF16, FP16, FP32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
FP64 = torch.float64
SMALL, LARGE, SPLIT, HALF = (
    next(tile for tile in TILES if str(tile) == name) for name in ("16x64b3", "192x256", "64x128/4", "128x256/2")
)
DENSE_SMALL, DENSE_LARGE = (next(tile for tile in DENSE_TILES if str(tile) == name) for name in ("16x64b3", "192x256"))


@pytest.mark.parametrize(
    ("pattern", "backend"), [("6:8", Bundles), ("2:4", Hopper), ("6:8", HopperSixBits), ("6:8", SixBitBundles)]
)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_multiplies_exactly(tile: Tile, pattern: str, backend: type[Hopper]) -> None:
    lifted, packed, x = problem(pattern, INT8, tile.tokens + 9, backend)
    assert torch.equal(run_product(lifted, packed, tile, BF16, backend=backend), expected(x, packed, BF16, None))


@pytest.mark.parametrize("tile", DENSE_TILES, ids=str)
def test_every_tile_multiplies_dense_weights_of_six_bits_exactly(tile: Tile) -> None:
    lifted, packed, x = problem("dense", INT8, tile.tokens + 9, HopperSixBits)
    assert torch.equal(run_product(lifted, packed, tile, BF16, backend=HopperSixBits), expected(x, packed, BF16, None))


def test_two_bands_of_a_dense_weight_are_one_product() -> None:
    lifted, packed, x = problem("dense", INT8, 7, HopperSixBits)
    bias, bands = torch.randn(OUT, dtype=BF16), (Band(DENSE_LARGE, 256), Band(DENSE_SMALL, OUT - 256))
    found = run_product(lifted, packed, bands, BF16, bias, backend=HopperSixBits)
    assert torch.equal(found, expected(x, packed, BF16, bias))


@pytest.mark.parametrize(
    ("pattern", "backend"),
    [
        *((pattern, Hopper) for pattern in ("2:4", "4:6")),
        *((pattern, Bundles) for pattern in ("4:6", "8:10", "14:16")),
        *((pattern, HopperSixBits) for pattern in ("2:4", "4:6", "8:10")),
        *((pattern, SixBitBundles) for pattern in ("4:6", "8:10", "14:16")),
    ],
)
@pytest.mark.parametrize("tile", [SMALL, SPLIT], ids=str)
def test_every_pattern_is_multiplied_exactly(tile: Tile, pattern: str, backend: type[Hopper]) -> None:
    lifted, packed, x = problem(pattern, INT8, 40, backend)
    assert torch.equal(run_product(lifted, packed, tile, backend=backend), expected(x, packed, FP32, None))


@pytest.mark.parametrize(
    ("pattern", "dtype", "out_dtype", "backend"),
    [
        ("6:8", INT8, BF16, Hopper),
        ("4:6", INT8, FP32, Hopper),
        ("4:6", INT8, FP16, Bundles),
        ("6:8", INT8, BF16, HopperSixBits),
        ("6:8", BF16, BF16, Hopper),
    ],
)
@pytest.mark.parametrize("second", [SMALL, SPLIT, HALF], ids=str)
def test_two_bands_are_one_product(
    second: Tile, pattern: str, dtype: torch.dtype, out_dtype: torch.dtype, backend: type[Hopper]
) -> None:
    lifted, packed, _ = problem(pattern, dtype, 40, backend)
    bias, bands = torch.randn(OUT, dtype=out_dtype), (Band(LARGE, 256), Band(second, OUT - 256))
    found, first, rest = (
        run_product(lifted, packed, tile, out_dtype, bias, backend=backend) for tile in (bands, LARGE, second)
    )
    assert torch.equal(found, torch.cat([first[:, :256], rest[:, 256:]], 1))


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [FP8, BF16, FP16], ids=str)
def test_floats_are_multiplied_within_their_rounding(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    lifted, packed, x = problem("4:6", dtype, 20)
    bias = torch.randn(OUT).to(out_dtype)
    found = run_product(lifted, packed, SMALL, out_dtype, bias)
    values, scale = quantize_rows(x, dtype) if dtype == FP8 else (x, torch.ones(len(x), 1))
    factor = scale * (torch.ones(OUT) if packed.scale is None else packed.scale)
    exact = values.to(FP64) @ packed.unpack().to(FP64).T * factor + bias
    magnitude = values.to(FP64).abs() @ packed.unpack().to(FP64).abs().T * factor + bias.abs()
    assert_product(found, exact, magnitude, dtype)


@pytest.mark.parametrize("tokens", [1, 7, 16, 17])
def test_ragged_tokens_and_a_bias(tokens: int) -> None:
    lifted, packed, x = problem("6:8", INT8, tokens)
    bias = torch.randn(OUT, dtype=BF16)
    assert torch.equal(run_product(lifted, packed, SMALL, BF16, bias), expected(x, packed, BF16, bias))


@pytest.mark.parametrize("tile", [SMALL, SPLIT, HALF], ids=str)
def test_no_order_of_warps_and_copies_changes_a_bit(tile: Tile) -> None:
    lifted, packed, _ = problem("4:6", FP8, 40)
    first = run_product(lifted, packed, tile)
    assert all(torch.equal(run_product(lifted, packed, tile, seed=seed), first) for seed in range(1, 4))


@pytest.mark.parametrize(
    ("hopper", "pattern", "count_bits", "value_bits"),
    [
        *((HopperExperts(), "6:8", 3, bits) for bits in (8, 6)),
        *((ExpertsWithoutBundles(), "6:8", 0, bits) for bits in (8, 6)),
        (HopperExperts(), "dense", 0, 6),
    ],
)
def test_experts_are_multiplied_where_tokens_chose_them(
    hopper: HopperExperts, pattern: str, count_bits: int, value_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    tiles = DENSE_GROUPED_TILES if pattern == "dense" else GROUPED_TILES
    memory, tile = GlobalMemory(), next(tile for tile in tiles if tile.tokens == 16)
    experts = packed_experts(4, 300, 256, INT8, pattern, rounding="6bit" if value_bits == 6 else "absmax")
    chosen = torch.tensor([[0, 3], [3, 0], [3, 1], *([[0, 3]] * 17)])  # nobody chose expert 2
    at = arrange(chosen, 4, tile.tokens)
    x = torch.randn(len(at.tokens), 256)
    values, scale_x = quantize_lift(x, hopper.layout.column_map(experts[0]), INT8, "hopper")
    operand, scale = hopper.prepare(experts), torch.stack([one.scale for one in experts if one.scale is not None])

    def empty(rows: int, columns: int, dtype: torch.dtype, device: int) -> torch.Tensor:
        y = torch.full((rows, columns), 7.0, dtype=dtype)
        memory.add(y)
        return y

    def load(tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype, device: int, *stored: int) -> EmulatedKernel:
        assert stored == (count_bits, value_bits, True)
        return EmulatedKernel(memory, tile, (dtype, out_dtype), count_bits, value_bits, grouped=True)

    for tensor in (slab_view(values, SLABS), scale_x, operand.weights, scale, at.experts, at.used):
        memory.add(tensor)
    monkeypatch.setattr(grouped, "load_kernel", load)
    monkeypatch.setattr(grouped, "is_current", lambda device: True)
    monkeypatch.setattr(grouped, "current_stream", lambda device: 0)
    monkeypatch.setattr(grouped, "empty", empty)
    y = hopper.multiply(Lifted(values, scale_x, None), operand, scale, at, BF16, tile)
    used = int(at.used) * tile.tokens
    assert used < len(y)
    assert bool((y[used:] == 7).all()), "tiles past the used ones are nobody's"
    for number, expert in enumerate(at.experts[: int(at.used)].tolist()):
        rows = slice(number * tile.tokens, (number + 1) * tile.tokens)
        assert torch.equal(y[rows], expected(x[rows], experts[expert], BF16, None))


WRONG = {
    "data is not awaited": (
        "{ barrier_wait(ring.full_of(place), place.phase); }",
        "{}",
        r"metadata|an operand changed",
    ),
    "a stage is given back too early": ("mma_wait<1>();", "mma_wait<2>();", "an operand changed while"),
    "a stage is never given back": ("if (lane_zero) barrier_arrive(ring.empty_of(oldest));", "", "nobody can go on"),
    "too few bytes are awaited": ("x_bytes + TILE_BLOCKS * SPARSE_BYTES);", "x_bytes);", "metadata|operand|nobody"),
    "a store goes past the tokens": ("min(LENGTH, p.tokens - first_token - START)", "LENGTH", "global access"),
    "a load goes past the channels": ("min(first_channel + thread, p.channels - 1)", "10000", "global access"),
}


WRONG_OF_BUNDLES = {
    "words are not awaited": ("if (bundle.window == 0) await_stage();", "", "metadata"),
    "slots are too few": ("SLOTS = COUNT_BITS == 0 ? 0 : 1 +", "SLOTS = COUNT_BITS == 0 ? 0 : 1 + 0 *", "metadata"),
    "words are not counted": ("+ (words ? SLOT_BYTES : 0)", "", "nobody can go on"),
}


WRONG_OF_SIX_BITS = {"a step is given back too early": ("mma_wait<IN_FLIGHT - 1>();", ";", "a register changed while")}


WRONG_OF_HALVES = {"sums are sent while others read": ("if (SUMS_IN_RING) {", "if (false) {", "metadata")}


def test_the_emulator_finds_registers_of_a_dense_weight_given_back_too_early() -> None:
    ((right, broken, message),) = WRONG_OF_SIX_BITS.values()
    lifted, packed, _ = problem("dense", INT8, 20, HopperSixBits)
    with pytest.raises(Fault, match=message):
        run_product(lifted, packed, DENSE_SMALL, BF16, edit=(right, broken), backend=HopperSixBits)


@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_OF_BUNDLES, *WRONG_OF_SIX_BITS, *WRONG_OF_HALVES])
def test_the_emulator_finds_what_is_wrong_with_a_kernel(wrong: str) -> None:
    backend = Bundles if wrong in WRONG_OF_BUNDLES else HopperSixBits if wrong in WRONG_OF_SIX_BITS else Hopper
    tile = HALF if wrong in WRONG_OF_HALVES else SMALL
    right, broken, message = (WRONG | WRONG_OF_BUNDLES | WRONG_OF_SIX_BITS | WRONG_OF_HALVES)[wrong]
    lifted, packed, _ = problem("6:8", INT8, 20, backend)

    def run_in_two_orders() -> None:  # of threads: not every one shows every fault
        for seed in (0, 1):
            run_product(lifted, packed, tile, BF16, edit=(right, broken), backend=backend, seed=seed)

    with pytest.raises(Fault, match=message):
        run_in_two_orders()
