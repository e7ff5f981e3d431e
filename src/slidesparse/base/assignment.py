"""Assignment of work to processes: the largest first, each to the least loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key")


def assign(sizes: Mapping[Key, float], ranks: int) -> list[list[Key]]:
    """Return the keys of each of ``ranks`` processes, in the order of ``sizes``; every process computes the same.

    The largest load is at most 4/3 of the best possible one (Graham, "Bounds on multiprocessing timing anomalies",
    1969).

    >>> assign({"a": 2, "b": 9, "c": 5, "d": 4}, 2)
    [['a', 'b'], ['c', 'd']]
    """
    loads = [0.0] * ranks
    rank_of: dict[Key, int] = {}
    for key in sorted(sizes, key=lambda one: -sizes[one]):  # stable: equals stay in order
        rank_of[key] = min(range(ranks), key=loads.__getitem__)
        loads[rank_of[key]] += sizes[key]
    return [[key for key in sizes if rank_of[key] == rank] for rank in range(ranks)]
