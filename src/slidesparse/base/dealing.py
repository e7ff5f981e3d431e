"""Deal work to processes: the largest first, each to the one that has the least so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key")


def deal(sizes: Mapping[Key, float], hands: int) -> list[list[Key]]:
    """Return what each of ``hands`` processes gets, in the order of ``sizes``; the same wherever it is called.

    No hand gets more than 4/3 of what the best way to deal would give the fullest one (Graham, "Bounds on
    multiprocessing timing anomalies", 1969).

    >>> deal({"a": 2, "b": 9, "c": 5, "d": 4}, 2)
    [['b'], ['a', 'c', 'd']]
    """
    loads = [0.0] * hands
    hand_of: dict[Key, int] = {}
    for key in sorted(sizes, key=lambda one: -sizes[one]):  # stable: equals stay in order
        hand_of[key] = min(range(hands), key=loads.__getitem__)
        loads[hand_of[key]] += sizes[key]
    return [[key for key in sizes if hand_of[key] == hand] for hand in range(hands)]
