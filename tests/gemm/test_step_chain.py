"""Chains on kernels of weights in steps, with linears that compute on the CPU what they are told by address."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse import InputError
from slidesparse.base.log import log_once
from slidesparse.gemm import step_chain
from slidesparse.gemm.launch import WeightAddresses
from slidesparse.gemm.spec import Slots
from slidesparse.gemm.step_chain import CheckedWeight, KnownWeights, StepChain
from slidesparse.lifting.addresses import LiftInputs
from slidesparse.lifting.layout import LinearTensors

TOKENS, HIDDEN, WIDE = 3, 16, 32
FLOAT = torch.float32
ONE_BY_ONE = torch.empty(0), None
"""What the default gives."""

EACH: list[Any] = []
"""What the default was given."""

Chain = tuple[StepChain, list["Linear"], list[torch.Tensor]]


def at(address: int | None, rows: int, columns: int, stride: int) -> torch.Tensor:
    """Memory at an address, as a matrix."""
    assert address is not None
    numbers = (rows - 1) * stride + columns
    memory = (ctypes.c_char * (4 * numbers)).from_address(address)
    return torch.frombuffer(memory, dtype=FLOAT).as_strided((rows, columns), (stride, 1))


class Linear:
    """Adds, multiplies by a norm's weight, goes through its workspace, multiplies by a weight: what a linear does."""

    def __init__(self, out: int, columns: int, prologue: str) -> None:
        self.prologue, self.columns, self.out = prologue, columns, out
        self.workspace_bytes, self.kind = 4 * TOKENS * columns, (prologue, out, columns)
        self.checks, self.readable, self.here = 0, True, True
        self.launcher = SimpleNamespace(ready=True)
        self.lift: Any = SimpleNamespace(
            index=0,
            source=FLOAT,
            tokens=TOKENS,
            shape=(TOKENS, columns * (2 if prologue == "silu_mul" else 1)),
            order=SimpleNamespace(in_features=columns),
            launcher=self.launcher,
            is_here=lambda: self.here,
            is_rows=lambda x: x.shape == self.lift.shape,
            refusal_of_norm_weight=self.refusal_of_norm_weight,
            can_launch=lambda inputs: self.launcher.ready and not any((number or 0) % 16 for number in inputs),
        )

    def refusal_of_norm_weight(self, norm_weight: torch.Tensor | None) -> InputError | None:
        wanted = self.columns if "norm" in self.prologue else 0
        return None if (0 if norm_weight is None else norm_weight.numel()) == wanted else InputError("norm_weight")

    def weight_addresses(self, tensors: LinearTensors) -> WeightAddresses | None:
        self.checks += 1
        (steps,) = tensors.operand
        return WeightAddresses(steps.data_ptr(), None, None, 0) if self.readable else None

    def launch(
        self, inputs: LiftInputs, total: int | None, workspace: int, weight: WeightAddresses, y: int, eps: float
    ) -> None:
        x = at(inputs.x, *self.lift.shape, inputs.x_stride).clone()
        if self.prologue == "silu_mul":
            x = x[:, : self.columns] * x[:, self.columns :]
        if self.prologue == "add_rms_norm":
            assert total != inputs.residual  # the walking kernel reads it again after it has written the new one
            x += at(inputs.residual, TOKENS, self.columns, inputs.residual_stride)
            at(total, TOKENS, self.columns, self.columns).copy_(x)
            x = x * at(inputs.norm_weight, 1, self.columns, self.columns) + eps
        lifted = at(workspace, TOKENS, self.columns, self.columns)
        lifted.copy_(x)
        w = at(weight.weights, self.out, self.columns, self.columns)
        at(y, TOKENS, self.out, self.out).copy_(lifted @ w.T)
        lifted.fill_(torch.nan)  # no other linear may read it


SIZES = [(HIDDEN, WIDE), (4 * WIDE, HIDDEN), (HIDDEN, 2 * WIDE), (HIDDEN + 16, HIDDEN)]
"""Rows and columns of o, gate and up, down, and query, key and value."""

PROLOGUES = ("none", "add_rms_norm", "silu_mul", "add_rms_norm")


def block(prologues: tuple[str, ...] = PROLOGUES, sizes: list[tuple[int, int]] = SIZES) -> Chain:
    linears, tensors = [], []
    for prologue, size in zip(prologues, sizes, strict=False):
        linear, start = Linear(*size, prologue), len(tensors)
        tensors += [torch.zeros(1), torch.randn(size), torch.ones(linear.out)]
        norm_weight = len(tensors) if "norm" in prologue else None
        tensors += [torch.rand(linear.columns)] if norm_weight is not None else []
        eps = 0.5 if norm_weight is not None else 0.0
        slots = Slots(range(start, start + 2), start + 2, None, norm_weight, prologue == "add_rms_norm", eps)
        linears.append((linear, slots))
    step_chain._known.cache_clear()
    return StepChain(linears, "hopper"), [linear for linear, _ in linears], tensors  # type: ignore[arg-type]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(TOKENS, WIDE), torch.randn(TOKENS, HIDDEN + 16)[:, :HIDDEN]


def one_by_one(
    linears: list[Linear], tensors: list[torch.Tensor], x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    given = iter(tensors)
    for linear in linears:
        _, w, _ = (next(given) for _ in range(3))
        if linear.prologue == "silu_mul":
            x = x[:, : linear.columns] * x[:, linear.columns :]
        if linear.prologue == "add_rms_norm":
            residual = x + residual
            x = residual * next(given) + 0.5
        x = x @ w.T
    return x, residual


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty_here(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows, columns), 0x7F, dtype=torch.uint8) if dtype == torch.uint8 else poisoned(rows, columns)

    def poisoned(rows: int, columns: int) -> torch.Tensor:
        return torch.full((rows, columns), torch.nan)

    monkeypatch.setattr(step_chain, "empty_here", empty_here)

    def each(x: torch.Tensor, residual: torch.Tensor | None, tensors: list[torch.Tensor]) -> Any:
        EACH[:] = x, residual, tensors
        return ONE_BY_ONE

    monkeypatch.setattr(step_chain, "OneByOne", lambda linears: each)
    log_once.cache_clear()


@pytest.mark.parametrize("prologues", [PROLOGUES[:2], PROLOGUES[:3], PROLOGUES, PROLOGUES + PROLOGUES[1:]])
def test_a_chain_computes_what_its_linears_do(prologues: tuple[str, ...]) -> None:
    more = [*SIZES[:3], (HIDDEN, HIDDEN), *SIZES[1:]]
    chain, linears, tensors = block(prologues, more if len(prologues) > 4 else SIZES)
    for _ in range(2):
        x, residual = inputs()
        before = x.clone(), residual.clone()
        given = chain(x, residual, tensors)
        assert given is not ONE_BY_ONE
        for got, wanted in zip(given, one_by_one(linears, tensors, x, residual), strict=True):
            torch.testing.assert_close(got, wanted)
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])


def test_a_chain_that_adds_nothing_hands_the_residual_on() -> None:
    chain, _, tensors = block(("none", "rms_norm"))
    x, residual = inputs()
    given = chain(x, residual, tensors)
    assert given is not ONE_BY_ONE
    assert given[1] is residual


def test_weights_that_changed_are_checked_again() -> None:
    chain, linears, tensors = block()
    other = [tensor.clone() for tensor in tensors]
    for given in (tensors, other, tensors):  # another layer of the model is not mistaken for this one
        x, residual = inputs()
        found = chain(x, residual, given)
        assert found is not ONE_BY_ONE
        torch.testing.assert_close(found[0], one_by_one(linears, given, x, residual)[0])
    assert linears[0].checks == 2
    tensors[1].data = torch.randn_like(tensors[1])  # the same object at another address
    x, residual = inputs()
    found = chain(x, residual, tensors)
    assert found is not ONE_BY_ONE
    torch.testing.assert_close(found[0], one_by_one(linears, tensors, x, residual)[0])
    assert linears[0].checks == 3


def test_chains_of_another_kind_check_the_same_tensors_for_themselves() -> None:
    chain, linears, tensors = block(PROLOGUES[:2])
    for change in ("kind", "slots"):
        others = [Linear(*SIZES[i], prologue) for i, prologue in enumerate(PROLOGUES[:2])]
        slots = [chained.slots for chained in chain._linears]
        if change == "kind":
            others[1].kind = ("another type",)
        else:
            slots[1] = slots[1]._replace(scale=slots[0].scale)
        other = StepChain(list(zip(others, slots, strict=True)), "hopper")  # type: ignore[arg-type]
        assert chain(*inputs(), tensors) is not ONE_BY_ONE
        assert other(*inputs(), tensors) is not ONE_BY_ONE
        assert [linear.checks for linear in others] == [1, 1]
    assert [linear.checks for linear in linears] == [1, 1]


@pytest.mark.parametrize("wrong", [None, torch.ones(HIDDEN - 1)])
def test_a_norm_weight_that_a_linear_does_not_read_is_refused(wrong: torch.Tensor | None) -> None:
    chain, _, tensors = block(PROLOGUES[:2])
    if wrong is None:
        chain._linears[1] = chain._linears[1]._replace(slots=chain._linears[1].slots._replace(norm_weight=None))
    else:
        tensors[6] = wrong
    assert chain(*inputs(), tensors) is ONE_BY_ONE


def test_weights_that_are_gone_are_forgotten() -> None:
    chain, _, tensors = block()
    assert chain(*inputs(), tensors) is not ONE_BY_ONE
    known = chain._known._checked
    assert len(known) == 1
    del tensors[2]
    gc.collect()
    assert not known


WEIGHTS = "a weight, scale, bias or norm weight is not as its kernel reads it"
ROWS = "activations or residual are not aligned rows on the current device"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Reasons that were logged since this was asked for the last time."""
    start = f"slidesparse: a chain of 4 linears on hopper ({WIDE} -> {HIDDEN + 16}) run one by one: "
    assert all(message.startswith(start) for message in caplog.messages)
    reasons = [message.removeprefix(start) for message in caplog.messages]
    caplog.clear()
    return reasons


def test_what_no_launch_reads_is_run_one_by_one_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="slidesparse")
    chain, linears, tensors = block()
    monkeypatch.setattr(Linear, "launch", lambda *_: pytest.fail("launched"))
    x, residual = inputs()
    linears[3].launcher.ready = False  # nothing is compiled for it yet, which is no reason
    assert chain(x, residual, tensors) is ONE_BY_ONE
    assert all(got is given for got, given in zip(EACH, (x, residual, tensors), strict=True))
    assert said(caplog) == []
    linears[3].launcher.ready = True
    assert chain(x[:, 16:], residual, tensors) is ONE_BY_ONE  # aligned, and of another width
    assert said(caplog) == [ROWS]
    log_once.cache_clear()
    assert chain(x, residual[:, :8], tensors) is ONE_BY_ONE
    assert said(caplog) == [ROWS]
    assert chain(x, residual[:, 1:], tensors) is ONE_BY_ONE
    assert chain(x, None, tensors) is ONE_BY_ONE
    assert said(caplog) == []  # once
    linears[0].here = False  # on a device that is not the current one
    assert chain(x, residual, tensors) is ONE_BY_ONE
    linears[0].here = True
    aside = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    assert aside.data_ptr() % 16
    assert chain(aside, residual, tensors) is ONE_BY_ONE
    norm_weight = torch.empty(HIDDEN + 1)[1:]
    assert norm_weight.data_ptr() % 16
    assert chain(x, residual, [*tensors[:6], norm_weight, *tensors[7:]]) is ONE_BY_ONE
    assert said(caplog) == [WEIGHTS]
    log_once.cache_clear()
    linears[2].readable = False
    assert chain(x, residual, [tensor.clone() for tensor in tensors]) is ONE_BY_ONE
    assert said(caplog) == [WEIGHTS]
    assert len(chain._known._checked) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        [(HIDDEN, WIDE), (2 * WIDE, HIDDEN + 16), (HIDDEN, WIDE)],  # reads past the product before it
        [(HIDDEN, WIDE), (4 * WIDE, HIDDEN), (HIDDEN, WIDE)],
        [(HIDDEN, WIDE), (2 * WIDE, HIDDEN), (2 * HIDDEN, WIDE), (HIDDEN, 2 * HIDDEN)],  # adds a shorter residual
        [(HIDDEN, WIDE), (2 * WIDE + 8, HIDDEN), (HIDDEN, WIDE + 4)],  # rows of the product between are not aligned
    ],
)
def test_linears_that_do_not_fit_each_other_are_run_one_by_one(
    sizes: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="slidesparse")
    chain, linears, tensors = block(PROLOGUES[: len(sizes)], sizes)
    for _ in range(2):
        assert chain(*inputs(), tensors) is ONE_BY_ONE
    (message,) = caplog.messages
    assert message.startswith(f"slidesparse: a chain of {len(sizes)} linears on hopper ")
    aligned = all(linear.out % 16 == 0 for linear in linears)
    assert message.endswith("as the one before it gives" if aligned else "rows that are no multiple of 16 numbers")


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "transposed": lambda tensor: tensor.t_(),
    "resized": lambda tensor: tensor.resize_(tensor.shape[0] - 1, tensor.shape[1]),
    "flattened": lambda tensor: tensor.resize_(tensor.numel()),
    "restrided": lambda tensor: tensor.as_strided_(tensor.shape, (1, tensor.shape[0])),
    "retyped": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "moved": lambda tensor: setattr(tensor, "data", tensor.data.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", [0, 1])
def test_tensors_that_change_in_place_are_no_longer_known(which: int, change: str) -> None:
    # The same objects with, but for the last change, the same bytes at the same address.
    known, tensors = KnownWeights(), [torch.randn(16, 32), torch.randn(16, 16)]
    address, weights = tensors[which].data_ptr(), [CheckedWeight(WeightAddresses(1, None, None, 0), None)]
    known.add(tensors, weights)
    assert known.find(tensors) is weights
    CHANGES[change](tensors[which])
    assert (tensors[which].data_ptr() == address) == (change != "moved")
    assert known.find(tensors) is None
    known.add(tensors, weights)
    assert known.find(tensors) is weights
