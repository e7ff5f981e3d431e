"""The accuracy page, its tables and its records agree."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results/accuracy"
PAGE = (ROOT / "docs/accuracy.md").read_text()


def tables_of(text: str) -> dict[str, set[str]]:
    """Header -> rows, of all tables with that header."""
    found: dict[str, set[str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = table.splitlines()
        found.setdefault(header, set()).update(rows)
    return found


def test_tables_are_what_the_records_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks/accuracy"), *sys.path])
    report = runpy.run_path(str(ROOT / "benchmarks/accuracy/report.py"))
    assert report["tables"](RECORDS) == (RECORDS / "tables.md").read_text()


def test_the_page_quotes_the_tables() -> None:
    drawn, quoted = tables_of((RECORDS / "tables.md").read_text()), tables_of(PAGE)
    assert len(quoted) >= 6
    own = [header for header in quoted if header not in drawn]
    assert own == ["| target | result |"]
    for header, rows in quoted.items():
        if header not in own:
            assert rows <= drawn[header], rows - drawn[header]


def test_named_records_and_pictures_exist() -> None:
    for name in re.findall(r"`([\w*-]+\.jsonl)`", PAGE):
        assert list(RECORDS.glob(name)), name
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
