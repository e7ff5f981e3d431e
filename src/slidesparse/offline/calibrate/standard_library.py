"""The default calibration text: prose and code of Python's standard library, which every machine has.

Pages of this project, the default before, lost twice as much on code of other packages (docs/log/default-text.md).
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path

CHARACTERS = 200_000
"""Characters of prose, and of code: together some 100 thousand tokens."""

LONGEST = 20_000
"""Characters of one topic or module; more are cut off."""


def standard_library() -> list[str]:
    """Return topics of Python's reference and modules of its library, in an order that is the same on each call."""
    return [*_first(_topics()), *_first(_modules())]


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # which some distributions package apart
        return []
    return [topics[name] for name in sorted(topics)]


def _modules() -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def _first(texts: Iterable[str]) -> list[str]:
    """Return texts in a shuffled order, as many as fill :data:`CHARACTERS`."""
    mixed, taken = list(texts), list[str]()
    random.Random(0).shuffle(mixed)
    for text in mixed:
        if sum(map(len, taken)) >= CHARACTERS:
            break
        taken.append(text[:LONGEST])
    return taken
