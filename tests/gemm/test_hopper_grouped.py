"""The grouped product on Hopper without a GPU: it compiles, and weights and launches are as the kernel reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_weights import packed_experts

from slidesparse import InputError
from slidesparse.gemm.hopper import grouped
from slidesparse.gemm.hopper.choose_tiles import GROUPED_TILES
from slidesparse.gemm.hopper.compile import options, sources
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.gemm.kernel import Arguments
from slidesparse.gemm.nvrtc import compile_sources
from slidesparse.gemm.steps import unpack_steps
from slidesparse.layer.weight_form import unlifted
from slidesparse.lifting.expert_order import arrange
from slidesparse.lifting.layout import Lifted
from slidesparse.weights.pattern import COUNTED, Pattern
from slidesparse.weights.quant import Rounding

INT8, FP8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16


@pytest.mark.parametrize(("dtype", "count_bits"), [(INT8, 0), (INT8, 3), (INT8, 4), (FP8, 0), (FP8, 3)], ids=str)
@pytest.mark.parametrize("tile", GROUPED_TILES, ids=str)
def test_every_variant_compiles_well(tile: Tile, dtype: torch.dtype, count_bits: int) -> None:
    code, log = compile_sources(
        sources(count_bits), [*options(tile, dtype, BF16, True, count_bits), "--ptxas-options=-v"]
    )
    assert code[:4] == b"\x7fELF"
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "C75" not in log, log
    assert "warning" not in log, log


@pytest.mark.parametrize("rounding", ["absmax", "6bit"])
@pytest.mark.parametrize("columns", [200, 300])  # with counts, and with metadata
def test_weights_of_experts_come_back(columns: int, rounding: Rounding) -> None:
    experts = packed_experts(3, 300, columns, INT8, rounding=rounding)
    weights, form = HopperExperts().prepare(experts)
    column_map = HopperExperts.layout.column_map(experts[0])
    for packed, steps in zip(experts, weights, strict=True):
        matrix = unpack_steps(steps, form, 300, INT8)
        assert torch.equal(unlifted(matrix, column_map, columns), packed.unpack())


@pytest.mark.parametrize(("rounding", "bits"), [("absmax", 8), ("6bit", 6)])
@pytest.mark.parametrize("pattern", ["2:4", "6:8", "14:16", "16:18"])
def test_experts_take_the_bytes_of_their_form(pattern: str, rounding: Rounding, bits: int) -> None:
    out, columns = 256, 32 * 720  # whole bundles of all of these patterns
    experts = packed_experts(2, out, columns, INT8, pattern, rounding=rounding)
    parsed = Pattern.parse(pattern)
    share = parsed.bytes_per_weight("counts" if parsed.windows in COUNTED else "2:4", bits)
    nbytes = HopperExperts().prepare(experts).weights.nbytes
    assert nbytes == pytest.approx(2 * out * columns * float(share), rel=2e-3)


class Listener:
    """A kernel that keeps what it is launched with."""

    def __init__(self, tile: Tile) -> None:
        self.tile, self.launches = tile, list[Any]()

    def grid(self, tiles: int) -> int:
        return tiles

    def launch(self, arguments: Arguments, grid: int, stream: int) -> None:
        self.launches.append((Arguments.from_buffer_copy(arguments), grid, stream))


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Listener:
    listener = Listener(next(tile for tile in GROUPED_TILES if tile.tokens == 16))
    monkeypatch.setattr(grouped, "load_kernel", lambda *_: listener)
    monkeypatch.setattr(grouped, "is_current", lambda _: True)
    monkeypatch.setattr(grouped, "current_stream", lambda _: 7)
    monkeypatch.setattr(grouped, "empty", lambda rows, columns, dtype, _: torch.empty(rows, columns, dtype=dtype))
    return listener


def lifted(rows: int, columns: int) -> Lifted:
    return Lifted(torch.zeros(rows, columns, dtype=INT8), torch.ones(rows, 1), None)


@pytest.mark.parametrize("wrong", [{"rows": 48}, {"columns": 256}, {"columns": 512}, {"experts": 3}])
def test_what_does_not_fit_is_refused(listen: Listener, wrong: dict[str, int]) -> None:
    sizes = SimpleNamespace(**({"rows": 64, "columns": 384, "experts": 4} | wrong))
    product = HopperExperts()
    operand = product.prepare(packed_experts(4, 320, 256, INT8))
    at = arrange(torch.randint(0, 4, (9, 2)), 4, 16)
    with pytest.raises(InputError):
        product.multiply(
            lifted(sizes.rows, sizes.columns), operand, torch.rand(sizes.experts, 320), at, BF16, listen.tile
        )
    assert not listen.launches
