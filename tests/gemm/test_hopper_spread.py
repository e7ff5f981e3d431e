"""The 2:4 form spread into dense fragments: what instructions read, in which order, and what the compiler makes of it."""

from __future__ import annotations

import hopper_emulator as emulator
import numpy as np
import pytest
import torch
from torch import nn

from slidesparse.gemm import Problem, get_backend
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.compile import SOURCE, compile_source, options
from slidesparse.gemm.hopper.spread import Spread, lane_columns, lane_slabs, why_not_dealt
from slidesparse.gemm.hopper.tiles import BLOCK_BYTES, MULTIPROCESSOR_BYTES, SHARED_BYTES, SPREAD_TILES, spread_tiles
from slidesparse.gemm.hopper.weights import SLABS, step_shapes
from slidesparse.layout import ColumnOrder, slab_view
from slidesparse.linear import SlideLinear, forms_of
from slidesparse.ops import quantize_lift
from slidesparse.packed import PackedWeight, pack_segments
from slidesparse.pattern import Pattern
from slidesparse.prune import prune_mask
from slidesparse.quant import quantize_rows

PATTERNS = ("2:4", "4:6", "6:8", "8:10", "10:12", "12:14")
ROUNDS = {"2:4": 3, "4:6": 3, "6:8": 2, "8:10": 2, "10:12": 1, "12:14": 1}


def _packed(pattern: str, out: int = 70, k_offset: int = 0, missing: int = 0) -> PackedWeight:
    """A weight of whole rounds, of which the last ``missing`` columns do not exist."""
    columns = ROUNDS[pattern] * 4 * lane_columns(Pattern.parse(pattern)) - k_offset - missing
    weight = torch.randn(out, k_offset + columns) * 30
    weight = (weight * prune_mask(weight, pattern)).to(torch.int8)[:, k_offset:].contiguous()
    return pack_segments(weight, pattern, scale=torch.rand(out), k_offset=k_offset)


def _spread(packed: PackedWeight) -> np.ndarray:
    windows, sparse = Spread().prepare(packed)
    return emulator.spread(sparse.numpy(), windows.shape[1], lane_slabs(packed.pattern))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_instructions_read_the_weight_by_the_column_map(pattern: str) -> None:
    packed = _packed(pattern)
    spread, sources = _spread(packed)[:70].view(np.int8), Spread.layout.column_map(packed)
    assert (sources >= 0).sum() == packed.shape[1]
    expected = torch.where(sources < 0, 0, packed.unpack()[:, sources.clamp(min=0)])
    width = spread.shape[1]  # activations are padded to whole slabs
    assert torch.equal(torch.from_numpy(spread.copy()), expected[:, :width])
    assert (sources[width:] < 0).all()


@pytest.mark.parametrize(("k_offset", "missing"), [(0, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("pattern", ["4:6", "6:8"])
def test_int8_product_of_what_instructions_read(pattern: str, k_offset: int, missing: int) -> None:
    packed = _packed(pattern, 130, k_offset, missing)
    x = torch.randn(20, packed.shape[1])
    dealt, _ = quantize_lift(x, Spread.layout.column_map(packed), torch.int8, "spread")
    slabs = slab_view(dealt, SLABS).contiguous().view(torch.uint8).numpy()
    ours, spread = emulator.activations(slabs, 1).view(np.int8)[:20], _spread(packed)[:130].view(np.int8)
    product = ours[:, : spread.shape[1]].astype(np.int64) @ spread.astype(np.int64).T
    exact = quantize_rows(x, torch.int8).values.numpy().astype(np.int64) @ packed.unpack().numpy().astype(np.int64).T
    assert np.array_equal(product, exact)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_shapes_follow_from_the_order_and_the_tensor_is_hoppers(pattern: str) -> None:
    packed = _packed(pattern)
    order, operand = Spread.layout.order(packed), Hopper().prepare(packed)
    assert order is not None
    own = Spread().prepare(packed)
    assert step_shapes(order, 1, 70) == tuple(tensor.shape for tensor in own)
    assert torch.equal(own[1], operand.sparse)
    assert ColumnOrder(*order.numbers) == order  # type: ignore[arg-type] # an operator takes it as numbers


def test_forms_share_the_operand_even_after_a_move() -> None:
    packed = _packed("6:8")
    for names in (("spread", "hopper"), ("hopper", "spread")):
        forms = {form.backend: form for form in forms_of(packed, names)}
        assert tuple(forms) == names
        kept = forms["hopper"].operand[1]
        assert forms["spread"].operand[1] is kept
        for form in forms.values():
            form._apply(torch.clone)
        for form in forms.values():
            form.share(list(forms.values()))
        assert forms["spread"].operand[1] is forms["hopper"].operand[1]
        assert forms["spread"].operand[1] is not kept
        assert forms["spread"].operand[0].shape == (0, 3)


def test_a_layer_counts_a_shared_operand_once() -> None:
    layer = SlideLinear.from_linear(nn.Linear(256, 96), "6:8", method="magnitude")
    layer.forms = nn.ModuleList(forms_of(_packed("6:8"), ("hopper", "spread")))
    sizes = layer.operand_bytes
    assert sizes["hopper"] > 0
    assert sizes["spread"] == 0


def test_what_it_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hopper, "why_not", lambda self, problem: None)
    device = torch.device("cpu")
    backend = get_backend("spread")
    assert backend.why_not(Problem(Pattern(6, 8), torch.int8, 64, 3584, device)) is None
    assert backend.why_not(Problem(Pattern(6, 8), torch.bfloat16, 64, 3584, device)) == "it spreads 8-bit weights only"
    assert why_not_dealt(Pattern(14, 16), 3584) == "a thread cannot hold what it would spread of 14:16"
    assert why_not_dealt(Pattern.parse("4:6@50%"), 3584) == "it takes uniform patterns only"


@pytest.mark.parametrize("tile", SPREAD_TILES, ids=str)
def test_shared_memory_fits(tile: object) -> None:
    for windows in (1, 2, 3, 4):
        for own in spread_tiles(windows):
            assert own.shared_bytes(1) <= SHARED_BYTES
            assert own.blocks * (own.shared_bytes(1) + BLOCK_BYTES) <= MULTIPROCESSOR_BYTES, str(own)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_variant_compiles_well(pattern: str, dtype: torch.dtype) -> None:
    for tile in spread_tiles(Pattern.parse(pattern).group // 2 - 1):
        code, log = compile_source(SOURCE.read_bytes(), [*options(tile, dtype, torch.bfloat16), "--ptxas-options=-v"])
        assert code[:4] == b"\x7fELF"
        assert "0 bytes spill stores, 0 bytes spill loads" in log
        assert "C75" not in log, f"{tile}: {log}"
        assert "warning" not in log, f"{tile}: {log}"
