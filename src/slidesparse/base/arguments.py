"""Type checks of the arguments of public functions, with the package's own errors."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slidesparse.errors import InputError

PLAIN = {int: "a whole number of 64 bits", float: "a number", bool: "True or False", str: "a text", type(None): "None"}
"""Plain types, and their names in errors."""


def require_kind(value: Any, kind: type | tuple[type, ...], name: str, needed: str) -> None:
    """Raise an InputError for an argument ``name`` that is not of a kind, ``needed`` in words."""
    if not isinstance(value, kind):
        raise InputError(name, got=shown(value), needed=needed)


def require_integer(value: Any, name: str) -> None:
    """Raise an InputError for a value that is not an integer of 64 bits; nor are True and False."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value).bit_length() > 64:
        raise InputError(name, got=shown(value), needed="a whole number of 64 bits")


def require_plain(function: Callable[..., object], given: Mapping[str, Any]) -> None:
    """Raise an InputError for an argument that does not fit its annotation, where that has plain types only.

    A function calls this first, with its ``locals()``. A Literal of texts is plain.
    """
    for name, hint in get_type_hints(function).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if name not in given or not all(kind in PLAIN or get_origin(kind) is Literal for kind in kinds):
            continue
        if not any(_fits(given[name], kind) for kind in kinds):
            words = (PLAIN.get(kind) or " or ".join(map(str, get_args(kind))) for kind in kinds)
            raise InputError(name, got=shown(given[name]), needed=" or ".join(words))


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= 64
    if kind in (int, float):
        return is_whole or (kind is float and isinstance(value, float))
    return isinstance(value, kind)


def list_of_names(value: Any, name: str) -> list[str]:
    """Return names as a list; refuse a text, which would be read letter by letter, and a tensor."""
    if isinstance(value, str) or hasattr(type(value), "shape") or not isinstance(value, Iterable):
        raise InputError(name, got=shown(value), needed="a list of names")
    return list(value)


def shown(value: Any) -> str:
    """Return a short text for any value: plain ones as Python writes them, others by their class.

    >>> shown("a"), shown(None), shown([1, 2])
    ("'a'", 'None', 'list')
    """
    plain = value is None or isinstance(value, str | int | float | bytes)
    try:
        return f"{value!r:.80}" if plain else type(value).__name__
    except ValueError:
        return "an integer of thousands of digits"
