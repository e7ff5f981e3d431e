"""Specs: the description of a linear, or of several in a row, that an operator takes as one string.

A layer keeps its weight in the form of every backend of its routes. Backends have different layouts of activations, so
the backend is chosen before anything is quantised; and since the number of tokens is known only when the operator runs,
under torch.compile and CUDA graphs, too, the operator chooses. One string has everything that does not change from call
to call: every argument of an operator costs host time, and a long string no more than a short one.

Between two attentions a decoder layer has four linears in a row: the output projection; gate and up, after a norm;
down, after SiLU; and the next layer's query, key and value, after a norm. As one operator, ``chain``, they cost the
host one dispatch.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from slidesparse.base.typed_json import decode, parse_json
from slidesparse.errors import InputError
from slidesparse.lifting.layout import ColumnOrder, LinearTensors
from slidesparse.lifting.prologue import ADDING, NORMS, Prologue
from slidesparse.weights.quant import ActivationRounding, parse_dtype


@dataclass(frozen=True)
class Route:
    """A backend for ``from_tokens`` tokens and more, up to the next route."""

    from_tokens: int
    backend: str


@dataclass(frozen=True)
class FormSpec:
    """One form of a weight.

    Attributes:
        backend: Its backend.
        order: :attr:`lifting.layout.ColumnOrder.numbers` of its activations; empty for the torch definition.
        tensors: Number of its tensors, of the operator's: column map, operand.
    """

    backend: str
    order: tuple[int, ...]
    tensors: int

    @property
    def dense(self) -> bool:
        """Whether the weight is packed dense; False where the order says nothing."""
        return bool(self.order) and not ColumnOrder(*self.order).slid  # type: ignore[arg-type] # as in LiftSpec


@dataclass(frozen=True)
class WeightSpec:
    """A layer's weight.

    Attributes:
        out_features: Its rows.
        dtype: Its type, a name of :data:`slidesparse.weights.quant.DTYPES`.
        forms: Its forms, in the order of their tensors.
        routes: The backends that multiply it, each with one of the forms; the first is from 0 tokens on.
        activation_rounding: The server whose rounding of activations is reproduced.

    Raises:
        InputError: Routes that do not begin at 0 tokens, or to a backend without a form.
    """

    out_features: int
    dtype: str
    forms: tuple[FormSpec, ...]
    routes: tuple[Route, ...]
    activation_rounding: ActivationRounding = "vllm"

    def __post_init__(self) -> None:
        backends = {form.backend for form in self.forms}
        if not self._starts or self._starts[0] or any(route.backend not in backends for route in self.routes):
            needed = f"the first one from 0 tokens on, each through one of {sorted(backends)}"
            raise InputError("routes of a weight", got=[(r.from_tokens, r.backend) for r in self.routes], needed=needed)

    @cached_property
    def tensors(self) -> int:
        """Number of its tensors, of the operator's."""
        return sum(form.tensors for form in self.forms)

    def pick(self, tokens: int) -> tuple[FormSpec, int]:
        """Return the form for M tokens, and the index of its first tensor."""
        return self._chosen[bisect_right(self._starts, tokens) - 1]

    @cached_property
    def text(self) -> str:
        """The spec as a string, for :func:`parse_weight`; cached, since it takes longer than two launches."""
        return _to_text(self)

    @cached_property
    def weight_dtype(self) -> torch.dtype:
        """The weight's torch.dtype."""
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
    """One linear of a chain. Its tensors are its weight's, then scale, bias and the norm's weight, if it has them.

    ``prologue`` is applied to its activations before they are quantised; ``eps`` is the norm's epsilon.
    """

    prologue: Prologue
    eps: float
    scaled: bool
    biased: bool
    weight: WeightSpec

    @cached_property
    def tensors(self) -> int:
        """Number of its tensors, of the operator's."""
        return self.weight.tensors + self.scaled + self.biased + (self.prologue in NORMS)


class Slots(NamedTuple):
    """The indices of one linear's tensors in its chain.

    Attributes:
        form: Indices of its weight's form: column map, operand.
        scale: Index of its scale; None without one, as below.
        bias: Index of its bias.
        norm_weight: Index of its norm's weight.
        adds: Whether it takes and returns a residual.
        eps: The epsilon of its norm.
    """

    form: range
    scale: int | None
    bias: int | None
    norm_weight: int | None
    adds: bool
    eps: float

    @property
    def read(self) -> list[int]:
        """Slots of the kernels' tensors: all except the column map."""
        slots = *self.form[1:], self.scale, self.bias, self.norm_weight
        return [slot for slot in slots if slot is not None]

    def pick(self, tensors: Sequence[torch.Tensor]) -> LinearTensors:
        """Return the linear's tensors among the chain's."""
        form, scale, bias, norm_weight, _, _ = self
        column_map, *operand = tensors[form.start : form.stop]
        return LinearTensors(
            column_map,
            operand,
            None if scale is None else tensors[scale],
            None if bias is None else tensors[bias],
            None if norm_weight is None else tensors[norm_weight],
        )


def slots_of(linear: LinearSpec, start: int, tokens: int) -> Slots:
    """Return the slots of a linear for M ``tokens``; its first tensor is number ``start`` of the chain's."""
    form, offset = linear.weight.pick(tokens)
    rest = iter(range(start + linear.weight.tensors, start + linear.tensors))
    there = linear.scaled, linear.biased, linear.prologue in NORMS
    scale, bias, norm_weight = (next(rest) if has else None for has in there)
    own = range(start + offset, start + offset + form.tensors)
    return Slots(own, scale, bias, norm_weight, linear.prologue in ADDING, linear.eps)


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
        InputError: Any other text.
    """
    spec: WeightSpec = _from_text(WeightSpec, text, "spec of a weight")
    return spec


@lru_cache(maxsize=4096)
def parse_chain(text: str) -> tuple[LinearSpec, ...]:
    """Return the linears of a :func:`chain_text`.

    Raises:
        InputError: Any other text, or a chain that adds no residual: the operator must return a new one.
    """
    linears: tuple[LinearSpec, ...] = _from_text(tuple[LinearSpec, ...], text, "spec of a chain")
    if not any(linear.prologue in ADDING for linear in linears):
        raise InputError("a chain of linears", got=[s.prologue for s in linears], needed="one that adds a residual")
    return linears
