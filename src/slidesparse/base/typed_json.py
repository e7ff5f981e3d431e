"""Strict reading of JSON of any origin into dataclasses, with errors that name the place."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from slidesparse.base.whole_file import read_whole
from slidesparse.errors import InputError

MAX_BYTES = 256 * 10**6
"""Most bytes of a file. The index of a checkpoint of a hundred thousand tensors has 10 MB."""

MAX_DEPTH = 64
"""Most levels of lists and objects. Our own files have fewer than ten; Python's functions fail near a thousand."""

MAX_DIGITS = 20
"""Most characters of a whole number: those of 64 bits. Longer ones take quadratic time, or overflow as floats."""

SHOWN = 200
"""Most characters of a wrong value that a message shows."""


def load_json(path: Path, *, non_finite: bool = False) -> Any:
    """Read a file of one JSON value in UTF-8.

    ``non_finite`` accepts NaN, Infinity and -Infinity, which Python writes and JSON does not have.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: The file cannot be read, is larger than :data:`MAX_BYTES`, or :func:`parse_json` refuses it.
    """
    return parse_json(read_whole(path, MAX_BYTES), str(path), non_finite=non_finite)


def parse_json(text: str | bytes, where: str, *, non_finite: bool = False) -> Any:
    """Parse one JSON value, whose bytes are UTF-8; ``where`` is its name in errors. See :func:`load_json`.

    Raises:
        InputError: Not UTF-8, not JSON, a whole number that no 64 bits hold, NaN or Infinity, half a surrogate pair, or
            more than :data:`MAX_DEPTH` levels.

    >>> parse_json('{"a": [1, 2.5]}', "example")
    {'a': [1, 2.5]}
    """

    def constant(name: str) -> float:
        return float(name) if non_finite else _refuse(f"the number {name}")

    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            parse_constant=constant,
            parse_int=_whole_number,
        )
        _check_values(value)
    except RecursionError as error:
        raise InputError(f"{where} cannot be read", got="too many levels", needed=f"at most {MAX_DEPTH}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if "\n" in error.doc else f"column {error.colno}"
        got = f"{error.msg.removesuffix(' at')} at {place}: {error.doc[max(error.pos - 20, 0) : error.pos + 20]!r}"
        raise InputError(f"{where} cannot be read", got=got, needed="JSON in UTF-8") from error
    except ValueError as error:
        raise InputError(f"{where} cannot be read", got=str(error), needed="JSON in UTF-8") from error
    return value


def decode(kind: Any, value: Any, where: str) -> Any:
    """Rebuild ``value`` as ``kind``.

    Args:
        kind: A dataclass, ``tuple[X, ...]``, ``list[X]``, ``dict[str, X]``, ``X | None``, a Literal or a plain type. A
            dataclass may check its fields: the InputError of its ``__post_init__`` passes.
        value: The value that :func:`parse_json` returned.
        where: Its name in error messages.

    Raises:
        InputError: Naming the field that does not fit.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = next(option for option in get_args(kind) if option is not type(None))
        return None if value is None else decode(inner, value, where)
    if origin is Literal:
        _expect(value in get_args(kind), where, value, f"one of {', '.join(map(repr, get_args(kind)))}")
        return value
    if origin in (tuple, list):
        _expect(isinstance(value, list), where, value, "a list")
        return origin(decode(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where, value, "an object")
        return {name: decode(get_args(kind)[1], item, f"{where}[{name!r}]") for name, item in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        _expect(isinstance(value, dict), where, value, "an object")
        hints = get_type_hints(kind)
        unknown, missing = sorted(value.keys() - hints.keys()), sorted(hints.keys() - value.keys())
        _expect(not unknown, f"unknown fields of {where}", unknown, f"none but {', '.join(hints)}")
        _expect(not missing, f"{where} lacks {', '.join(missing)}", sorted(value), f"all of {', '.join(hints)}")
        return kind(**{name: decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
    # JSON has no integers of its own, so a float field takes 3; bool is an int in Python and nowhere else.
    accepted = (int, float) if kind is float else (kind,)
    _expect(isinstance(value, accepted) and isinstance(value, bool) == (kind is bool), where, value, kind.__name__)
    return kind(value)


def _expect(holds: bool, what: str, got: Any, needed: str) -> None:
    if not holds:
        text = repr(got)
        raise InputError(what, got=text if len(text) <= SHOWN else f"{text[:SHOWN]}...", needed=needed)


def _refuse(what: str) -> NoReturn:
    raise ValueError(what)


def _whole_number(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else _refuse(f"a number of {len(text)} digits")


def _check_values(value: Any) -> None:
    """Refuse values that cannot be written again: deep nesting and half surrogate pairs. Does not recurse."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for item in level:
            if isinstance(item, str):
                item.encode("utf-8")
        lists = [item for item in level if isinstance(item, list | dict)]
        level = [inner for item in lists for inner in (item if isinstance(item, list) else [*item, *item.values()])]
        if not lists:
            return
    raise ValueError(f"more than {MAX_DEPTH} levels")
