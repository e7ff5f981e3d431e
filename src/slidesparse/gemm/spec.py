"""Specs: what the operators are told of a linear, or of several in a row, as one string.

A layer keeps its weight in the form of every backend that some number of tokens needs. Backends want different
activations, so the number of tokens decides before anything is quantised; and since it is known only when the operator
runs, under torch.compile and CUDA graphs too, the operator decides. One string says everything that does not change
from call to call: every argument of an operator costs host time on every call, and a longer string costs no more than
a short one.

Between two attentions a decoder layer is four linears in a row: the output projection, gate and up after a norm, down
after SiLU, and the next layer's query, key and value after a norm. As one operator, ``chain``, they cost the host one
dispatch.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from slidesparse.base.typed_json import decode, parse_json
from slidesparse.errors import InputError
from slidesparse.layout import LinearTensors
from slidesparse.prologue import NORMS, Prologue
from slidesparse.quant import parse_dtype


@dataclass(frozen=True)
class Route:
    """From ``from_tokens`` tokens on, up to the next route's, this backend runs."""

    from_tokens: int
    backend: str


@dataclass(frozen=True)
class FormSpec:
    """One form of a weight.

    Attributes:
        backend: The backend that reads it.
        order: :attr:`slidesparse.layout.ColumnOrder.numbers` of its activations; empty where the torch definition
            must write them.
        tensors: How many of the operator's tensors are its own: column map, index of pairs (or an empty tensor),
            operand.
    """

    backend: str
    order: tuple[int, ...]
    tensors: int


@dataclass(frozen=True)
class WeightSpec:
    """A layer's weight.

    Attributes:
        out_features: Its rows.
        dtype: Its type, a name of :data:`slidesparse.quant.DTYPES`.
        forms: In the order of their tensors.
        routes: The first one from 0 tokens on, each through one of the forms.

    Raises:
        InputError: Other routes.
    """

    out_features: int
    dtype: str
    forms: tuple[FormSpec, ...]
    routes: tuple[Route, ...]

    def __post_init__(self) -> None:
        backends = {form.backend for form in self.forms}
        if not self._starts or self._starts[0] or any(route.backend not in backends for route in self.routes):
            needed = f"the first one from 0 tokens on, each through one of {sorted(backends)}"
            raise InputError("routes of a weight", got=[(r.from_tokens, r.backend) for r in self.routes], needed=needed)

    @property
    def tensors(self) -> int:
        """How many of the operator's tensors are its own."""
        return sum(form.tensors for form in self.forms)

    def pick(self, tokens: int) -> tuple[FormSpec, int]:
        """Return the form that multiplies M tokens, and where its tensors begin."""
        return self._chosen[bisect_right(self._starts, tokens) - 1]

    def through(self, backend: str, first: int, last: int) -> WeightSpec:
        """Return the same weight, which from ``first`` to ``last`` tokens runs on one of its backends."""
        after = Route(last + 1, self.pick(last + 1)[0].backend)
        before = (route for route in self.routes if route.from_tokens < first)
        rest = (route for route in self.routes if route.from_tokens > after.from_tokens)
        routes = [*before, Route(first, backend), after, *rest]
        changes = [r for i, r in enumerate(routes) if not i or r.backend != routes[i - 1].backend]
        return replace(self, routes=tuple(changes))

    @cached_property
    def text(self) -> str:
        """The spec as a string, for :func:`parse_weight`. Making it takes longer than two launches, so it is kept."""
        return _to_text(self)

    @cached_property
    def weight_dtype(self) -> torch.dtype:
        """The type itself."""
        return parse_dtype(self.dtype)

    @cached_property
    def _starts(self) -> list[int]:
        return [route.from_tokens for route in self.routes]

    @cached_property
    def _chosen(self) -> list[tuple[FormSpec, int]]:
        starts = accumulate((form.tensors for form in self.forms), initial=0)
        forms = {form.backend: (form, start) for form, start in zip(self.forms, starts, strict=False)}
        return [forms[route.backend] for route in self.routes]


@dataclass(frozen=True)
class LinearSpec:
    """One linear of a chain. Its tensors are those of its weight, then scale, bias and gain if it has them.

    Attributes:
        prologue: Applied to its activations before they are quantised.
        eps: Of the norm.
        scaled: Its weight has a scale.
        biased: It has a bias.
        weight: The weight.
    """

    prologue: Prologue
    eps: float
    scaled: bool
    biased: bool
    weight: WeightSpec

    @property
    def tensors(self) -> int:
        """How many of the operator's tensors are its own."""
        return self.weight.tensors + self.scaled + self.biased + (self.prologue in NORMS)


class Slots(NamedTuple):
    """Where the tensors of one linear are among those of its chain.

    Attributes:
        form: Those of the form of its weight that runs: column map, index of pairs, operand.
        scale: Its scale; None without, as below.
        bias: Its bias.
        gain: Its gain.
        adds: It takes the residual, and gives a new one.
        eps: Of its norm.
    """

    form: range
    scale: int | None
    bias: int | None
    gain: int | None
    adds: bool
    eps: float

    @property
    def read(self) -> list[int]:
        """Slots of the tensors that kernels read: all but the column map."""
        slots = *self.form[1:], self.scale, self.bias, self.gain
        return [slot for slot in slots if slot is not None]

    def pick(self, tensors: Sequence[torch.Tensor]) -> LinearTensors:
        """Return the linear's tensors among the chain's."""
        form, scale, bias, gain, _, _ = self
        column_map, pairs, *operand = tensors[form.start : form.stop]
        return LinearTensors(
            column_map,
            pairs,
            operand,
            None if scale is None else tensors[scale],
            None if bias is None else tensors[bias],
            None if gain is None else tensors[gain],
        )


def slots_of(linear: LinearSpec, start: int, tokens: int) -> Slots:
    """Return the slots of a linear for M tokens.

    Args:
        linear: The linear.
        start: Where its tensors begin among the chain's.
        tokens: M.
    """
    form, offset = linear.weight.pick(tokens)
    rest = iter(range(start + linear.weight.tensors, start + linear.tensors))
    there = linear.scaled, linear.biased, linear.prologue in NORMS
    scale, bias, gain = (next(rest) if has else None for has in there)
    own = range(start + offset, start + offset + form.tensors)
    return Slots(own, scale, bias, gain, linear.prologue == "add_rms_norm", linear.eps)


# -- the codec -----------------------------------------------------------------------------------------------------


def _to_text(spec: Any) -> str:
    return json.dumps([asdict(s) for s in spec] if isinstance(spec, tuple) else asdict(spec), separators=(",", ":"))


def _from_text(kind: Any, text: str, what: str) -> Any:
    return decode(kind, parse_json(text, what), what)


def chain_text(linears: Sequence[LinearSpec]) -> str:
    """Return a chain's spec as a string, for :func:`parse_chain`."""
    return _to_text(tuple(linears))


@lru_cache(maxsize=4096)
def parse_weight(text: str) -> WeightSpec:
    """Return the spec of a :attr:`WeightSpec.text`.

    Raises:
        InputError: For any other text.
    """
    spec: WeightSpec = _from_text(WeightSpec, text, "spec of a weight")
    return spec


@lru_cache(maxsize=4096)
def parse_chain(text: str) -> tuple[LinearSpec, ...]:
    """Return the linears of a :func:`chain_text`.

    Raises:
        InputError: For any other text, or a chain that adds no residual: the operator must give a new one.
    """
    linears: tuple[LinearSpec, ...] = decode(
        tuple[LinearSpec, ...], parse_json(text, "spec of a chain"), "spec of a chain"
    )
    if not any(linear.prologue == "add_rms_norm" for linear in linears):
        raise InputError("a chain of linears", got=[s.prologue for s in linears], needed="one with add_rms_norm")
    return linears


def describe_routes(routes: tuple[Route, ...]) -> str:
    """Return routes as a person would say them.

    >>> describe_routes((Route(0, "dense"), Route(512, "cusparselt"), Route(4096, "dense")))
    'dense up to 511 tokens, cusparselt up to 4095, dense beyond'
    """
    ends = [f"up to {after.from_tokens - 1}" for after in routes[1:]]
    parts = [f"{route.backend} {end}" for route, end in zip(routes, [*ends, "beyond"], strict=True)]
    if len(parts) == 1:
        return f"{routes[0].backend} for any number of tokens"
    parts[0] += " tokens"
    return ", ".join(parts)
