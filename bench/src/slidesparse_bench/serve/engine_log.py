"""The first error in the log of an engine that died: vLLM's engine core fails in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

MOST = 320
"""Characters of an error in another error's one line."""

ERROR = re.compile(r"(?:\([^)]*\) +)?(?:(?:ERROR|CRITICAL)\b[^\]]*\] +)?([\w.]*(?:Error|Exception): \S.*)")
"""An exception's own line, after what vLLM puts before it; not a warning that speaks of one."""


def first_error(log: Path) -> str | None:
    """The first error in a log; None where it has none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    causes = (found[1] for line in lines if (found := ERROR.match(line.strip())) is not None)
    first = next(causes, None)
    return None if first is None else first[:MOST]
