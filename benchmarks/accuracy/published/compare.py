"""Compare records of ``judge.py`` with that of the dense model, on the same problems.

    python compare.py RECORDS.jsonl [--base dense] [--pairs "6:8 int8" "6:8"]

Differences are those of the same problems, with the standard error of their mean. Two scores whose problems differ are
refused, and texts that differ are left out. Perplexities are compared window by window: exp of the mean difference of
losses, less 1, in percent.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXTS = ("code", "chats")
TASKS = {"reasoning": "exact answers", "sql": "SQL"}
"""Part of a record -> its column."""


def paired(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the mean of ``one - other`` over the same problems, and its standard error."""
    if len(one) != len(other):
        raise SystemExit(f"records of {len(one)} and of {len(other)} problems cannot be paired")
    differences = [a - b for a, b in zip(one, other, strict=True)]
    mean = math.fsum(differences) / len(differences)
    squares = math.fsum((d - mean) ** 2 for d in differences)
    return mean, math.sqrt(squares / max(len(differences) - 1, 1) / len(differences))


def points(one: Sequence[float], base: Sequence[float]) -> str:
    """Return a score in percent and its difference from the base in points."""
    share = f"{100 * math.fsum(one) / len(one):.1f}"
    if one is base:
        return share
    mean, error = paired(one, base)
    return f"{share} ({100 * mean:+.1f} ± {100 * error:.1f})"


def perplexity(one: dict[str, Any], base: dict[str, Any]) -> str:
    """Return a perplexity, its difference from the base in percent, and the divergence from the dense model."""
    if one["digest"] != base["digest"]:
        return "-"  # of another text
    losses = one["loss"]
    cell = f"{math.exp(math.fsum(losses) / len(losses)):.3f}"
    if one is not base:
        mean, error = paired(losses, base["loss"])
        cell += f" ({100 * math.expm1(mean):+.2f} ± {100 * math.exp(mean) * error:.2f} %)"
    if kl := one.get("kl"):
        cell += f", KL {math.fsum(kl) / len(kl):.4f}"
    return cell


def all_questions(record: dict[str, Any], task: str = "reasoning") -> list[float]:
    """Return the right answers of all of a task's generators in one list."""
    right = record[task]["right"]
    return [one for name in sorted(right) for one in right[name]]


def cells(record: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Return a row of the table: every part that both records have."""
    row = [record["tag"], record["run_by"]]
    row += [perplexity(record[part], base[part]) if part in record and part in base else "-" for part in TEXTS]
    for score in ("greedy", "sampled"):
        own, other = (one.get("humaneval", {}).get(score) for one in (record, base))
        row.append(points(own, other) if own and other else "-")
    for task in TASKS:
        both = task in record and task in base
        own, other = (all_questions(one, task) if both else [] for one in (record, base))
        row.append(points(other if record is base else own, other) if both else "-")
    return row


def table(records: list[dict[str, Any]], base: dict[str, Any]) -> list[str]:
    """Return a table in Markdown."""
    head = ["", "run by", "code", "chats", "HumanEval, greedy", "HumanEval, sampled", *TASKS.values()]
    rows = [head, ["---"] * len(head), *(cells(record, base) for record in records)]
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--base", default="dense", help="tag of the record that the others are compared with")
    parser.add_argument(
        "--pairs", nargs=2, action="append", default=[], metavar=("ONE", "OTHER"), help="tags: one beside the other"
    )
    options = parser.parse_args()
    lines = [line for path in options.records for line in path.read_text().splitlines() if line]
    found = {record["tag"]: record for record in map(json.loads, lines)}  # the last of a tag counts
    missing = {options.base, *(tag for pair in options.pairs for tag in pair)} - set(found)
    if missing:
        raise SystemExit(f"no record has the tag {', '.join(sorted(missing))}; there are: {', '.join(found)}")
    base = found[options.base]
    print("\n".join(table(list(found.values()), base)))
    for one, other in options.pairs:
        print("\n" + "\n".join(table([found[other], found[one]], found[other])))


if __name__ == "__main__":
    main()
