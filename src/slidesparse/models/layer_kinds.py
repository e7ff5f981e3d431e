"""Names of layers that differ only by their number, so that lists have one line for all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A whole part of a name that is a number: ``fc1`` and ``fc2`` are two layers, not one that is repeated."""


def kind_of(name: str) -> str:
    """Replace the numbers of layers and experts in a module's name by ``*``.

    >>> kind_of("h.11.mlp.dense_h_to_4h")
    'h.*.mlp.dense_h_to_4h'
    """
    return _NUMBER.sub("*", name)


def alike(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Group items by key, in the order of the keys' first items."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [*groups.values()]


def shared_name(names: Sequence[str]) -> str:
    """Return one name for layers of one kind.

    >>> shared_name(["h.0.fc"]), shared_name(["h.0.fc", "h.1.fc"])
    ('h.0.fc', '2 x h.*.fc')
    """
    return names[0] if len(names) == 1 else f"{len(names)} x {kind_of(names[0])}"
