"""Slow definitions of FP4 in plain Python and exact fractions, without code of the package."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

VALUES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
"""Of E2M1, by code: eee.m with bias 1."""


def value(code: int) -> Fraction:
    """Sign, two bits of exponent, one of mantissa, from the bits."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -size if code & 8 else size


def nearest(x: Fraction) -> int:
    """The code of the nearest value: ties to the even code, saturating, zeros positive."""
    size = min(range(8), key=lambda code: (abs(VALUES[code] - abs(x)), code & 1))
    return size | 8 if x < 0 and size else size


def joined_columns(n: int, block: int, vector: int, columns: int) -> list[set[int]]:
    """Sets of columns that lifting a ``(2n - 2):2n`` pattern over pairs ties to one scale, found by joining.

    Columns of one block share a scale, and so do all that have a copy in one vector.
    """
    owner = list(range(columns))

    def root(column: int) -> int:
        while owner[column] != column:
            column = owner[column]
        return column

    def join(together: Sequence[int]) -> None:
        for column in together:
            owner[root(column)] = root(together[0])

    lifted = [
        4 * n * group + 4 * window + column
        for group in range(columns // (4 * n))
        for window in range(n - 1)
        for column in range(8)
    ]
    for run, width in ((lifted, vector), (list(range(columns)), block)):
        for start in range(0, len(run), width):
            join(run[start : start + width])
    sets: dict[int, set[int]] = {}
    for column in range(columns):
        sets.setdefault(root(column), set()).add(column)
    return list(sets.values())
