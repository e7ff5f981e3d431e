"""Tasks for a model to answer, made out of the documentation of the packages that are installed here.

Functions say in their docstrings what they do, in words of many people about many things, and nobody needs to fetch
anything. Each is asked about in one of several ways, of which half want code and half want prose. Between them stand
short questions, whose answers are exact: pruning without any changed those most (docs/log/kept-weights.md).
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FORMS = (
    "Write a Python function `{signature}`.\n\n{text}",
    "Complete this function. Answer with the code alone.\n\n```python\ndef {signature}:\n{docstring}\n```",
    "Implement the following from scratch, without third-party libraries, and explain each step briefly.\n\n"
    "def {signature}:\n{docstring}",
    "Write tests with pytest for a function that is described like this:\n\n`{signature}`: {text}",
    "Solve this in Python, and say what time and memory your solution takes.\n\n{text}\n\nCall it `{name}`.",
    "Explain to somebody who is new to programming what this function does, and when one would use it.\n\n"
    "{signature}\n\n{text}",
    "Here is a piece of documentation:\n\n{text}\n\nRewrite it so that it is clearer, in at most five sentences.",
    "Which mistakes do people make when they use `{name}`, which is documented as follows? Give an example of each.\n\n"
    "{text}",
    "Summarise this text in one sentence, and then ask three questions that it leaves open.\n\n{text}",
    "A colleague asks: what is the idea of `{name}`? Answer in a short paragraph.\n\nIts documentation: {text}",
)
"""Ways of asking."""

QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} * {c}?",
    "Calculate {a} + {b} - {c}.",
    "What is the remainder of {a} divided by {c}?",
    "What is {c} percent of {k}00?",
    "What number comes next: {c}, {row[0]}, {row[1]}, {row[2]}?",
    "What is the largest of these numbers: {numbers}?",
    "Sort these numbers from smallest to largest: {numbers}",
    "Is {a} an even or an odd number?",
    "A box holds {c} pencils. How many pencils are in {k} boxes?",
    "How many letters has the word '{word}'?",
    "What is the first letter of the word '{word}'?",
    "Write the word '{word}' in capital letters.",
)
ENDS = ("", " Give the answer only.", "\n\nAnswer in one line.", " Explain briefly.")
"""What is asked in between, and what comes after it."""

EVERY = 6
"""One task of so many is such a question."""

LENGTHS = (60, 900)
"""Characters of a docstring that is worth asking about; a longer one is cut."""

MOST_OF_ONE = 400
"""Functions of one package: otherwise the largest one asks nearly all questions."""

LARGEST_FILE = 400_000
"""Bytes of a source file; larger ones were written by a program."""


@dataclass(frozen=True)
class Documented:
    """A function with a docstring."""

    name: str
    signature: str
    text: str

    def ask(self, form: str) -> str:
        """Return a task."""
        docstring = textwrap.indent(f'"""{self.text}\n"""', "    ")
        return form.format(name=self.name, signature=self.signature, text=self.text, docstring=docstring)


def make_tasks(number: int, seed: int = 0) -> list[str]:
    """Return tasks, the same for the same seed and packages; each function is asked about in another way each time."""
    rng = random.Random(seed)
    functions = _functions(number, rng)
    rng.shuffle(functions)
    rounds = range(-(-number // max(len(functions), 1)))
    asked = (one.ask(FORMS[(i + turn) % len(FORMS)]) for turn in rounds for i, one in enumerate(functions))
    words = [word for one in functions for word in one.name.split("_") if len(word) > 3]
    tasks = (_question(rng, words) if words and i % EVERY == EVERY - 1 else next(asked, None) for i in range(number))
    return [task for task in tasks if task is not None]


def _question(rng: random.Random, words: list[str]) -> str:
    c, k = rng.randint(2, 20), rng.randint(2, 9)
    numbers = ", ".join(str(rng.randint(1, 200)) for _ in range(rng.randint(3, 6)))
    drawn = {"a": rng.randint(2, 99), "b": rng.randint(2, 99), "c": c, "k": k, "row": [c + k * i for i in (1, 2, 3)]}
    question = rng.choice(QUESTIONS).format(**drawn, numbers=numbers, word=rng.choice(words))
    return question + rng.choice(ENDS)


def _functions(number: int, rng: random.Random) -> list[Documented]:
    """Return functions of the standard library and of all packages, each name once; more of them for more tasks."""
    paths = sysconfig.get_paths()
    found: dict[str, Documented] = {}
    packages = [*_packages(Path(paths["stdlib"])), *_packages(Path(paths["purelib"]))]
    most = min(MOST_OF_ONE, 8 + 8 * number // len(packages))
    for package in packages:
        files = [package] if package.is_file() else sorted(package.rglob("*.py"))
        rng.shuffle(files)
        count = 0
        for file in files:
            for one in _of_file(file):
                count += found.setdefault(one.name, one) is one
            if count >= most:
                break
    return list(found.values())


def _packages(folder: Path) -> list[Path]:
    """Return the modules and packages of a folder; private ones and tests hold little that one would ask about."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    return sorted(
        path
        for path in folder.glob("*")
        if path.stem not in skipped
        and not path.name.startswith("_")
        and (path.suffix == ".py" or (path / "__init__.py").exists())
    )


def _of_file(path: Path) -> Iterator[Documented]:
    try:
        if "test" in path.name or path.stat().st_size > LARGEST_FILE:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in other people's strings
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        if node.args.args and node.args.args[0].arg in ("self", "cls"):  # a method means little without its class
            continue
        text = (ast.get_docstring(node) or "").strip()
        if len(text) >= LENGTHS[0]:
            signature = f"{node.name}({ast.unparse(node.args)})"
            cut = text if len(text) <= LENGTHS[1] else text[: LENGTHS[1]].rsplit("\n", 1)[0]
            if len(signature) < 200:
                yield Documented(node.name, signature, cut)
