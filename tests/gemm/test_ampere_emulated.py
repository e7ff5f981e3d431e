"""The kernel for ``mma.sync`` itself, run by an emulator of its PTX: forms, types, teams and ragged edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_ptx import run_product
from ptx_emulator.state import Fault
from tolerances import assert_product

from slidesparse.gemm.ampere.backend import Ampere, AmpereSixBits
from slidesparse.gemm.ampere.tiles import TILES, MmaTile
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.lifting.layout import Lifted
from slidesparse.ops import quantize_lift
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.quant import quantize_rows

INT8, FP8, BF16, FP16, FP32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
OUT, COLUMNS = 300, 600
"""Neither is a multiple of a tile, nor is the lifted length of any pattern one of a slab."""
SMALL, TEAMS = MmaTile(2, 2, stages=3), MmaTile(1, 2, 2, 2, split=2, stages=4)
FORMS = [("2:4", Ampere), ("6:8", Ampere), ("dense", Ampere), ("6:8", AmpereSixBits), ("dense", AmpereSixBits)]


def problem(
    pattern: str, dtype: torch.dtype, tokens: int, backend: type[Ampere], out: int = OUT, columns: int = COLUMNS
) -> tuple[Lifted, PackedWeight, torch.Tensor]:
    """Activations in slabs, a weight, and the activations before they were lifted."""
    torch.manual_seed(tokens)
    weight = torch.randn(out, columns) * 30
    weight = (weight if pattern == "dense" else weight * prune_mask(weight, pattern)).to(dtype)
    weight = weight & -4 if backend.value_bits == 6 else weight
    packed = pack_by(weight, pattern, scale=torch.rand(out) if dtype.itemsize == 1 else None)
    x = torch.randn(tokens, columns).to(dtype if dtype.itemsize == 2 else FP32)
    values, scale = quantize_lift(x, backend.layout.column_map(packed), dtype, backend.name)
    return Lifted(values, scale, None), packed, x


def assert_exact(
    tile: MmaTile, pattern: str, tokens: int, backend: type[Ampere], out_dtype: torch.dtype = BF16, **sizes: int
) -> None:
    """The bits of the definition, of what was neither packed nor lifted."""
    lifted, packed, x = problem(pattern, INT8, tokens, backend, **sizes)
    tile, bias = replace(tile, dense=pattern == "dense"), torch.randn(packed.shape[0]).to(out_dtype)
    values, scale = quantize_rows(x, INT8)
    expected = apply_scales(product(values, packed.unpack()), scale, packed.scale, bias, out_dtype)
    assert torch.equal(run_product(lifted, packed, tile, out_dtype, bias, backend=backend), expected)


@pytest.mark.parametrize(("pattern", "backend"), FORMS)
@pytest.mark.parametrize("tile", [SMALL, TEAMS], ids=str)
def test_every_form_is_multiplied_exactly(tile: MmaTile, pattern: str, backend: type[Ampere]) -> None:
    assert_exact(tile, pattern, tile.tokens + 9, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "backend"), FORMS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_multiplies_exactly(tile: MmaTile, pattern: str, backend: type[Ampere]) -> None:
    assert_exact(replace(tile, stages=3), pattern, tile.tokens + 9, backend)


@pytest.mark.parametrize("tokens", [1, 8, 17])
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_ragged_tokens_and_every_output(tokens: int, out_dtype: torch.dtype) -> None:
    assert_exact(SMALL, "6:8", tokens, Ampere, out_dtype)


@pytest.mark.parametrize(("out", "columns"), [(1, 4), (257, 36), (40, 1500)])
def test_ragged_channels_and_teams_without_a_step(out: int, columns: int) -> None:
    assert_exact(MmaTile(2, 2, split=4, stages=4), "2:4", 5, Ampere, out=out, columns=columns)


@pytest.mark.parametrize("pattern", ["4:6", "dense"])
@pytest.mark.parametrize("dtype", [FP8, BF16, FP16], ids=str)
def test_floats_are_multiplied_within_their_rounding(dtype: torch.dtype, pattern: str) -> None:
    lifted, packed, x = problem(pattern, dtype, 20, Ampere)
    bias = torch.randn(OUT)
    found = run_product(lifted, packed, replace(SMALL, dense=pattern == "dense"), FP32, bias, backend=Ampere)
    values, scale = quantize_rows(x, dtype) if dtype == FP8 else (x, torch.ones(len(x), 1))
    factor = scale * (torch.ones(OUT) if packed.scale is None else packed.scale)
    exact = values.double() @ packed.unpack().double().T * factor + bias
    magnitude = values.double().abs() @ packed.unpack().double().abs().T * factor + bias.abs()
    assert_product(found, exact, magnitude, dtype)


def test_no_order_of_warps_changes_a_bit() -> None:
    lifted, packed, _ = problem("4:6", FP8, 40, Ampere)
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


@pytest.mark.parametrize("wrong", WRONG)
def test_a_broken_kernel_is_found(wrong: str) -> None:
    lifted, packed, x = problem("6:8", INT8, 20, Ampere)
    values, scale = quantize_rows(x, INT8)
    expected = apply_scales(product(values, packed.unpack()), scale, packed.scale, None, BF16)

    def is_right(seed: int) -> bool:  # not every order of threads shows every fault
        try:
            return torch.equal(run_product(lifted, packed, TEAMS, BF16, None, WRONG[wrong], seed, Ampere), expected)
        except (Fault, AssertionError):
            return False

    assert not all(map(is_right, range(3)))
