"""Refuse arguments of the wrong kind by the package's own errors, at the doors of the public functions."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from slidesparse.errors import InputError


def require_kind(value: Any, kind: type | tuple[type, ...], name: str, needed: str) -> None:
    """Raise an InputError for an argument, by its name, that is not of a kind, which ``needed`` says in words."""
    if not isinstance(value, kind):
        raise InputError(name, got=shown(value), needed=needed)


def require_integer(value: Any, name: str) -> None:
    """Raise an InputError for a value that is no whole number; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(name, got=shown(value), needed="a whole number")


def shown(value: Any) -> str:
    """Return a value of any kind as a few words: plain ones as Python writes them, others by their class.

    >>> shown("a"), shown(None), shown([1, 2])
    ("'a'", 'None', 'list')
    """
    plain = value is None or isinstance(value, str | int | float | bytes)
    return f"{value!r:.80}" if plain else type(value).__name__
