"""The kernel for ``mma.sync`` itself, run by an emulator of its PTX: every tile without a GPU."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hopper_ptx import expected, problem, run_product
from ptx_emulator.state import Fault
from tolerances import assert_product

from slidesparse.gemm.ampere.backend import Ampere, AmpereSixBits
from slidesparse.gemm.ampere.tiles import FEWEST_STAGES, TILES, MmaTile
from slidesparse.weights.quant import quantize_rows

INT8, FP8, BF16, FP16, FP32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
FP64 = torch.float64
SIZES = 200, 300
"""Channels and columns: neither is a multiple of a tile, nor is the lifted length of any pattern one of a slab."""
SMALL = TILES[-1]
FORMS = [(pattern, backend) for pattern in ("6:8", "2:4", "dense") for backend in (Ampere, AmpereSixBits)]


def staged(tile: MmaTile, pattern: str) -> MmaTile:
    """A tile with the fewest stages, which leave the least room for mistakes."""
    return replace(tile, stages=FEWEST_STAGES, dense=pattern == "dense")


@pytest.mark.parametrize(("pattern", "backend"), FORMS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_multiplies_exactly(tile: MmaTile, pattern: str, backend: type[Ampere]) -> None:
    tokens = tile.tokens + (9 if tile.tokens <= 64 else -9)  # two tiles, or a part of one
    lifted, packed, x = problem(pattern, INT8, tokens, backend, *SIZES)
    bias = torch.randn(SIZES[0], dtype=BF16)
    found = run_product(lifted, packed, staged(tile, pattern), BF16, bias, backend=backend)
    assert torch.equal(found, expected(x, packed, BF16, bias))


@pytest.mark.parametrize("pattern", ["4:6", "dense"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(FP8, BF16), (BF16, BF16), (FP16, FP16), (BF16, FP32)], ids=str)
def test_floats_are_multiplied_within_their_rounding(dtype: torch.dtype, out_dtype: torch.dtype, pattern: str) -> None:
    lifted, packed, x = problem(pattern, dtype, 20, Ampere, *SIZES)
    bias = torch.randn(SIZES[0]).to(out_dtype)
    found = run_product(lifted, packed, staged(SMALL, pattern), out_dtype, bias, backend=Ampere)
    values, scale = quantize_rows(x, dtype) if dtype == FP8 else (x, torch.ones(len(x), 1))
    factor = scale * (torch.ones(SIZES[0]) if packed.scale is None else packed.scale)
    exact = values.to(FP64) @ packed.unpack().to(FP64).T * factor + bias
    magnitude = values.to(FP64).abs() @ packed.unpack().to(FP64).abs().T * factor + bias.abs()
    assert_product(found, exact, magnitude, dtype)


@pytest.mark.parametrize("stages", [FEWEST_STAGES, 5])
def test_no_order_of_warps_changes_a_bit(stages: int) -> None:
    lifted, packed, _ = problem("4:6", FP8, 7, Ampere, *SIZES)
    tile = replace(SMALL, stages=stages)
    first, *others = (run_product(lifted, packed, tile, seed=seed, backend=Ampere) for seed in range(3))
    assert all(torch.equal(other, first) for other in others)


AWAIT, GIVE = "await_copies<STAGES - 3>();", "own[i * TEAM] = (&d[0][0][0])[i];"
WRONG = {
    "data is not awaited": (AWAIT, "await_copies<STAGES - 2>();"),
    "others' data is not awaited": ("await_copies<STAGES - 3>();\n            sync_team(number);", AWAIT),
    "a stage is filled too early": ("LOADS>(last + own)", "LOADS>(stage + own)"),
    "sums are read too early": (GIVE + "\n        __syncthreads();", GIVE),
    "rows past the tokens are copied": ("min(TOKENS, rows - token) * SLAB", "TOKENS * SLAB"),
    "a store goes past the tokens": ("token + row < p.tokens ?", "true ?"),
    "a load goes past the channels": ("min(first_channel + thread + i * TEAM, p.channels - 1)", "10000"),
    "a swizzle is wrong": ("(chunk ^ lane % 8) * 16", "(chunk ^ lane % 4) * 16"),
}


def is_right(edit: tuple[str, str] | None, seed: int = 0) -> bool:
    lifted, packed, x = problem("6:8", INT8, 20, Ampere, *SIZES)
    tile = replace(SMALL, row_warps=2, split=2, stages=FEWEST_STAGES)
    found = run_product(lifted, packed, tile, BF16, edit=edit, seed=seed, backend=Ampere)
    return torch.equal(found, expected(x, packed, BF16, None))


@pytest.mark.parametrize("wrong", WRONG)
def test_the_emulator_finds_what_is_wrong_with_the_kernel(wrong: str) -> None:
    with suppress(Fault):  # or the product is wrong, in one order of warps at least
        assert not (is_right(WRONG[wrong]) and is_right(WRONG[wrong], seed=1))


def test_it_finds_nothing_wrong_with_the_kernel_as_it_is() -> None:
    assert [is_right(None, seed) for seed in (0, 1)] == [True, True]
