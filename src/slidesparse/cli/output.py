"""Print what a command answers: the one door from names and values of a checkpoint to the terminal."""

from __future__ import annotations

from typing import TextIO

from slidesparse.errors import printable


def show(text: str, file: TextIO | None = None) -> None:
    """Print text or JSON, to standard output unless another is named; what is escaped is JSON as before."""
    print("\n".join(map(printable, text.split("\n"))), file=file)
