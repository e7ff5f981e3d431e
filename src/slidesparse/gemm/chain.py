"""What the operator ``chain`` is told of linears of which each takes what the one before it gave, in one string.

Between two attentions a decoder layer is four linears in a row: the output projection, gate and up behind a norm, down
behind SiLU, and the next layer's query, key and value behind a norm. As one operator they cost the host one dispatch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from slidesparse.decode import decode
from slidesparse.errors import InputError
from slidesparse.gemm.switch import Switch
from slidesparse.kernels.plan import NORMS


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
