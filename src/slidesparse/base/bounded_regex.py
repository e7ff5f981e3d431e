"""Refuse regular expressions of others that Python's ``re`` may never finish: here, and in libraries that get them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from slidesparse.errors import InputError

try:
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as _parser

MAX_WAYS = 10**8
"""Most ways to match one name. Of the names of layers ``re`` tries few; the worst take two seconds."""

COSTLY = re.compile(r"[^\x00-\x7f]|\\[UN]|.{10000}", re.DOTALL)
"""What takes long to compile: ranges of a million characters, and thousands of others."""


@lru_cache(maxsize=4096)
def require_bounded(expression: str, length: int) -> None:
    """Raise an InputError for what is no regular expression, or has too many ways to match that many characters."""
    if COSTLY.search(expression):
        raise InputError(f"regular expression {expression:.80}", needed="fewer than 10000 characters, all of ASCII")
    try:
        bounded = _ways(_parser.parse(expression), length) <= MAX_WAYS
        re.compile(expression)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise InputError(f"entry {f're:{expression}'[:80]!r} is no regular expression", got=error) from error
    if not bounded:
        remedy = "name the layers, or repeat single characters alone, such as .* and [0-9]+, a few times"
        raise InputError("a regular expression that may take very long", got=f"{expression:.80}", remedy=remedy)


def _ways(sequence: Iterable[Any], length: int) -> int:
    """Return a bound on the ways in which a parsed sequence can match a part of so many characters."""
    ways = 1
    for code, value in sequence:
        one = max(sum(_ways(part, length) for part in _parts(value)), 1)  # one part or another; none: a character
        if str(code).endswith("REPEAT"):
            times = max(min(value[1], length), 1)  # each of which takes a character
            one = one**times + max(times - value[0], 0)
        ways = min(ways * one, MAX_WAYS + 1)
    return ways


def _parts(value: Any) -> list[Any]:  # the sequences in the value that the parser gives to one item
    if isinstance(value, _parser.SubPattern):
        return [value]
    return [part for one in value for part in _parts(one)] if isinstance(value, tuple | list) else []
