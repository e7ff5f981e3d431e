"""Match names by regular expressions that others wrote, which Python's ``re`` may never finish.

``re`` tries the ways in which an expression can match, one after another. Their number is bounded here before it begins;
libraries and servers that use ``re`` on the same expressions are as safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from math import comb
from typing import Any

from slidesparse.errors import InputError

try:
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as _parser

MAX_CHARACTERS = 10_000
"""Most characters of an expression."""

NOT_ASCII = re.compile(r"[^\x00-\x7f]|\\[UN]")
"""Where cases are ignored, each range of a million characters takes a hundredth of a second."""

MAX_WAYS = 10**7
"""Most ways to match one name: a tenth of a second."""

FEW = 64
"""Repetitions beyond these count as any number."""

REMEDY = "name the layers, or repeat single characters alone, such as .* and [0-9]+, a few times"


def matches(expression: str, name: str) -> bool:
    """Return whether a name begins with a match.

    Raises:
        InputError: It is no regular expression, or :func:`require_bounded` refuses it.
    """
    require_bounded(expression, len(name))
    return re.match(expression, name) is not None


def require_bounded(expression: str, length: int) -> None:
    """Raise an InputError for a regular expression that may take very long on a name of that many characters."""
    degree, ways = _ways_of(expression)
    if comb(length + degree, degree) * ways > MAX_WAYS:
        got = f"{expression:.80} for a name of {length} characters"
        raise InputError("a regular expression that may take very long", got=got, remedy=REMEDY)


@lru_cache(maxsize=4096)
def _ways_of(expression: str) -> tuple[int, int]:
    if len(expression) > MAX_CHARACTERS or NOT_ASCII.search(expression):
        needed = f"at most {MAX_CHARACTERS} characters, all of ASCII"
        raise InputError("a regular expression", got=f"{len(expression)} characters: {expression:.80}", needed=needed)
    try:
        ways = _ways(_parser.parse(expression))
        re.compile(expression)
        return ways
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{expression[:80]!r} is no regular expression", got=error) from error


def _ways(sequence: Iterable[Any]) -> tuple[int, int]:
    """Return d and f: there are at most f * C(n + d, d) ways to match a sequence with a part of n characters."""
    degree, factor = 0, 1
    for code, value in sequence:
        if str(code).endswith("REPEAT"):
            d, f = _repeated(*value)
        else:
            parts = [_ways(part) for part in _parts(value)]
            # A branch matches in the ways of one part or another; a group has one part, and a character none.
            d, f = max((d for d, _ in parts), default=0), max(sum(f for _, f in parts), 1)
        degree, factor = degree + d, factor * f
    return degree, factor


def _repeated(least: int, most: int, part: Iterable[Any]) -> tuple[int, int]:
    degree, factor = _ways(part)
    if (degree, factor) == (0, 1):
        return (1, 1) if most > FEW and least != most else (0, min(most, least + FEW) - least + 1)
    if most == 1:
        return degree, factor if degree else factor + 1
    if most > FEW or most * (degree + factor.bit_length()) > FEW:
        raise InputError(
            "a regular expression that may take very long", got="repetitions in a repetition", remedy=REMEDY
        )
    return degree * most, factor**most * (most - least + 1)


def _parts(value: Any) -> list[Any]:
    """Return the sequences in the value that the parser gives to one item."""
    if isinstance(value, _parser.SubPattern):
        return [value]
    return [part for one in value for part in _parts(one)] if isinstance(value, tuple | list) else []
