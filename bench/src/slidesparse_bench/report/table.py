"""Write a table as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
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
        lines = ["| " + " | ".join(map(self._show, self.columns, row)) + " |" for row in self.rows]
        return "\n".join([head, rule, *lines])

    def text(self) -> str:
        """Return aligned lines, for a terminal."""
        rows = [self.columns, *(tuple(map(self._show, self.columns, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def _show(self, column: str, cell: Cell) -> str:
        if cell is None:
            return "-"
        return format(cell, self.formats.get(column, ".2f")) if isinstance(cell, float) else str(cell)

    def csv(self) -> str:
        """Return comma-separated values, as RFC 4180 has them."""
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return buffer.getvalue()
