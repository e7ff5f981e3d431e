"""The pages' tables are those of the records; their links, commands and names of files are there."""

from __future__ import annotations

import re
import runpy
import shlex
from functools import cache
from pathlib import Path

import pytest

from slidesparse import __version__
from slidesparse.cli import build_parser, main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/slidesparse"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
MEASURED = runpy.run_path(str(ROOT / "benchmarks/measured.py"))
INDEX = runpy.run_path(str(ROOT / "benchmarks/index_results.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


# -- figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MEASURED["PAGES"], ids=name)
def test_tables_are_what_the_records_say(path: Path) -> None:
    text = path.read_text()
    assert MEASURED["MARKED"].search(text)
    assert MEASURED["drawn"](text) == text, "run python benchmarks/measured.py --write"


def test_every_table_stands_on_a_page_and_every_marker_names_one() -> None:
    used = [found for path in MEASURED["PAGES"] for found in re.findall(r"<!-- table: ([\w.-]+) -->", path.read_text())]
    assert sorted(used) == sorted(MEASURED["TABLES"])


@pytest.mark.parametrize("name", ["loss", "windows"])
def test_the_pictures_are_current(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra report) is not installed")
    drawing = runpy.run_path(str(ROOT / f"docs/figures/{name}.py"))
    drawing["draw"](*([drawing["WEIGHT"]] if name == "windows" else []), tmp_path / "drawn.svg")
    paths = ROOT / f"docs/figures/{name}.svg", tmp_path / "drawn.svg"
    texts = [re.findall(r">([^<>\n]+)<", path.read_text()) for path in paths]
    assert texts[0] == texts[1] != []  # texts, not bytes: another matplotlib writes other bytes


# -- records -------------------------------------------------------------------------------------------------------


def test_the_index_names_every_record_and_nothing_else() -> None:
    assert INDEX["files"]() == sorted(INDEX["descriptions"]())
    assert INDEX["INDEX"].read_text() == INDEX["index"](), "run python benchmarks/index_results.py --write"


REPORTS = ["h200/report-gemm/report.md", "h200/serve/report/serve.md"]


@pytest.mark.parametrize("report", REPORTS)
def test_reports_are_what_their_command_draws(report: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra report) is not installed")
    *words, folder = INDEX["descriptions"]()[report]["command"].split()[1:]
    page = Path("results", report)
    assert folder == page.parent.as_posix()
    words = [str(ROOT / word) if word.endswith((".jsonl", ".jsonl.gz")) else word for word in words]
    assert main([*words, str(tmp_path)]) == 0
    assert (tmp_path / page.name).read_text() == (ROOT / page).read_text()


# -- code ----------------------------------------------------------------------------------------------------------


def test_named_source_files_exist() -> None:
    for path in PAGES:
        for named in re.findall(r"`((?:[\w]+/)*[\w]+\.(?:py|cu))`", path.read_text()):
            assert "NAME" in named or any((base / named).exists() for base in (ROOT, PACKAGE)), (path, named)


def test_commands_parse() -> None:
    for block in (block for path in PAGES for block in code_blocks(path.read_text(), "bash")):
        for line in re.findall(r"^(?:.*&& )?(slidesparse .*)", block.replace("\\\n", ""), re.MULTILINE):
            assert build_parser().parse_args(shlex.split(line, comments=True)[1:]).command


def test_options_of_bench_serve_parse() -> None:
    """Those of the table, and what its cells name beside them."""
    table = (ROOT / "docs/measure.md").read_text().partition("| option | effect |")[2].partition("\n\n")[0]
    options = re.findall(r"`(--[^`]+)`", table)
    assert options
    for option in options:
        assert build_parser().parse_args(["bench", "serve", "--out", "x.jsonl", *shlex.split(option)]).command


def test_messages_that_troubleshooting_explains_exist() -> None:
    """Every quoted message, without the parts that differ from case to case, stands in the source."""
    source = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    source = re.sub(r"\{[^{}]*\}", "{}", source)
    tables = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    missing = []
    for quoted in re.findall(r"`([^`]+)`", "\n".join(tables)):
        parts = re.split(r"^dense, (?=\D)|\.\.\.|\d[\dx.:]*|\bX\b|,? ?hopper|qkv_proj|^sparsegpt|^magnitude", quoted)
        if max(parts, key=len).strip(" ;:,") not in source:
            missing.append(quoted)
    assert not missing


def test_this_version_has_its_changes() -> None:
    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_pages_are_short() -> None:
    for path in PAGES:
        lines, most = path.read_text().splitlines(), 80 if path.name == "README.md" else 150
        assert len(lines) <= most or "log" in path.parts, path
        assert [line for line in lines if len(line) > 200 and not line.startswith(("|", "lm_eval", "  --"))] == [], path


# -- links ---------------------------------------------------------------------------------------------------------


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), (path, target)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)", path.read_text()):
            page = path.parent / target if target else path
            assert target.startswith("http") or page.suffix != ".md" or anchor in anchors(page), (path, target, anchor)


@cache
def anchors(page: Path) -> set[str]:
    """Those of a page's headings that GitHub and MkDocs give alike: a dash between spaces makes two."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", text)).strip().lower() for text in headings]
    return {text.replace(" ", "-") for text in plain if "  " not in text}


def test_rows_of_a_table_have_as_many_cells_as_its_head() -> None:
    for path in (*PAGES, INDEX["INDEX"]):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({row.count("|") for row in table.splitlines()}) == 1, table
