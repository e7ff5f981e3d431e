"""Check that numbers which others wrote can have been measured, and that names can be shown."""

from __future__ import annotations

from typing import Any

from slidesparse.errors import InputError

LARGEST = 1e15
"""Largest number of a file of ours: 30 years in microseconds, and squares of it are no infinity."""


def require_numbers(owner: Any, where: str, *names: str, positive: bool = False) -> None:
    """Refuse attributes that are negative, NaN or larger than :data:`LARGEST`; None passes.

    Args:
        owner: Has the attributes: numbers, or tuples or dicts of numbers.
        where: The owner's name in messages.
        names: The attributes.
        positive: Refuse zero too.

    Raises:
        InputError: Naming the attribute.
    """
    for name in names:
        value = getattr(owner, name)
        numbers = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
        for number in numbers:
            if number is None or (0 < number <= LARGEST) or (number == 0 and not positive):
                continue
            least = "more than 0" if positive else "0 or more"
            raise InputError(f"{where}.{name}", got=number, needed=f"{least}, and at most {LARGEST:g}")


def require_printable(owner: Any, where: str) -> None:
    """Refuse attributes that are text with control characters: they are drawn, and name files.

    Raises:
        InputError: Naming the attribute.
    """
    for name, value in vars(owner).items():
        if isinstance(value, str) and not value.isprintable():
            raise InputError(f"{where}.{name}", got=f"{value!r:.80}", needed="text without control characters")
