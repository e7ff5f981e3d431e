"""Prompts for a general chat model, for users without prompts of the model's own use.

The templates of ``prompts.json`` are filled at random, and one prompt in six is about the documentation of an installed
Python package, so that nothing is fetched.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path

FORMS: dict[str, list[str]] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))

MOST_FUNCTIONS = 1000  # each is asked about in several ways, and reading more takes long
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def make_prompts(count: int, seed: int = 0) -> list[str]:
    """Return prompts, the same for the same seed and installed packages."""
    rng = random.Random(seed)
    functions = _functions(min(-(-count // 6), MOST_FUNCTIONS), rng)
    return [_prompt(*divmod(i, 6), rng, functions) for i in range(count)]


def _prompt(turn: int, kind: int, rng: random.Random, functions: list[dict[str, str]]) -> str:
    a, b, c, k = rng.randint(11, 40), rng.randint(11, 40), rng.randint(2, 20), rng.randint(2, 9)
    x, y = rng.sample(FORMS["topics"], 2)
    drawn = {"a": a, "b": b, "c": c, "k": k, "total": c * k + a + b, "x": x, "y": y}
    drawn |= {name: rng.choice(FORMS[name]) for name in ("name", "city", "things", "day")}
    if kind == 5 and functions:
        return rng.choice(FORMS["code"]).format(**functions[turn % len(functions)])
    if kind == 4:
        return f"{rng.choice(FORMS['tasks'])}\n\n{rng.choice(FORMS['letters']).format(**drawn)}"
    form = rng.choice(FORMS[("questions", "instructions", "sums")[kind % 3]])
    return form.format(**drawn) + rng.choice(FORMS["ends"])


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
