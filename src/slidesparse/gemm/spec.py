"""What the operator ``linear`` is told of a weight, in one string: its size and type, and which form runs when.

A layer keeps its weight in the form of every backend that some number of tokens needs. Their activations differ as
well, so the number of tokens decides before anything is quantised; and since it is known only when the operator runs,
under torch.compile and CUDA graphs too, the decision is the operator's. One string says all of it, since every argument
of an operator costs host time on every call, and a longer string costs no more than a short one.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import torch

from slidesparse.base.typed_json import decode
from slidesparse.quant import parse_dtype


@dataclass(frozen=True)
class Route:
    """From ``first`` tokens on, up to the next route's, this backend runs."""

    first: int
    backend: str


@dataclass(frozen=True)
class Form:
    """One form of a weight.

    Attributes:
        backend: Whose.
        order: :attr:`slidesparse.layout.Columns.order` of its activations; empty where the torch definition
            must write them.
        tensors: How many of the operator's tensors are its own: column map, index of pairs (or an empty tensor),
            operand.
    """

    backend: str
    order: tuple[int, ...]
    tensors: int


@dataclass(frozen=True)
class Switch:
    """A layer's weight.

    Attributes:
        out_features: Its rows.
        dtype: Its type, a name of :data:`slidesparse.quant.DTYPES`.
        forms: In the order of their tensors.
        routes: The first one from 0 tokens on.
    """

    out_features: int
    dtype: str
    forms: tuple[Form, ...]
    routes: tuple[Route, ...]

    def to_text(self) -> str:
        """What :func:`parse_switch` reads."""
        return self._text

    def pick(self, tokens: int) -> tuple[Form, int]:
        """The form that multiplies M tokens, and where its tensors begin."""
        return self._chosen[bisect_right(self._firsts, tokens) - 1]

    def through(self, backend: str, first: int, last: int) -> Switch:
        """The same weight, which from ``first`` to ``last`` tokens runs on one of its backends."""
        after = Route(last + 1, self.pick(last + 1)[0].backend)
        before, behind = (r for r in self.routes if r.first < first), (r for r in self.routes if r.first > after.first)
        routes = [*before, Route(first, backend), after, *behind]
        changes = [r for i, r in enumerate(routes) if not i or r.backend != routes[i - 1].backend]
        return replace(self, routes=tuple(changes))

    @cached_property
    def _text(self) -> str:  # takes longer than two launches, and is asked for with every new number of tokens
        return json.dumps(asdict(self), separators=(",", ":"))

    @cached_property
    def weight_dtype(self) -> torch.dtype:
        """The type itself."""
        return parse_dtype(self.dtype)

    @cached_property
    def _firsts(self) -> list[int]:
        return [route.first for route in self.routes]

    @cached_property
    def _chosen(self) -> list[tuple[Form, int]]:
        starts = accumulate((form.tensors for form in self.forms), initial=0)
        forms = {form.backend: (form, start) for form, start in zip(self.forms, starts, strict=False)}
        return [forms[route.backend] for route in self.routes]


@lru_cache(maxsize=4096)
def parse_switch(text: str) -> Switch:
    """The inverse of :meth:`Switch.to_text`."""
    switch: Switch = decode(Switch, json.loads(text), "switch")
    return switch


def describe_routes(routes: tuple[Route, ...]) -> str:
    """For people.

    >>> describe_routes((Route(0, "dense"), Route(512, "cusparselt"), Route(4096, "dense")))
    'dense up to 511 tokens, cusparselt up to 4095, dense beyond'
    """
    ends = [f"up to {after.first - 1}" for after in routes[1:]]
    parts = [f"{route.backend} {end}" for route, end in zip(routes, [*ends, "beyond"], strict=True)]
    if len(parts) == 1:
        return f"{routes[0].backend} for any number of tokens"
    parts[0] += " tokens"
    return ", ".join(parts)
