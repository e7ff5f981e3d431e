"""Progress bars and tables on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

MARGIN, SEPARATOR = " ", "   "
"""Before a table's first column, and between two columns, as its box has them."""

LEAST_FOLDED = 16
"""Fewest characters to which the first column of a table is folded."""

NARROWEST = 40
"""Columns below which nothing is made: a narrower terminal wraps."""

_HIDDEN = ContextVar("hidden bars", default=False)


class Advance(Protocol):
    """A function that advances a bar."""

    def __call__(self, amount: int, note: str = "") -> None:
        """Advance by ``amount``, and show ``note`` after the title."""
        ...


@contextmanager
def progress_bar(title: str, total: int, *, unit: str = "bytes", show: bool | None = None) -> Iterator[Advance]:
    """Show a bar on standard error and yield the function that advances it.

    Args:
        title: Shown before the bar.
        total: Amount of work; of none no bar is shown.
        unit: ``bytes``, or anything else for plain counts.
        show: Whether to show the bar; None: on a terminal only.
    """
    shown = bars_shown(show) and total > 0
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=total)

        def advance(amount: int, note: str = "") -> None:
            bar.update(task, advance=amount, description=f"{title} {note}".rstrip())

        yield advance


def bars_shown(show: bool | None = None) -> bool:
    """Return whether bars are shown: as asked for; None: on a terminal only. Never inside :func:`hidden_bars`."""
    if _HIDDEN.get():
        return False
    return (sys.stderr is not None and sys.stderr.isatty()) if show is None else show


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Show no progress bar while the block runs."""
    token = _HIDDEN.set(True)
    try:
        yield
    finally:
        _HIDDEN.reset(token)


def terminal_width() -> int | None:
    """Return the columns of the terminal that standard output is; None where it is a file or a pipe."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(shutil.get_terminal_size().columns, NARROWEST)


def wrapped(text: str) -> str:
    """Return each line of a text in as many lines as the terminal needs, indented after the first; itself elsewhere."""
    width = terminal_width()
    if width is None:
        return text
    lines = text.splitlines()
    return "\n".join(textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an aligned table as text: text to the left, columns of numbers to the right.

    On a terminal that is too narrow the columns go into several tables, each of which begins with the first column.
    """
    most = terminal_width()
    widths = [max(len(str(cell)) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    if most is not None and len(widths) > 1:  # a column that leaves no room for another is folded
        room = most - len(MARGIN) - len(SEPARATOR)
        widths[1:] = [min(width, room - min(widths[0], LEAST_FOLDED)) for width in widths[1:]]
        widths[0] = min(widths[0], room - max(widths[1:]))
    return "\n\n".join(
        _table([columns[i] for i in block], [[row[i] for i in block] for row in rows], [widths[i] for i in block])
        for block in _blocks(widths, most)
    )


def _blocks(widths: Sequence[int], most: int | None) -> list[list[int]]:
    """Return the columns of each table, the first column in all, so that none is wider than ``most``.

    >>> _blocks([10, 5, 5, 5], 27)
    [[0, 1, 2], [0, 3]]
    """
    blocks = [[0]]
    for column in range(1, len(widths)):
        if most is not None and len(blocks[-1]) > 1 and _width([widths[i] for i in (*blocks[-1], column)]) > most:
            blocks.append([0])
        blocks[-1].append(column)
    return blocks


def _width(widths: Sequence[int]) -> int:
    return len(MARGIN) + sum(widths) + len(SEPARATOR) * (len(widths) - 1)


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]], widths: Sequence[int]) -> str:
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        numeric = all(str(row[index])[:1].isdigit() or str(row[index]) in ("-", "") for row in rows)
        grid.add_column(column, justify="right" if numeric else "left", width=width, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=_width(widths) + len(MARGIN), file=None, no_color=True)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
