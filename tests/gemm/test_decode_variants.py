"""The variants of benchmarks/decode still fit the source, compile well, and multiply exactly: no GPU needed."""

from __future__ import annotations

import inspect
import sys
from itertools import product
from pathlib import Path

import hopper_ptx
import pytest
import torch
from hopper_ptx import run_product
from test_hopper_compile import BLOCK_BYTES, MULTIPROCESSOR_BYTES
from test_hopper_emulated import expected, problem

from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.compile import compile_sources, options
from slidesparse.gemm.hopper.tiles import TILES, Tile

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from decode.patching import Misfit, Variant, changed_lifts, changed_sources
from decode.variants import LIFT, VARIANTS

FEW = [tile for tile in TILES if str(tile) in {"16x64b3", "16x64/3b3", "64x64b2"}]
"""The runner compiles the others on its way."""

CASES = [
    pytest.param(variant, tile, bits, id=f"{variant.name}-{tile}-{bits}")
    for variant, tile, bits in product(VARIANTS, FEW, (6, 8))
    if variant.takes(tile, bits)
]
EMULATED = [case for case in CASES if (str(case.values[1]), case.values[2]) in {("16x64b3", 6), ("16x64/3b3", 8)}]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "tile", "bits"), CASES)
def test_every_variant_fits_the_source_and_compiles_well(variant: Variant, tile: Tile, bits: int) -> None:
    own = variant.tile(tile)
    opts = [*options(own, torch.int8, torch.bfloat16, value_bits=bits), "--ptxas-options=-v"]
    _, log = compile_sources(changed_sources(variant, 0, bits), opts)
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "C75" not in log, log
    assert "warning" not in log, log
    assert own.blocks * (own.shared_bytes(1, 0, bits) + BLOCK_BYTES) <= MULTIPROCESSOR_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "tile", "bits"), EMULATED)
def test_every_variant_multiplies_exactly(
    variant: Variant, tile: Tile, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = HopperSixBits if bits == 6 else Hopper
    monkeypatch.setattr(hopper_ptx, "sources", lambda *form: changed_sources(variant, *form))
    hopper_ptx.program.cache_clear()
    for pattern, tokens in (("6:8", tile.tokens + 9), ("2:4", 1), ("4:6", tile.tokens)):
        lifted, packed, x = problem(pattern, torch.int8, tokens, backend)
        found = run_product(lifted, packed, variant.tile(tile), torch.bfloat16, seed=tokens, backend=backend)
        assert torch.equal(found, expected(x, packed, torch.bfloat16, None)), pattern
    hopper_ptx.program.cache_clear()


def test_a_text_that_is_gone_is_an_error() -> None:
    with pytest.raises(Misfit, match="0 times"):
        changed_sources(Variant("gone", "", 0, "", edits=(("ring.cuh", "no such text", ""),)))


def test_a_lift_that_allows_the_next_kernel_first() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    kernels = changed_lifts((LIFT,))
    assert sorted(kernels) == ["held_kernel", "walking_kernel"]
    begin = kernels["held_kernel"].fn.__globals__["begin"]
    assert "launch_dependents; griddepcontrol.wait" in inspect.getsource(begin.fn)
