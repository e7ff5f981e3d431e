"""Write a table as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import re
import zlib
from dataclasses import dataclass

Cell = str | int | float | None
"""None is an empty cell."""


@dataclass(frozen=True)
class Table:
    """A table for people (Markdown) and for programs (CSV, numbers unrounded).

    Attributes:
        name: Name of its CSV file.
        title: A heading.
        columns: Names of the columns.
        rows: Rows of cells; None is an empty cell.
        formats: Column -> format of its floats; two decimals otherwise.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    formats: dict[str, str]

    def markdown(self) -> str:
        """Return a Markdown table, numbers aligned to the right."""
        head = "| " + " | ".join(self.columns) + " |"
        numeric = [all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]
        rule = "|" + "|".join("---:" if right else "---" for right in numeric) + "|"
        shown = [[cell.replace("|", r"\|") for cell in map(self._show, self.columns, row)] for row in self.rows]
        lines = ["| " + " | ".join(row) + " |" for row in shown]
        return "\n".join([head, rule, *lines])

    def text(self) -> str:
        """Return aligned lines, for a terminal."""
        rows = [self.columns, *(tuple(map(self._show, self.columns, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def _show(self, column: str, cell: Cell) -> str:
        if cell is None:
            return "-"
        if isinstance(cell, float):
            return format(cell, self.formats.get(column, ".2f"))
        return text if (text := str(cell)).isprintable() else repr(text)[1:-1]

    def csv(self) -> str:
        """Return comma-separated values, as RFC 4180 has them."""
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return buffer.getvalue()


def file_name(text: str) -> str:
    """Return a name of a file for a text; where characters are replaced, a checksum keeps two texts apart.

    >>> file_name("Qwen2.5-7B"), file_name("a/$b")
    ('qwen2.5-7b', 'a__b-c39baf75')
    """
    lower = text.lower()
    safe = re.sub(r"[^a-z0-9_.-]", "_", lower)[:80]
    return safe if safe == lower else f"{safe}-{zlib.crc32(text.encode()):08x}"
