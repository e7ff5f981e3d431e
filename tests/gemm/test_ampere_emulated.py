"""The kernel for ``mma.sync`` itself, run by an emulator of its PTX: forms, types, teams and ragged edges."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from ptx_emulator.state import Fault
from step_ptx import expected, problem, run_product
from tolerances import assert_product

from slidesparse.gemm.ampere.backend import Ampere, AmpereSixBits
from slidesparse.gemm.ampere.tiles import TILES, MmaTile
from slidesparse.gemm.launch import Band
from slidesparse.weights.quant import quantize_rows

INT8, FP8, BF16, FP16, FP32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
OUT, COLUMNS = 200, 300
"""Neither is a multiple of a tile, nor is the lifted length of any pattern one of a slab."""
SMALL, TEAMS = MmaTile(2, 2, stages=3), MmaTile(1, 2, 2, 2, split=2, stages=4)
FORMS = [("2:4", Ampere), ("6:8", Ampere), ("dense", Ampere), ("6:8", AmpereSixBits), ("dense", AmpereSixBits)]


def assert_exact(
    tile: MmaTile, pattern: str, tokens: int, backend: type[Ampere], out_dtype: torch.dtype = BF16,
    out: int = OUT, columns: int = COLUMNS, start: int = 0,
) -> None:  # fmt: skip
    """The bits of the definition, of what was neither packed nor lifted."""
    lifted, packed, x = problem(pattern, INT8, tokens, backend, out, columns, start)
    tile, bias = replace(tile, dense=pattern == "dense"), torch.randn(out).to(out_dtype)
    found = run_product(lifted, packed, tile, out_dtype, bias, backend=backend)
    assert torch.equal(found, expected(x, packed, out_dtype, bias))


@pytest.mark.parametrize(("pattern", "backend"), FORMS)
@pytest.mark.parametrize("tile", [SMALL, TEAMS], ids=str)
def test_every_form_is_multiplied_exactly(tile: MmaTile, pattern: str, backend: type[Ampere]) -> None:
    assert_exact(tile, pattern, tile.tokens + 9, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "backend"), FORMS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_multiplies_exactly(tile: MmaTile, pattern: str, backend: type[Ampere]) -> None:
    assert_exact(replace(tile, stages=3), pattern, tile.tokens + 9, backend)


@pytest.mark.parametrize(("pattern", "backend"), FORMS)
def test_two_bands_are_one_product(pattern: str, backend: type[Ampere]) -> None:
    lifted, packed, x = problem(pattern, INT8, 9, backend, 300, COLUMNS)
    first, second = (replace(tile, dense=pattern == "dense") for tile in (TEAMS, SMALL))
    bias, bands = torch.randn(300).to(BF16), (Band(first, 256), Band(second, 44))
    assert torch.equal(run_product(lifted, packed, bands, BF16, bias, backend=backend), expected(x, packed, BF16, bias))


@pytest.mark.parametrize("tokens", [1, 8, 17])
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_ragged_tokens_and_every_output(tokens: int, out_dtype: torch.dtype) -> None:
    assert_exact(SMALL, "6:8", tokens, Ampere, out_dtype)


@pytest.mark.parametrize(("pattern", "start"), [("2:4", 1), ("4:6", 4), ("8:10", 7)])
def test_a_shard_that_starts_inside_a_group(pattern: str, start: int) -> None:
    for backend in (Ampere, AmpereSixBits):
        assert_exact(TEAMS, pattern, 5, backend, columns=77, start=start)


@pytest.mark.parametrize(("out", "columns"), [(1, 4), (257, 36), (40, 1500)])
def test_ragged_channels_and_teams_without_a_step(out: int, columns: int) -> None:
    assert_exact(MmaTile(2, 2, split=4, stages=4), "2:4", 5, Ampere, out=out, columns=columns)


@pytest.mark.parametrize("pattern", ["4:6", "dense"])
@pytest.mark.parametrize("dtype", [FP8, BF16, FP16], ids=str)
def test_floats_are_multiplied_within_their_rounding(dtype: torch.dtype, pattern: str) -> None:
    lifted, packed, x = problem(pattern, dtype, 20, Ampere, OUT, COLUMNS)
    bias = torch.randn(OUT)
    found = run_product(lifted, packed, replace(SMALL, dense=pattern == "dense"), FP32, bias, backend=Ampere)
    values, scale = quantize_rows(x, dtype) if dtype == FP8 else (x, torch.ones(len(x), 1))
    factor = scale * (torch.ones(OUT) if packed.scale is None else packed.scale)
    exact = values.double() @ packed.unpack().double().T * factor + bias
    magnitude = values.double().abs() @ packed.unpack().double().abs().T * factor + bias.abs()
    assert_product(found, exact, magnitude, dtype)


def test_no_order_of_warps_changes_a_bit() -> None:
    lifted, packed, _ = problem("4:6", FP8, 40, Ampere, OUT, COLUMNS)
    first = run_product(lifted, packed, TEAMS, backend=Ampere)
    assert torch.equal(run_product(lifted, packed, TEAMS, backend=Ampere, seed=1), first)


WRONG = {
    "copies are not awaited": ("await_copies<STAGES - 3>();", ""),
    "a team does not wait for its threads": ("sync_team(number);\n            multiply", "multiply"),
    "a stage is filled while it is read": ("last = stage, stage = after;", "last = after, stage = after;"),
    "weights of the next step are not loaded": ("[m], after, next, m);", "[m], after, I, m);"),
    "sums are read before they are there": ("(&d[0][0][0])[i];\n        __syncthreads();", "(&d[0][0][0])[i];"),
    "a store goes past the tokens": ("token + row < p.tokens ?", "true ?"),
    "a load goes past the channels": ("min(first_channel + thread + i * TEAM, p.channels - 1)", "10000"),
    "a copy goes past the tokens": ("min(TOKENS, rows - token) * SLAB - own", "TOKENS * SLAB - own"),
}


def is_right(seed: int, edit: tuple[str, str]) -> bool:
    lifted, packed, x = problem("6:8", INT8, 20, Ampere, OUT, COLUMNS)
    found = run_product(lifted, packed, TEAMS, BF16, edit=edit, seed=seed, backend=Ampere)
    return torch.equal(found, expected(x, packed, BF16, None))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_broken_kernel_is_found(wrong: str) -> None:
    with suppress(Fault):  # or the product is wrong: not every order of threads shows every fault
        assert not all(is_right(seed, WRONG[wrong]) for seed in range(3))
