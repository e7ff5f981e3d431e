"""Gather the text that the models of the accuracy experiment are trained and judged on, and make its tokenizer.

The text is what a Debian machine with Python has at hand and may be passed on: the Python standard library (PSF
licence) and English manual pages of Debian packages (each under the licence of its package, all redistributable). A
file is held out when a hash of its name says so. The tokenizer is a byte-level BPE of the training files, with digits
one by one.

    python benchmarks/accuracy/corpus.py --stdlib LIB/python3.12 --man /usr/share/man --out FOLDER
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

END = "<|end|>"
VOCABULARY = 4096
HELD_OUT_ONE_IN = 50
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


def unique(files: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen = set()
    for name, text in files:
        digest = hashlib.sha256(re.sub(r"\s+", " ", text).encode()).hexdigest()
        if MIN_BYTES <= len(text.encode()) <= MAX_BYTES and digest not in seen:
            seen.add(digest)
            yield name, text


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts: list[str]) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdlib", type=Path, required=True)
    parser.add_argument("--man", type=Path, required=True)
    parser.add_argument("--without-package", action="append", default=[], help="whose manual pages stay out")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    leave_out = {path for package in options.without_package for path in files_of_package(package)}
    sources = {
        "stdlib": list(unique(stdlib_files(options.stdlib))),
        "man": list(unique(man_pages(options.man, leave_out))),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, object] = {"stdlib": options.stdlib.name, "without": options.without_package}
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    names: dict[str, list[str]] = {"train": [], "held_out": []}
    for source, files in sources.items():
        for name, text in files:
            part = "held_out" if is_held_out(name) else "train"
            parts[part].append(text.replace(END, ""))
            names[part].append(name)
        facts[source] = {
            part: {"files": len(chosen), "bytes": sum(len(text.encode()) for text in chosen)}
            for part in parts
            for chosen in [[text for name, text in files if is_held_out(name) == (part == "held_out")]]
        }
    for part, texts in parts.items():
        joined = END.join(texts).encode()
        facts[f"{part}_sha256"] = hashlib.sha256(joined).hexdigest()
        (options.out / f"{part}.xz").write_bytes(lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME))
        (options.out / f"{part}.names").write_text("\n".join(names[part]) + "\n")
    held_out = "".join(parts["held_out"]).encode()
    facts["xz_bits_per_byte"] = 8 * len(lzma.compress(held_out, preset=9)) / len(held_out)
    (options.out / "tokenizer.json").write_text(train_tokenizer(parts["train"]))
    (options.out / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
