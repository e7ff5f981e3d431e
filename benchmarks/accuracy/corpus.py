"""Gather the text that the models of the accuracy experiment are trained and judged on, and make its tokenizer.

The text is what a Debian machine with Python has at hand and may be passed on: the Python standard library with its
tests (PSF licence), the sources of installed Python packages (name them; those of the experiment are under BSD and MIT
licences), and English manual pages of Debian packages (each under the licence of its package). A file is held out when
a hash of its name says so. The tokenizer is a byte-level BPE of the training files, with digits one by one.

    python benchmarks/accuracy/corpus.py --stdlib LIB/python3.12 --man /usr/share/man --package sympy --out FOLDER
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import itertools
import json
import lzma
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

END = "<|end|>"
VOCABULARY = 4096
HELD_OUT_ONE_IN = 100
MIN_BYTES = 1000
MAX_BYTES = 400_000  # a few files are tables of test vectors or a whole API in one page
SKIPPED = ("site-packages", "encodings", "__pycache__", "data")  # generated tables, other people's packages
SECTIONS = ("1", "5", "7", "8")


def stdlib_files(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        if not set(SKIPPED) & set(path.relative_to(root).parts):
            yield f"stdlib/{path.relative_to(root)}", path.read_bytes().decode("utf-8", "ignore")


def man_pages(root: Path, leave_out: set[str]) -> Iterator[tuple[str, str]]:
    for section in SECTIONS:
        for path in sorted((root / f"man{section}").glob("*.gz")):
            if not path.is_symlink() and str(path) not in leave_out:
                yield f"man/{path.name}", gzip.decompress(path.read_bytes()).decode("utf-8", "ignore")


def files_of_package(package: str) -> set[str]:
    listed = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False).stdout
    return set(listed.splitlines())


def package_files(name: str) -> Iterator[tuple[str, str]]:
    for file in sorted(importlib.metadata.files(name) or [], key=str):
        if file.suffix == ".py":
            yield f"{name}/{file}", Path(str(file.locate())).read_bytes().decode("utf-8", "ignore")


def unique(files: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen = set()
    for name, text in files:
        digest = hashlib.sha256(re.sub(r"\s+", " ", text).encode()).hexdigest()
        if MIN_BYTES <= len(text.encode()) <= MAX_BYTES and digest not in seen:
            seen.add(digest)
            yield name, text


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts[::4], trainer)  # every fourth file is enough for 4096 tokens
    return tokenizer


def encode(tokenizer: Any, texts: list[str]) -> np.ndarray:
    """Token numbers, each text ended by ``END``: uint16 [n]."""
    (end,) = tokenizer.encode(END).ids
    parts = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)]
    return np.fromiter(itertools.chain.from_iterable(parts), dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdlib", type=Path, required=True)
    parser.add_argument("--man", type=Path, required=True)
    parser.add_argument("--without-package", action="append", default=[], help="whose manual pages stay out")
    parser.add_argument("--package", nargs="+", default=[], help="installed Python packages")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    leave_out = {path for package in options.without_package for path in files_of_package(package)}
    sources = {"stdlib": stdlib_files(options.stdlib), "man": man_pages(options.man, leave_out)}
    sources |= {f"{name} {importlib.metadata.version(name)}": package_files(name) for name in options.package}
    named = [(source, name, text) for source, files in sources.items() for name, text in unique(files)]
    parts = {part: [t for _, n, t in named if is_held_out(n) == (part == "held_out")] for part in ("train", "held_out")}
    held_out = "".join(parts["held_out"]).encode()
    facts: dict[str, Any] = {
        "stdlib": options.stdlib.name,
        "man_without": options.without_package,
        "held_out_bytes": len(held_out),
        "held_out_xz_bits_per_byte": 8 * len(lzma.compress(held_out, preset=9)) / len(held_out),
    }
    for source in sources:
        here = [(name, text) for of, name, text in named if of == source]
        held = [text for name, text in here if is_held_out(name)]
        facts[f"source {source}"] = {
            "files": len(here),
            "bytes": sum(len(text.encode()) for _, text in here),
            "held_out_files": len(held),
            "held_out_bytes": sum(len(text.encode()) for text in held),
        }
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(parts["train"])
    (options.out / "tokenizer.json").write_text(tokenizer.to_str())
    for part, texts in parts.items():
        tokens = encode(tokenizer, [text.replace(END, "") for text in texts])
        facts[f"{part}_tokens"] = len(tokens)
        facts[f"{part}_sha256"] = hashlib.sha256(tokens.tobytes()).hexdigest()
        (options.out / f"{part}.xz").write_bytes(lzma.compress(tokens.tobytes(), preset=6))
    (options.out / "held_out.names").write_text("".join(f"{n}\n" for _, n, _ in named if is_held_out(n)))
    (options.out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
