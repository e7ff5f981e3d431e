"""Write results/README.md: every record, what it shows, who cites it, and what it says of where it was made.

    python benchmarks/index_results.py            # say whether the index is current
    python benchmarks/index_results.py --write

What a file shows and which command made it is in ``results/descriptions.json``; commit, date, GPU and versions are read
from the file itself, and the pages that cite it are searched for its name.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
INDEX = RESULTS / "README.md"
CODE = "the code"
OWN = ("README.md", "descriptions.json")

HEAD = """# Records

Every figure of this project was read from one of these files. Records of states before 0.3.0 are in the repository's
history: `git show bf96011f:results/history/PATH`; the [log](../docs/log/index.md) keeps their numbers.

`python benchmarks/index_results.py --write` writes this page, from `results/descriptions.json` and the files
themselves. A `+` after a commit: the tree had changes. Where a file does not say its commit or date, the cell is empty.
A command is that of its day: what the tree does not have any more, `git show COMMIT:PATH` prints.
"""


def files() -> list[str]:
    """Every record, by its path below results/: what git tracks or would track."""
    found = (path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file())
    return sorted(path for path in found if path not in OWN)


def descriptions() -> dict[str, dict[str, str]]:
    """Path -> what it shows, and the command that made it."""
    known: dict[str, dict[str, str]] = json.loads((RESULTS / "descriptions.json").read_text())
    return known


@lru_cache(maxsize=1)
def citations() -> dict[str, list[str]]:
    """Path of a record, or of a folder of them -> pages and source files that name it."""
    found: dict[str, list[str]] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for target in set(_targets(page)):
            found.setdefault(target, []).append(page.relative_to(ROOT).as_posix())
    for source in sorted((ROOT / "src").rglob("*.py")):
        for target in set(re.findall(r"results/([\w./-]*\w)", source.read_text())):
            if (RESULTS / target).is_file():
                found.setdefault(target, []).append(CODE)
    return found


def _targets(page: Path) -> Iterator[str]:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        path = Path(os.path.normpath(page.parent / target))
        if path.is_relative_to(RESULTS):
            yield path.relative_to(RESULTS).as_posix()
    for name in re.findall(r"`([\w*.-]+\.jsonl)`", text):  # as accuracy.md names its records
        yield from (path.relative_to(RESULTS).as_posix() for path in (RESULTS / "accuracy").glob(name))


def cited_by(path: str) -> list[str]:
    """The pages that name a record, or the folder in which it is."""
    return sorted({*citations().get(path, ()), *citations().get(Path(path).parent.as_posix(), ())})


def facts(path: str) -> tuple[str, str, str]:
    """Commit, date and machine, as far as a record says them."""
    name = RESULTS / path
    if name.suffix not in (".jsonl", ".gz", ".txt"):
        return "", "", ""
    with gzip.open(name, "rt") if name.suffix == ".gz" else name.open(encoding="utf-8") as file:
        lines = [line for line, _ in zip(file, range(4), strict=False)]
    if name.suffix == ".txt":
        return _facts_of_text("".join(lines))
    first: dict[str, Any] = json.loads(lines[0])
    machine = first.get("machine") or first
    versions = [f"{library} {machine[library]}" for library in ("vllm", "torch") if machine.get(library)]
    where = [machine.get("gpu") or machine.get("device") or machine.get("cpu") or "", *versions]
    date = str(first.get("started") or first.get("written") or first.get("date") or "")[:10]
    commit = str(machine.get("commit") or first.get("commit") or "")
    return commit[:7] + ("+" if commit.endswith("+") else ""), date, ", ".join(filter(None, where))


def _facts_of_text(text: str) -> tuple[str, str, str]:
    patterns = (r"commit ([0-9a-f]{7})", r"(20\d\d-\d\d-\d\d)", r"(NVIDIA H200|vLLM [\d.]+)")
    found = (re.search(pattern, text) for pattern in patterns)
    commit, date, machine = ("" if one is None else one[1] for one in found)
    return commit, date, machine


def table(paths: list[str]) -> str:
    """The rows of some files."""
    known = descriptions()
    lines = ["| file | what it shows | cited by | command | commit, date, machine |", "|---|---|---|---|---|"]
    for path in paths:
        pages = ", ".join(_link(page) for page in cited_by(path))
        told = known[path]
        made = ", ".join(filter(None, facts(path)))
        command = f"`{told['command']}`" if told["command"] else ""
        lines.append(f"| [{path}]({path}) | {told['shows']} | {pages} | {command} | {made} |")
    return "\n".join(lines) + "\n"


def _link(page: str) -> str:
    return page if page == CODE else f"[{page.removeprefix('docs/')}](../{page})"


def index() -> str:
    """The whole page."""
    return f"{HEAD}\n{table(files())}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the index")
    if parser.parse_args().write:
        INDEX.write_text(index())
        return 0
    if INDEX.exists() and INDEX.read_text() == index():
        return 0
    print(f"not current: {INDEX.relative_to(ROOT)}; run with --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
