"""Progress as bars on a terminal and as lines elsewhere, and tables."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from slidesparse.errors import printable

NARROWEST = 40
"""Least columns of a table; a narrower terminal wraps it."""

BETWEEN = "   "
"""Space between two columns of a table."""

WIDEST = 10_000
"""Width of a table in a file: enough for every row."""

LINE_S, FIRST_LINE_S = 30.0, 5.0
"""Seconds between two lines of progress where no bar is drawn; the first one, with an estimate, comes earlier."""

SPEED_S = 600.0
"""Seconds over which speed is averaged: a layer may take minutes."""

_QUIET = ContextVar("quiet", default=False)


@contextmanager
def progress_bar(
    title: str, total: int, *, unit: str = "bytes", show: bool | None = None
) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error and yield the function that advances it, up to ``total``; no bar for 0.

    Where that is no terminal and ``show`` is None, lines are printed instead. The function takes an amount, and a note
    to show after the title. The unit is ``bytes``, or anything else for plain counts; see :func:`bars_shown`.
    """
    shown = bars_shown(show) and total > 0
    lines = show is None and not shown and sys.stderr is not None and bars_shown(True)
    printed = time.monotonic() - LINE_S + min(FIRST_LINE_S, LINE_S)
    count, left = DownloadColumn() if unit == "bytes" else MofNCompleteColumn(), TimeRemainingColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, left)
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not shown, speed_estimate_period=SPEED_S) as bar:
        task = bar.add_task(printable(title), total=total)

        def advance(amount: int, note: str = "") -> None:
            nonlocal printed
            bar.update(task, advance=amount, description=printable(f"{title} {note}".rstrip()))
            if lines and time.monotonic() - printed >= LINE_S:
                printed, now = time.monotonic(), bar.tasks[0]
                done = count.render(now).plain.strip() + ("" if unit == "bytes" else f" {unit}")
                rest = f"{left.render(now).plain} left" if now.time_remaining else ""
                say(title, ", ".join(filter(None, (done, note, rest))))

        yield advance


def say(title: str, line: str) -> None:
    """Print a line of progress on standard error; nothing under ``--quiet``."""
    if bars_shown(True) and sys.stderr is not None:
        print(printable(f"{title}: {line}"), file=sys.stderr, flush=True)


def bars_shown(show: bool | None = None) -> bool:
    """Return whether bars are shown: as asked for; None: on a terminal only. False under ``--quiet``."""
    if _QUIET.get():
        return False
    return (sys.stderr is not None and sys.stderr.isatty()) if show is None else show


@contextmanager
def quietly() -> Iterator[None]:
    """Show no progress and no :func:`advice` while the block runs: ``--quiet``."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def advice(lines: Iterable[str]) -> list[str]:
    """Return the hints to print below a result; none under ``--quiet``."""
    return [] if _QUIET.get() else list(lines)


def terminal_width() -> int | None:
    """Return the width of the terminal; None where standard output is a file or a pipe."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(shutil.get_terminal_size().columns, NARROWEST)


def wrapped(text: str) -> str:
    """Return a text wrapped to the terminal, with hanging indents; unchanged elsewhere."""
    width = terminal_width()
    if width is None:
        return text
    lines = text.splitlines()
    return "\n".join(textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an aligned table: text to the left, numbers to the right.

    On a narrow terminal cells wrap, at words where these fit.
    """
    drawn = [[printable(str(cell)) for cell in row] for row in rows]
    width, cells = terminal_width() or WIDEST, [*zip(columns, *drawn, strict=True)]
    words = [max(map(len, " ".join(column).split()), default=0) for column in cells]
    whole = sum(words) + len(BETWEEN) * len(words) <= width
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for (head, *column), least in zip(cells, words, strict=True):
        numeric = all(cell[:1].isdigit() or cell in ("-", "") for cell in column)
        justify: Literal["left", "right"] = "right" if numeric else "left"
        grid.add_column(head, justify=justify, overflow="fold", min_width=least if whole else None)
    for row in drawn:
        grid.add_row(*map(Text, row))
    console = Console(width=width, file=None, no_color=True)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
