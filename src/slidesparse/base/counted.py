"""Counts of things as text: the one place that knows the plural."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "tensor"), counted(21, "tensor")
    ('1 tensor', '21 tensors')
    """
    return f"{number} {noun if number == 1 else noun + 's'}"
