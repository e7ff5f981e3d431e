"""The default calibration text: prose and code of Python's standard library, which every machine has.

Pages of this project, the default before, lost twice as much on code of other packages (docs/log/default-text.md).
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

CHARACTERS = 200_000
"""Characters of prose, and of code: together some 100 thousand tokens."""

LONGEST = 20_000
"""Characters of one topic or module; more are cut off."""


def standard_library() -> list[str]:
    """Return topics of Python's reference and modules of its library, in an order that is the same on each call."""
    topics = _topics()
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    read = partial(Path.read_text, encoding="utf-8", errors="replace")
    return [*_first(sorted(topics), topics.__getitem__), *_first(modules, read)]


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # which some distributions package apart
        return {}
    return topics


def _first(names: Sequence[T], read: Callable[[T], str]) -> list[str]:
    """Return texts of shuffled names, as many as fill :data:`CHARACTERS`; no others are read."""
    mixed, texts, left = list(names), list[str](), CHARACTERS
    random.Random(0).shuffle(mixed)
    for name in mixed:
        if left <= 0:
            break
        texts.append(read(name)[:LONGEST])
        left -= len(texts[-1])
    return texts
