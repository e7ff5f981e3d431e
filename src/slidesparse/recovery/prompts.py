"""Prompts for a general chat model, for users without prompts of the model's own use.

The templates of ``prompts.json`` are filled at random. They ask for worked answers, since a pruned model loses those
first: of 20 prompts 5 are arithmetic in steps, 8 ask for Python with tests, 3 of them by the documentation of an
installed package, and 7 are of everyday topics, letters and code to explain. Nothing is fetched. docs/log/whose-text.md
compares them with others.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

FORMS: dict[str, list[Any]] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))

SHARES = {"arithmetic": 5, "programs": 5, "functions": 3, "questions": 2, "instructions": 2, "letters": 2, "code": 1}
"""Prompts of each kind among 20 in a row."""

KINDS = [kind for kind, share in SHARES.items() for _ in range(share)]

MOST_FUNCTIONS = 1000  # each is asked about in several ways, and reading more takes long
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def make_prompts(count: int, seed: int = 0) -> list[str]:
    """Return prompts, the same for the same seed and installed packages."""
    rng = random.Random(seed)
    functions = _functions(min(-(-count // 5), MOST_FUNCTIONS), rng)
    return [_prompt(KINDS[7 * i % len(KINDS)], rng, functions) for i in range(count)]  # 7, so that kinds mix


def _prompt(kind: str, rng: random.Random, functions: list[dict[str, str]]) -> str:
    drawn = _drawn(rng)
    if kind in ("functions", "code") and functions:
        drawn |= rng.choice(functions)
    elif kind in ("programs", "functions", "code"):
        kind, wanted = "programs", rng.choice(FORMS["inputs"])
        phrases = {name: rng.choice(FORMS[name]).format(**drawn) for name in ("numbers", "words", "how")}
        drawn |= wanted | {"what": rng.choice(wanted["what"]).format(**drawn, **phrases)}
    asked: str = rng.choice(FORMS[kind]).format(**drawn)
    if kind == "letters":
        return f"{rng.choice(FORMS['tasks'])}\n\n{asked}"
    ends = {"arithmetic": "steps", "programs": "tests", "functions": "tests", "questions": "ends"}.get(kind, "")
    between = "\n\n" if "\n\n" in asked else " "
    return f"{asked}{between}{rng.choice(FORMS[ends])}".strip() if ends else asked


def _drawn(rng: random.Random) -> dict[str, Any]:
    """Return what fills the fields of templates."""
    a, b, c, k = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 20), rng.randint(2, 9)
    drawn: dict[str, Any] = {"a": a, "b": b, "c": c, "k": k, "ac": a * c, "bc": b * c}
    drawn |= {"line": c * k + a, "total": c * k + a + b}
    drawn |= {name: rng.choice(FORMS[name]) for name in ("name", "city", "things", "day", "word")}
    drawn |= zip("xy", rng.sample(FORMS["topics"], 2), strict=True)
    some = ", ".join(str(rng.randint(1, 200)) for _ in range(rng.randint(4, 8)))
    return drawn | {"some": some, "letter": rng.choice("abcdeilnorst")}


def _functions(count: int, rng: random.Random) -> list[dict[str, str]]:
    """Return signatures and docstrings of functions, from one file of each installed package in turn."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    packages = [one for folder in folders for one in sorted(folder.glob("[!_]*")) if one.stem not in SKIPPED]
    inside = (sorted(one.rglob("*.py")) if (one / "__init__.py").exists() else [one] for one in packages)
    files = chain.from_iterable(zip_longest(*(rng.sample(some, len(some)) for some in inside)))
    usable = (one for one in files if one is not None and one.suffix == ".py" and "test" not in one.name)
    functions = [*islice(chain.from_iterable(map(_of_file, usable)), count)]
    return rng.sample(functions, len(functions))


def _of_file(path: Path) -> Iterator[dict[str, str]]:
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    for node in body:  # a method means little without its class
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            text, signature = (ast.get_docstring(node) or "").strip(), f"{node.name}({ast.unparse(node.args)})"
            if 60 <= len(text) <= 900 and len(signature) < 200:
                yield {"signature": signature, "text": text}
