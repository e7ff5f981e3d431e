"""JSON back into dataclasses, strictly: an unknown, missing or mistyped field is an error that names it."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from slidesparse.errors import InputError


def decode(kind: Any, value: Any, where: str) -> Any:
    """Rebuild ``value`` as ``kind``: a dataclass, ``tuple[X, ...]``, ``dict[str, X]``, ``X | None`` or a plain type.

    Args:
        kind: What to make.
        value: What ``json`` gave.
        where: What error messages call it.

    Raises:
        InputError: Naming the field that does not fit.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = next(option for option in get_args(kind) if option is not type(None))
        return None if value is None else decode(inner, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where, value, "a list")
        return tuple(decode(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where, value, "an object")
        return {name: decode(get_args(kind)[1], item, f"{where}[{name!r}]") for name, item in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        _expect(isinstance(value, dict), where, value, "an object")
        hints = get_type_hints(kind)
        unknown, missing = sorted(value.keys() - hints.keys()), sorted(hints.keys() - value.keys())
        _expect(not unknown, f"fields of {where}", unknown, "no others than the schema's")
        _expect(not missing, f"fields missing from {where}", missing, "all of the schema's")
        return kind(**{name: decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
    # JSON has no integers of its own, so a float field takes 3; bool is an int in Python and nowhere else.
    accepted = (int, float) if kind is float else (kind,)
    _expect(isinstance(value, accepted) and isinstance(value, bool) == (kind is bool), where, value, kind.__name__)
    return kind(value)


def _expect(holds: bool, what: str, got: Any, needed: str) -> None:
    if not holds:
        raise InputError(what, got=repr(got), needed=needed)
