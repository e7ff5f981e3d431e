"""Limits of size. They are there to be kept: what does not fit replaces something, or is left out."""

from __future__ import annotations

import re
from pathlib import Path

import slidesparse
from slidesparse.cli import build_parser

ROOT = Path(slidesparse.__file__).parent

MOST_ROOMS = 22
"""Folders with Python files, and modules at the top: as many as a reader can keep apart."""

MOST_LINES = 31_842
"""Lines of Python and CUDA in the wheel: what one person can still hold in their head, by folder. It only falls."""

MOST_LINES_OF_A_FILE = 400
"""Of a Python file: one idea, read in one sitting."""

FILES = sorted(path for path in ROOT.rglob("*.py"))
SOURCES = sorted(path for path in ROOT.rglob("*") if path.suffix in {".py", ".cu", ".cuh"})


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _room(path: Path) -> str:
    """The folder of a file, or the module where it is at the top."""
    inside = path.relative_to(ROOT)
    return inside.stem if len(inside.parts) == 1 else inside.parent.as_posix()


def test_the_rooms_can_be_counted() -> None:
    rooms = {_room(path) for path in FILES} - {"__init__", "__main__"}
    assert len(rooms) <= MOST_ROOMS, sorted(rooms)


def test_the_wheel_is_small() -> None:
    assert sum(map(_lines, SOURCES)) <= MOST_LINES


def test_every_file_is_short() -> None:
    assert not [path for path in FILES if _lines(path) > MOST_LINES_OF_A_FILE]


WITHOUT_A_GAIN = {
    *("--help", "--json", "--verbose", "--quiet", "--dry-run"),  # how it is told
    *("--revision", "--links", "--device", "--dtype"),  # what is read, where, and what is written
    *("--part", "--ignore", "--layer"),  # what is treated
    *("--calibration", "--no-bos"),  # the text of a method
    *("--samples", "--length", "--seed"),  # its windows
}


def test_an_option_of_prune_has_a_measured_gain() -> None:
    """An option that changes the result has its row in the table of the page, or is left out."""
    (commands,) = (action for action in build_parser()._actions if action.dest == "==SUPPRESS==" or action.choices)
    options = {one.option_strings[-1] for one in commands.choices["prune"]._actions if one.option_strings}
    page = (Path(__file__).parents[1] / "docs/pruning.md").read_text(encoding="utf-8")
    table = page.partition("## What each option gains")[2].partition("\n## ")[0]
    gains = set(re.findall(r"^\| `(--[\w-]+)` \| .*\d", table, re.MULTILINE))
    assert options - WITHOUT_A_GAIN <= gains
