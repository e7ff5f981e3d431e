"""Names of layers that differ only by their number, so that lists have one line for all of them."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number that is a part of a name on its own: ``fc1`` and ``fc2`` are two layers, not one that is repeated."""


def kind_of(name: str) -> str:
    """Return a module's name with ``*`` in the place of the numbers of layers and experts.

    >>> kind_of("h.11.mlp.dense_h_to_4h")
    'h.*.mlp.dense_h_to_4h'
    """
    return _NUMBER.sub("*", name)
