"""Which cases of a test with several parameters run every time: a part of the product, the rest is slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

import pytest

Case = tuple[Hashable, ...]


def chosen(cases: Sequence[Case], together: int) -> set[Case]:
    """Cases such that any so many values that meet in one of all cases meet in one of these.

    >>> sorted(chosen([(a, b) for a in "xyz" for b in (1, 2)], 1))
    [('x', 1), ('y', 2), ('z', 1)]
    """

    def meetings(case: Case) -> set[tuple[tuple[int, Hashable], ...]]:
        return set(combinations(enumerate(case), together))

    missing = set().union(*map(meetings, cases))
    found = set()
    while missing:
        case = max(cases, key=lambda case: len(meetings(case) & missing))
        missing -= meetings(case)
        found.add(case)
    return found


def mark_slow_cases(items: Iterable[pytest.Item]) -> None:
    """Mark slow what adds the least: of two stacked ``parametrize`` each value runs, of more of them every two values.

    Tests on a GPU, and what other fixtures vary, are left as they are.
    """
    tests = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and not item.get_closest_marker("gpu"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        stacked = [_names(mark) for mark in cases[0].iter_markers("parametrize")]
        if len(stacked) < 2:
            continue
        values = [tuple(tuple(id(case.callspec.params[name]) for name in names) for names in stacked) for case in cases]
        kept = chosen(values, 1 if len(stacked) == 2 else 2)
        for case, value in zip(cases, values, strict=True):
            if value not in kept:
                case.add_marker("slow")


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
