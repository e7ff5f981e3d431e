"""Chains on the Hopper kernel, with linears that compute on the CPU what they are told by address."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse import InputError
from slidesparse.gemm.chain import Placed
from slidesparse.gemm.hopper import chain as hopper_chain
from slidesparse.gemm.hopper.chain import HopperChain
from slidesparse.gemm.hopper.linear import Weight

TOKENS, HIDDEN, WIDE = 3, 16, 32
FLOAT = torch.float32

Chain = tuple[HopperChain, list["Linear"], list[torch.Tensor]]


def at(address: int | None, rows: int, columns: int, stride: int) -> torch.Tensor:
    """Memory at an address, as a matrix."""
    assert address is not None
    numbers = (rows - 1) * stride + columns
    memory = (ctypes.c_char * (4 * numbers)).from_address(address)
    return torch.frombuffer(memory, dtype=FLOAT).as_strided((rows, columns), (stride, 1))


class Linear:
    """Adds, multiplies by a gain, goes through its workspace, multiplies by a weight: what a linear does, roughly."""

    def __init__(self, out: int, columns: int, first: str) -> None:
        self.first, self.columns, self.out = first, columns, out
        self.workspace, self.reads = 4 * TOKENS * columns, (first, out, columns)
        self.checks, self.takes, self.ready = 0, True, True
        self.lift: Any = SimpleNamespace(
            index=0,
            source=FLOAT,
            tokens=TOKENS,
            shape=(TOKENS, columns * (2 if first == "silu_mul" else 1)),
            columns=SimpleNamespace(columns=columns),
            takes=lambda x: x.shape == self.lift.shape,
            refusal_of_weights=self.refusal_of_weights,
            can_launch=lambda *read: self.ready and not any((number or 0) % 16 for number in read),
        )

    def refusal_of_weights(self, pairs: torch.Tensor, gain: torch.Tensor | None) -> InputError | None:
        wanted = self.columns if "norm" in self.first else 0
        return None if (0 if gain is None else gain.numel()) == wanted else InputError("gain")

    def find(self, form: list[torch.Tensor], scale_w: torch.Tensor | None, bias: torch.Tensor | None) -> Weight | None:
        self.checks += 1
        sparse, dense = form[2:]
        return (sparse.data_ptr(), dense.data_ptr(), None, None, 0) if self.takes else None

    def launch(self, read: Any, total_at: int | None, workspace_at: int, weight: Weight, y_at: int, eps: float) -> None:
        x_at, residual_at, gain_at, _, x_stride, residual_stride = read
        x = at(x_at, *self.lift.shape, x_stride).clone()
        if self.first == "silu_mul":
            x = x[:, : self.columns] * x[:, self.columns :]
        if self.first == "add_rms_norm":
            x += at(residual_at, TOKENS, self.columns, residual_stride)
            at(total_at, TOKENS, self.columns, self.columns).copy_(x)
            x = x * at(gain_at, 1, self.columns, self.columns) + eps
        lifted = at(workspace_at, TOKENS, self.columns, self.columns)
        lifted.copy_(x)
        w = at(weight[0], self.out, self.columns, self.columns)
        at(y_at, TOKENS, self.out, self.out).copy_(lifted @ w.T)
        lifted.fill_(torch.nan)  # no other link may read it


SIZES = [(HIDDEN, WIDE), (4 * WIDE, HIDDEN), (HIDDEN, 2 * WIDE), (HIDDEN + 16, HIDDEN)]
"""Rows and columns of o, gate and up, down, and query, key and value."""

FIRSTS = ("none", "add_rms_norm", "silu_mul", "add_rms_norm")


def block(firsts: tuple[str, ...] = FIRSTS, sizes: list[tuple[int, int]] = SIZES) -> Chain:
    links, tensors = [], []
    for first, size in zip(firsts, sizes, strict=False):
        linear, start = Linear(*size, first), len(tensors)
        tensors += [torch.zeros(1), torch.empty(0), torch.randn(size), torch.zeros(1), torch.ones(linear.out)]
        gain = len(tensors) if "norm" in first else None
        tensors += [torch.rand(linear.columns)] if gain is not None else []
        eps = 0.5 if gain is not None else 0.0
        links.append((linear, Placed(start, start + 4, start + 4, None, gain, first == "add_rms_norm", eps)))
    hopper_chain._known.cache_clear()
    return HopperChain(links), [linear for linear, _ in links], tensors  # type: ignore[arg-type]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(TOKENS, WIDE), torch.randn(TOKENS, HIDDEN + 16)[:, :HIDDEN]


def one_by_one(
    linears: list[Linear], tensors: list[torch.Tensor], x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    given = iter(tensors)
    for linear in linears:
        _, _, w, _, _ = (next(given) for _ in range(5))
        if linear.first == "silu_mul":
            x = x[:, : linear.columns] * x[:, linear.columns :]
        if linear.first == "add_rms_norm":
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

    monkeypatch.setattr(hopper_chain, "empty_here", empty_here)


@pytest.mark.parametrize("links", [FIRSTS[:2], FIRSTS[:3], FIRSTS, FIRSTS + FIRSTS[1:]])
def test_a_chain_computes_what_its_links_do(links: tuple[str, ...]) -> None:
    chain, linears, tensors = block(links, [*SIZES[:3], (HIDDEN, HIDDEN), *SIZES[1:]] if len(links) > 4 else SIZES)
    for _ in range(2):
        x, residual = inputs()
        before = x.clone(), residual.clone()
        given = chain(x, residual, tensors)
        assert given is not None
        for got, wanted in zip(given, one_by_one(linears, tensors, x, residual), strict=True):
            torch.testing.assert_close(got, wanted)
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])


def test_a_chain_that_adds_nothing_hands_the_residual_on() -> None:
    chain, _, tensors = block(("none", "rms_norm"))
    x, residual = inputs()
    given = chain(x, residual, tensors)
    assert given is not None
    assert given[1] is residual


def test_weights_are_checked_once() -> None:
    chain, linears, tensors = block()
    for _ in range(3):
        assert chain(*inputs(), tensors) is not None
    assert [linear.checks for linear in linears] == [1, 1, 1, 1]


def test_weights_that_changed_are_checked_again() -> None:
    chain, linears, tensors = block()
    other = [tensor.clone() for tensor in tensors]
    for given in (tensors, other, tensors):  # another layer of the model is not mistaken for this one
        x, residual = inputs()
        found = chain(x, residual, given)
        assert found is not None
        torch.testing.assert_close(found[0], one_by_one(linears, given, x, residual)[0])
    assert linears[0].checks == 2
    tensors[2].data = torch.randn_like(tensors[2])  # the same object at another address
    x, residual = inputs()
    found = chain(x, residual, tensors)
    assert found is not None
    torch.testing.assert_close(found[0], one_by_one(linears, tensors, x, residual)[0])
    assert linears[0].checks == 3
    tensors[3] = tensors[3].clone()  # another object
    assert chain(*inputs(), tensors) is not None
    assert linears[0].checks == 4
    for change in (lambda t: t.view(torch.float16), lambda t: t[:-1]):  # the same one, at the same address
        before, tensors[4].data = tensors[4].data, change(tensors[4].data)
        checks = linears[0].checks
        assert chain(*inputs(), tensors) is not None
        assert linears[0].checks == checks + 1
        tensors[4].data = before


def test_chains_of_another_kind_check_the_same_tensors_for_themselves() -> None:
    chain, linears, tensors = block(FIRSTS[:2])
    for change in ("reads", "placed"):
        others = [Linear(*SIZES[i], first) for i, first in enumerate(FIRSTS[:2])]
        places = [stage.placed for stage in chain._stages]
        if change == "reads":
            others[1].reads = ("another type",)
        else:
            places[1] = places[1]._replace(scale_w=places[0].scale_w)
        other = HopperChain(list(zip(others, places, strict=True)))  # type: ignore[arg-type]
        assert chain(*inputs(), tensors) is not None
        assert other(*inputs(), tensors) is not None
        assert [linear.checks for linear in others] == [1, 1]
    assert [linear.checks for linear in linears] == [1, 1]


@pytest.mark.parametrize("wrong", [None, torch.ones(HIDDEN - 1)])
def test_a_gain_that_a_link_does_not_take_is_refused(wrong: torch.Tensor | None) -> None:
    chain, _, tensors = block(FIRSTS[:2])
    if wrong is None:
        chain._stages[1] = chain._stages[1]._replace(placed=chain._stages[1].placed._replace(gain=None))
    else:
        tensors[10] = wrong
    assert chain(*inputs(), tensors) is None


def test_weights_that_are_gone_are_forgotten() -> None:
    chain, _, tensors = block()
    assert chain(*inputs(), tensors) is not None
    known = chain._known._found
    assert len(known) == 1
    del tensors[3]
    gc.collect()
    assert not known


def test_what_a_link_does_not_take_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, linears, tensors = block()
    monkeypatch.setattr(Linear, "launch", lambda *_: pytest.fail("launched"))
    x, residual = inputs()
    linears[3].ready = False  # nothing is compiled for it yet
    assert chain(x, residual, tensors) is None
    linears[3].ready = True
    assert chain(x[:, 1:], residual, tensors) is None
    assert chain(x, residual[:, 1:], tensors) is None
    assert chain(x, None, tensors) is None
    linears[0].ready = False  # that is how its call says that activations are not aligned
    assert chain(x, residual, tensors) is None
    linears[0].ready = True
    gain = torch.empty(HIDDEN + 1)[1:]
    assert gain.data_ptr() % 16
    assert chain(x, residual, [*tensors[:10], gain, *tensors[11:]]) is None
    linears[2].takes = False
    assert chain(x, residual, [tensor.clone() for tensor in tensors]) is None
    assert len(chain._known._found) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        [(HIDDEN, WIDE), (2 * WIDE, HIDDEN + 16), (HIDDEN, WIDE)],  # reads past the product before it
        [(HIDDEN, WIDE), (4 * WIDE, HIDDEN), (HIDDEN, WIDE)],
        [(HIDDEN, WIDE), (2 * WIDE, HIDDEN), (2 * HIDDEN, WIDE), (HIDDEN, 2 * HIDDEN)],  # adds a shorter residual
        [(HIDDEN, WIDE), (2 * WIDE + 8, HIDDEN), (HIDDEN, WIDE + 4)],  # rows of the product between are not aligned
    ],
)
def test_links_that_do_not_fit_each_other_are_left_alone(sizes: list[tuple[int, int]]) -> None:
    chain, _, tensors = block(FIRSTS[: len(sizes)], sizes)
    assert chain(*inputs(), tensors) is None
