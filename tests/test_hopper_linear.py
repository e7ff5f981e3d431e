"""Which calls a whole linear takes, and what its two launches are told: on tensors that no kernel reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse.gemm import hopper_linear
from slidesparse.gemm.hopper_linear import HopperLinear, checked
from slidesparse.kernels.columns import Columns

BF16 = torch.bfloat16
TOKENS, COLUMNS, OUT, WIDTH = 5, 64, 40, 128
CPU = -1
"""Index of the device of these tensors."""


class Launches:
    """Stands for the lifting call and the product, and keeps what they were told."""

    def __init__(self, tokens: int, first: str, ready: bool = True) -> None:
        self.lifted: list[tuple[Any, ...]] = []
        self.multiplied: list[tuple[Any, ...]] = []
        self.ready = ready
        self.lift = SimpleNamespace(
            launch=self._lift,
            columns=Columns.identity(COLUMNS),
            source=BF16,
            target=torch.int8,
            quantised=True,
            device=SimpleNamespace(index=CPU),
            tokens=tokens,
            padded=8,
            width=WIDTH,
            shape=(tokens, COLUMNS * (2 if first == "silu_mul" else 1)),
        )

    def _lift(self, *arguments: Any) -> bool:
        self.lifted.append(arguments)
        return self.ready

    def launch(self, *arguments: Any) -> None:
        self.multiplied.append(arguments)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    checked.cache_clear()
    monkeypatch.setattr(hopper_linear, "is_current", lambda device: device == CPU)
    monkeypatch.setattr(
        hopper_linear, "empty_here", lambda rows, columns, dtype: torch.empty(rows, columns, dtype=dtype)
    )


def made(monkeypatch: pytest.MonkeyPatch, first: str = "none", tokens: int = TOKENS, *, ready: bool = True) -> Any:
    launches = Launches(tokens, first, ready)
    monkeypatch.setattr(hopper_linear, "find_run", lambda *_: launches)
    lift: Any = launches.lift
    return HopperLinear(lift, OUT), launches


def weight() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    return torch.empty(0), [torch.ones(3), torch.ones(2)], torch.ones(OUT)


def test_a_weight_runs_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, launches = made(monkeypatch)
    (pairs, operand, scale), x, bias = weight(), torch.ones(TOKENS, COLUMNS, dtype=BF16), torch.ones(OUT)
    arguments = (x, pairs, operand, scale, bias, None, None, 0.0)
    assert linear(*arguments) is None
    assert not launches.lifted
    linear.learn(pairs, operand, scale)
    y, total = linear(*arguments)
    assert y.shape == (TOKENS, OUT)
    assert y.dtype == BF16
    assert total is None
    ((device, x_at, *nothing, values_at, scale_at, x_stride, residual_stride, eps),) = launches.lifted
    assert (device, x_at, x_stride, residual_stride, eps) == (CPU, x.data_ptr(), COLUMNS, 0, 0.0)
    assert nothing == [None] * 4
    assert scale_at == values_at + 8 * WIDTH  # behind the values, padding included
    sparse, dense = operand
    told = (values_at, scale_at, sparse.data_ptr(), dense.data_ptr(), scale.data_ptr(), bias, y)
    assert launches.multiplied == [told]


def test_norms_get_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, launches = made(monkeypatch, "add_rms_norm")
    pairs, operand, scale = weight()
    linear.learn(pairs, operand, scale)
    rows = torch.ones(TOKENS, 3 * COLUMNS, dtype=BF16)
    x, residual, gain = rows[:, :COLUMNS], rows[:, COLUMNS : 2 * COLUMNS], torch.ones(COLUMNS, dtype=BF16)
    _, total = linear(x, pairs, operand, scale, None, gain, residual, 1e-6)
    assert total.shape == x.shape
    addresses = tuple(tensor.data_ptr() for tensor in (x, residual, total, gain))
    ((_, *told, _, _, _, x_stride, residual_stride, eps),) = launches.lifted
    assert tuple(told) == addresses
    assert (x_stride, residual_stride, eps) == (3 * COLUMNS, 3 * COLUMNS, 1e-6)


def test_what_is_known_holds_for_all_numbers_of_tokens_and_for_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, _), (other, _) = made(monkeypatch), made(monkeypatch, tokens=1)
    pairs, operand, scale = weight()
    one.learn(pairs, operand, scale)
    x = torch.ones(1, COLUMNS, dtype=BF16)
    assert other(x, pairs, operand, scale, None, None, None, 0.0) is not None
    for elsewhere in (([torch.ones(3), operand[1]], scale), (operand, torch.ones(OUT)), (operand, None)):
        assert other(x, pairs, *elsewhere, None, None, None, 0.0) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.ones(TOKENS + 1, COLUMNS, dtype=BF16)},
        {"x": torch.ones(TOKENS, COLUMNS, dtype=torch.float16)},
        {"x": torch.ones(COLUMNS, TOKENS, dtype=BF16).t()},
        {"bias": torch.ones(OUT - 1)},
        {"bias": torch.ones(OUT, dtype=torch.int32)},
        {"bias": torch.ones(2 * OUT)[::2]},
        {"gain": torch.ones(COLUMNS)},
        {"gain": torch.ones(COLUMNS - 1, dtype=BF16)},
        {"residual": torch.ones(TOKENS, COLUMNS - 1, dtype=BF16)},
        {"residual": torch.ones(COLUMNS, TOKENS, dtype=BF16).t()},
    ],
    ids=lambda wrong: f"{next(iter(wrong))}-{list(next(iter(wrong.values())).shape)}",
)
def test_what_the_kernels_could_not_read_is_left_to_the_parts(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, torch.Tensor]
) -> None:
    linear, launches = made(monkeypatch, "add_rms_norm")
    pairs, operand, scale = weight()
    linear.learn(pairs, operand, scale)
    rows = torch.ones(TOKENS, COLUMNS, dtype=BF16)
    right = {"x": rows, "bias": torch.ones(OUT), "gain": torch.ones(COLUMNS, dtype=BF16), "residual": rows}

    def run(x: torch.Tensor, bias: torch.Tensor, gain: torch.Tensor, residual: torch.Tensor) -> Any:
        return linear(x, pairs, operand, scale, bias, gain, residual, 1e-6)

    assert run(**(right | wrong)) is None
    assert not launches.lifted
    assert run(**right) is not None


def test_no_product_follows_where_nothing_was_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, launches = made(monkeypatch, ready=False)
    pairs, operand, scale = weight()
    linear.learn(pairs, operand, scale)
    assert linear(torch.ones(TOKENS, COLUMNS, dtype=BF16), pairs, operand, scale, None, None, None, 0.0) is None
    assert launches.lifted
    assert not launches.multiplied


def test_another_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, launches = made(monkeypatch)
    pairs, operand, scale = weight()
    linear.learn(pairs, operand, scale)
    monkeypatch.setattr(hopper_linear, "is_current", lambda _: False)
    assert linear(torch.ones(TOKENS, COLUMNS, dtype=BF16), pairs, operand, scale, None, None, None, 0.0) is None
    assert not launches.lifted
