"""Which tensors a whole linear takes, what its two launches are told, and what runs where it takes none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse import InputError, ops
from slidesparse.gemm.hopper import linear as hopper_linear
from slidesparse.gemm.hopper.launch import BIAS_TYPES
from slidesparse.gemm.hopper.linear import HopperLinear
from slidesparse.gemm.hopper.weights import step_shapes
from slidesparse.layout import Columns
from slidesparse.linear import SlideLinear

BF16 = torch.bfloat16
TOKENS, OUT = 5, 40
COLUMNS = Columns(64, 8, 0, 8, 0, 128, 0)
VALUES = 8 * COLUMNS.width
"""Bytes of the lifted values, padded tokens included."""

READ = (16, None, None, None, 64, 0)
"""What the lifting call says of the tensors that it reads."""

Weight = tuple[list[torch.Tensor], torch.Tensor]
"""A form (column map, pairs, operand) and its scale."""


class Launches:
    """Stands for the lifting call and for the product's run, and keeps what they were told."""

    slab_bytes = VALUES

    def __init__(self, *, quantised: bool = True, takes: bool = True) -> None:
        self.lifted: list[tuple[Any, ...]] = []
        self.multiplied: list[tuple[Any, ...]] = []
        self.lift: Any = SimpleNamespace(
            launch=lambda *arguments: self.lifted.append(arguments),
            read=lambda *tensors: READ if takes else None,
            columns=COLUMNS,
            first="none",
            source=BF16,
            target=torch.int8,
            quantised=quantised,
            device=torch.device("cpu"),
            index=0,
            tokens=TOKENS,
            width=COLUMNS.width,
            shape=(TOKENS, COLUMNS.columns),
        )

    def launch(self, *arguments: Any) -> None:
        self.multiplied.append(arguments)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hopper_linear, "empty_here", lambda rows, columns, dtype: torch.empty(rows, columns, dtype=dtype)
    )


def made(monkeypatch: pytest.MonkeyPatch, **options: bool) -> tuple[HopperLinear, Launches]:
    launches = Launches(**options)
    monkeypatch.setattr(hopper_linear, "find_run", lambda *_: launches)
    return HopperLinear(launches.lift, OUT), launches


def weight() -> Weight:
    operand = [torch.empty(shape, dtype=torch.uint8) for shape in step_shapes(COLUMNS, 1, OUT)]
    return [torch.empty(0), torch.empty(0), *operand], torch.ones(OUT)


def rows() -> torch.Tensor:
    return torch.ones(TOKENS, COLUMNS.columns, dtype=BF16)


def test_both_launches_get_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, launches = made(monkeypatch)
    (form, scale), x, bias = weight(), rows(), torch.ones(OUT)
    given = linear(x, form, scale, bias, None, None, 0.0)
    assert given is not None
    y, total = given
    assert y.shape == (TOKENS, OUT)
    assert y.dtype == BF16
    assert total is None
    ((device, *read, total_at, values_at, scale_at, eps),) = launches.lifted
    assert tuple(read) == READ
    assert (device, total_at, scale_at, eps) == (0, None, values_at + VALUES, 0.0)
    sparse, dense = form[2:]
    of_weight = sparse.data_ptr(), dense.data_ptr(), scale.data_ptr(), bias.data_ptr(), BIAS_TYPES[bias.dtype]
    assert launches.multiplied == [(values_at, scale_at, *of_weight, y.data_ptr())]


def test_a_residual_gives_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, launches = made(monkeypatch)
    form, scale = weight()
    given = linear(rows(), form, scale, None, torch.ones(COLUMNS.columns, dtype=BF16), rows(), 1e-6)
    assert given is not None
    total = given[1]
    assert total is not None
    assert (total.shape, total.dtype) == (rows().shape, BF16)
    ((*_, total_at, _, _, eps),) = launches.lifted
    assert (total_at, eps) == (total.data_ptr(), 1e-6)


def test_lifting_alone_writes_no_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, launches = made(monkeypatch, quantised=False)
    form, _ = weight()
    assert linear(rows(), form, None, None, None, None, 0.0) is not None
    ((*_, scale_at, _),) = launches.lifted
    ((_, scale_x_at, _, _, *scale_and_bias, _),) = launches.multiplied
    assert (scale_at, scale_x_at, *scale_and_bias) == (None, None, None, None, 0)


SPARSE, DENSE = weight()[0][2:]


@pytest.mark.parametrize(
    ("operand", "scale", "bias"),
    [
        ([SPARSE[:, :0], SPARSE[:, :0]], torch.ones(OUT), None),
        ([SPARSE, DENSE[:, :1]], torch.ones(OUT), None),
        ([SPARSE, DENSE.to("meta")], torch.ones(OUT), None),
        ([SPARSE, DENSE], torch.ones(OUT - 1), None),
        ([SPARSE, DENSE], torch.ones(OUT, dtype=BF16), None),
        ([SPARSE, DENSE], torch.ones(2 * OUT)[::2], None),
        ([SPARSE, DENSE], torch.ones(OUT), torch.ones(OUT - 1)),
        ([SPARSE, DENSE], torch.ones(OUT), torch.ones(OUT, dtype=torch.int32)),
        ([SPARSE, DENSE], torch.ones(OUT), torch.ones(OUT, device="meta")),
    ],
)
def test_a_weight_that_the_kernel_could_not_read_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, operand: list[torch.Tensor], scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    linear, launches = made(monkeypatch)
    assert linear(rows(), [torch.empty(0), torch.empty(0), *operand], scale, bias, None, None, 0.0) is None
    assert not launches.lifted


def test_activations_that_the_lifting_call_does_not_take_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, launches = made(monkeypatch, takes=False)
    assert linear(rows(), *weight(), None, None, None, 0.0) is None
    assert not launches.lifted


def test_the_operator_runs_the_parts_where_the_whole_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.Linear(64, 32).to(BF16)
    layer = SlideLinear.from_linear(linear, "6:8", "int8", method="magnitude", backend="reference")
    x, own = torch.randn(3, 64, dtype=BF16), torch.randn(3, 32, dtype=BF16)
    expected, step = layer(x), ops._step
    answers: list[tuple[torch.Tensor, None] | None] = [None, (own, None), None]
    whole = lambda *_: answers.pop(0)  # noqa: E731
    monkeypatch.setattr(ops, "_step", lambda *sizes: step(*sizes)._replace(whole=whole))
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x), own)
    with pytest.raises(InputError, match="NaN"):
        layer(x * torch.nan)
    assert not answers
