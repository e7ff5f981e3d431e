"""What the operator ``chain`` is told of linears of which each takes what the one before it gave, in one string.

Between two attentions a decoder layer is four linears in a row: the output projection, gate and up behind a norm, down
behind SiLU, and the next layer's query, key and value behind a norm. As one operator they cost the host one dispatch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from slidesparse.base.typed_json import decode
from slidesparse.errors import InputError
from slidesparse.gemm.spec import Switch
from slidesparse.kernels.lift_variant import NORMS


@dataclass(frozen=True)
class Link:
    """One linear of a chain. Its tensors stand together: those of its weight, then scale, bias and gain if it has them.

    Attributes:
        first: What comes before it: ``none``, ``rms_norm``, ``add_rms_norm`` or ``silu_mul``.
        eps: Of the norm.
        scaled: Its weight has a scale.
        biased: It has a bias.
        weight: The weight.
    """

    first: str
    eps: float
    scaled: bool
    biased: bool
    weight: Switch

    @property
    def of_weight(self) -> int:
        """How many tensors are those of its weight."""
        return sum(form.tensors for form in self.weight.forms)

    @property
    def tensors(self) -> int:
        """How many tensors are its own."""
        return self.of_weight + self.scaled + self.biased + (self.first in NORMS)


Picked: TypeAlias = "tuple[Sequence[torch.Tensor], torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]"
"""Tensors of a form of a weight, the weight's scale, a bias and a gain."""


class Placed(NamedTuple):
    """Where a link's tensors stand among its chain's, and what it does with the residual.

    Attributes:
        start: From here on those of the form of its weight that runs: column map, index of pairs, operand.
        stop: Up to here.
        scale_w: Its scale; None without, as below.
        bias: Its bias.
        gain: Its gain.
        adds: It takes the residual, and gives a new one.
        eps: Of its norm.
    """

    start: int
    stop: int
    scale_w: int | None
    bias: int | None
    gain: int | None
    adds: bool
    eps: float

    @property
    def read(self) -> list[int]:
        """Places of what kernels read: all but the column map."""
        places = *range(self.start + 1, self.stop), self.scale_w, self.bias, self.gain
        return [place for place in places if place is not None]

    def of(self, tensors: Sequence[torch.Tensor]) -> Picked:
        """Its own among the chain's."""
        start, stop, scale_w, bias, gain, _, _ = self
        return (
            tensors[start:stop],
            None if scale_w is None else tensors[scale_w],
            None if bias is None else tensors[bias],
            None if gain is None else tensors[gain],
        )


def place(link: Link, start: int, form: slice) -> Placed:
    """The places of a link.

    Args:
        link: The link.
        start: Where its tensors begin.
        form: Where those of the form that runs stand among them.
    """
    places = iter(range(start + link.of_weight, start + link.tensors))
    there = link.scaled, link.biased, link.first in NORMS
    scale_w, bias, gain = (next(places) if has else None for has in there)
    return Placed(start + form.start, start + form.stop, scale_w, bias, gain, link.first == "add_rms_norm", link.eps)


def links_to_text(links: Sequence[Link]) -> str:
    """What :func:`parse_links` reads."""
    return json.dumps([asdict(link) for link in links], separators=(",", ":"))


@lru_cache(maxsize=4096)
def parse_links(text: str) -> tuple[Link, ...]:
    """The inverse of :func:`links_to_text`.

    Raises:
        InputError: Text that is none, or a chain that adds no residual: the operator must give a new one.
    """
    links: tuple[Link, ...] = decode(tuple[Link, ...], json.loads(text), "links")
    if not any(link.first == "add_rms_norm" for link in links):
        raise InputError("a chain of linears", got=[link.first for link in links], needed="one behind add_rms_norm")
    return links
