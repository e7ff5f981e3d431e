"""Refuse arguments of the wrong kind by the package's own errors, at the doors of the public functions."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from slidesparse.errors import InputError


def require_kind(value: Any, kind: type | tuple[type, ...], name: str, needed: str) -> None:
    """Raise an InputError for an argument, by its name, that is not of a kind, which ``needed`` says in words."""
    if not isinstance(value, kind):
        raise InputError(name, got=shown(value), needed=needed)


def require_integer(value: Any, name: str) -> None:
    """Raise an InputError for a value that is no whole number of 64 bits; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value).bit_length() > 64:
        raise InputError(name, got=shown(value), needed="a whole number of 64 bits")


def list_of_names(value: Any, name: str) -> list[str]:
    """Return names as a list; one name alone would be read letter by letter, and a tensor row by row."""
    if isinstance(value, str) or hasattr(type(value), "shape") or not isinstance(value, Iterable):
        raise InputError(name, got=shown(value), needed="a list of names")
    return list(value)


def shown(value: Any) -> str:
    """Return a value of any kind as a few words: plain ones as Python writes them, others by their class.

    >>> shown("a"), shown(None), shown([1, 2])
    ("'a'", 'None', 'list')
    """
    plain = value is None or isinstance(value, str | int | float | bytes)
    try:
        return f"{value!r:.80}" if plain else type(value).__name__
    except ValueError:
        return "an integer of thousands of digits"
