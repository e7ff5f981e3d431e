"""The lift of a mixture's rows against the definition: by token or by row, rows of nobody left alone."""

from __future__ import annotations

import pytest
import torch
from slab_views import slab_view

from slidesparse.errors import InputError
from slidesparse.lifting import expert_lift_kernel as kernel
from slidesparse.lifting.choose import TorchLift
from slidesparse.lifting.expert_lift import lift_routed
from slidesparse.lifting.expert_order import arrange
from slidesparse.lifting.layout import Layout, LiftSpec, LinearTensors, Slabs
from slidesparse.weights.packed import pack_by
from slidesparse.weights.pattern import Pattern

INT8, FP8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
SLABS = Slabs()
LAYOUT = Layout(lifted=True, multiple=1, slabs=SLABS)
ROWS = [[2, 9], [7, -1], [4, -1], [8, -1], [0, 3]]
TOKENS = [4, -1, 0, 4, 2, -1, -1, 1, 3, 0, -1]
POISON = 0xA5


@pytest.mark.parametrize("by", ["token", "row", "itself"])
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize(("pattern", "columns"), [("2:4", 256), ("6:8", 512), ("4:6", 520), ("8:10", 2048)])
def test_rows_are_those_of_their_tokens(
    device: str, monkeypatch: pytest.MonkeyPatch, pattern: str, columns: int, dtype: torch.dtype, by: str
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(kernel, "MOST_COPIES", 2 if by == "token" else 1)
    gather = by != "itself"
    packed = pack_by(torch.zeros(1, columns, dtype=INT8), Pattern.parse(pattern))
    rows, tokens = torch.tensor(ROWS, device=device), torch.tensor(TOKENS, device=device)
    prologue = "none" if gather else "silu_mul"
    shape = (5, columns) if gather else (len(tokens), 2 * columns)
    x = (torch.randint(-40, 41, shape) / 8).to(device, BF16)
    spec = LiftSpec(prologue, x.dtype, dtype, tuple(LAYOUT.order(packed).numbers), LAYOUT)
    lifted = kernel.lift_routed(x, rows, tokens, spec, gather=gather)
    sources = x[tokens.clamp(min=0)] if gather else x
    tensors = LinearTensors(LAYOUT.column_map(packed).to(device), (), None, None, None)
    exact = TorchLift(spec)(sources, None, tensors, 0.0)
    got, wanted = (slab_view(each.values, SLABS).view(torch.uint8)[:, : len(tokens)] for each in (lifted, exact))
    here = tokens >= 0
    if prologue == "none":
        assert torch.equal(got[:, here], wanted[:, here])
        assert torch.equal(lifted.scale[here], exact.scale[here])
    else:  # the sigmoid of the kernel is an ulp or two from torch's
        assert torch.allclose(lifted.scale[here], exact.scale[here], rtol=1e-2)
        assert (got[:, here] != wanted[:, here]).float().mean() < 0.02
    assert bool((got[:, ~here] == POISON).all())


def test_rows_that_no_program_holds_are_gathered_first(device: str) -> None:
    packed = pack_by(torch.zeros(1, 48, dtype=INT8), Pattern.parse("6:8"), k_offset=3)
    x, at = torch.randn(3, 48, dtype=BF16, device=device), arrange(torch.tensor([[0], [1], [0]], device=device), 2, 8)
    spec = LiftSpec("none", BF16, INT8, tuple(LAYOUT.order(packed).numbers), LAYOUT)
    assert kernel.lift_routed(x, at.rows, at.tokens, spec, gather=True) is None
    column_map = LAYOUT.column_map(packed).to(device)
    lifted = lift_routed(x, at, column_map, spec, gather=True)
    tensors = LinearTensors(column_map, (), None, None, None)
    exact = TorchLift(spec)(x[at.tokens.clamp(min=0)], None, tensors, 0.0)
    assert torch.equal(slab_view(lifted.values, SLABS), slab_view(exact.values, SLABS))


def test_rows_of_another_number_are_refused(device: str) -> None:
    x, at = torch.randn(3, 64, dtype=BF16, device=device), arrange(torch.tensor([[0], [1]], device=device), 2, 8)
    for gather, needed in ((True, 2), (False, 16)):
        with pytest.raises(InputError, match=f"needed {needed}"):
            lift_routed(x, at, torch.arange(64), LiftSpec("none", BF16, INT8, (), LAYOUT), gather=gather)
