"""Progress bars and tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

MAX_WIDTH = 160


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
        total: Amount of work.
        unit: ``bytes``, or anything else for plain counts.
        show: Whether to show the bar; None: on a terminal only.
    """
    shown = sys.stderr.isatty() if show is None else show
    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=total)

        def advance(amount: int, note: str = "") -> None:
            bar.update(task, advance=amount, description=f"{title} {note}".rstrip())

        yield advance


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> str:
    """Return an aligned table as text: text to the left, columns of numbers to the right."""
    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(str(row[index])[:1].isdigit() or str(row[index]) in ("-", "") for row in rows)
        grid.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*map(str, row))
    console = Console(width=MAX_WIDTH, file=None, no_color=True)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
