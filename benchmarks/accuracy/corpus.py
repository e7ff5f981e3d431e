"""Gather the text that the models of the accuracy experiment are trained and judged on, as tokens in one file.

The text is what a Debian machine with Python has at hand and may be passed on: sources and documentation of installed
Debian packages, of Python packages, and of Python itself. A package without a free licence that it names stays out, as
does a file most of whose lines were seen already: packages are installed in several versions, and copy each other.

Two parts are held out: whole packages, by a hash of the name, and single files of the packages that are trained on.

    python benchmarks/accuracy/corpus.py --site-packages FOLDER ... --stdlib FOLDER ... --out corpus.xz
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

END = "<|end|>"
VOCABULARY = 8192
PARTS = ("train", "packages", "files")
"""Text to train on, packages that are held out, and files that are held out of the other packages."""

HELD_OUT_PACKAGES_ONE_IN, HELD_OUT_FILES_ONE_IN = 25, 150
MOST_OF_A_PACKAGE = {"train": 7_000_000, "packages": 200_000, "files": 50_000}
"""Bytes, so that no package decides alone."""

MIN_BYTES, MAX_BYTES = 800, 300_000  # a few files are tables of test vectors or a whole API in one page
TEXT = re.compile(r"\.(pyi?|md|rst|txt|h|hpp|c|cc|cpp|cuh?|m?js|ts|p[lm]|pod|tcl|vim|cmake|sh|el)")
MAN = re.compile(r".*/man/man[1-8]/.*\.gz")
SKIPPED = frozenset(("encodings", "__pycache__", "data", "licenses", "locale", "i18n", "charmaps", "pydoc_data"))
SEEN_BEFORE = 0.5
"""Share of a file's long lines that others have already, beyond which it stays out."""

LONG_LINE = 24
FREE = re.compile(
    r"\b(Apache|MIT\b|MIT/|MIT-|BSD|0BSD|ISC\b|PSF|Python Software Foundation|LGPL|GPL|General Public License|Artistic|"
    r"Zlib|Boost|BSL-1|MPL|Mozilla|Expat|X11|public.domain|Unlicense|CC0|CC-BY|Vim\b|OpenSSL|HPND|CNRI|OFL)",
    re.IGNORECASE,
)
UNFREE = re.compile(r"NVIDIA|proprietary|EULA|commercial", re.IGNORECASE)


@dataclass
class Package:
    """An installed package: what it is called, its licences, its files, and the versions that are installed."""

    name: str
    licences: set[str] = field(default_factory=set)
    files: list[Path] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)


def plain_name(name: str) -> str:
    """One name for a project, whoever packs it: ``python-numpy`` and ``numpy``, ``python3.11`` and ``cpython``."""
    if re.fullmatch(r"python[\d.]*", name):
        return "cpython"
    return re.sub(r"[-_.]+", "-", re.sub(r"^python3?-", "", name.lower()))


def python_packages(folder: Path) -> Iterator[Package]:
    for info in sorted(folder.glob("*.dist-info")):
        record, metadata = info / "RECORD", info / "METADATA"
        if not record.exists() or not metadata.exists():
            continue
        about = HeaderParser().parsestr(metadata.read_text(errors="ignore"))
        told = [about.get("License-Expression"), about.get("License"), *about.get_all("Classifier", [])]
        lines = [str(line).split("\n")[0][:80] for line in told if line]
        licences = {line.rsplit(" :: ", 1)[-1] for line in lines if "::" not in line or line.startswith("License")}
        names = [line.split(",")[0].strip('"') for line in record.read_text(errors="ignore").splitlines()]
        files = [folder / name for name in names]
        yield Package(plain_name(str(about["Name"])), licences, files, {str(about["Version"])})


def debian_packages(root: Path = Path("/var/lib/dpkg")) -> Iterator[Package]:
    for paragraph in (root / "status").read_text(errors="ignore").split("\n\n"):
        about = HeaderParser().parsestr(paragraph)
        name = str(about["Package"])
        listed = [*root.glob(f"info/{name}.list"), *root.glob(f"info/{name}:*.list")]
        copyright_file = Path(f"/usr/share/doc/{name}/copyright")
        if "non-free" in str(about["Section"]) or not listed or not copyright_file.exists():
            continue
        text = copyright_file.read_text(errors="ignore")
        named = {line[8:].strip()[:80] for line in text.splitlines() if line.startswith("License:")} - {""}
        licences = named or {found.group() for found in FREE.finditer(text)}
        files = [Path(line) for path in listed for line in path.read_text().splitlines()]
        source = plain_name(str(about["Source"] or name).split(" ")[0])
        yield Package(source, licences, files, {str(about["Version"])})


def stdlib(folder: Path) -> Package:
    files = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    return Package("cpython", {"PSF-2.0"}, files, {folder.name})


def joined(found: Iterable[Package]) -> list[Package]:
    """All packages of one name as one, in an order that no list of folders decides."""
    packages: dict[str, Package] = {}
    for package in found:
        if not any(map(FREE.search, package.licences)) or any(map(UNFREE.search, package.licences)):
            continue
        kept = packages.setdefault(package.name, Package(package.name))
        kept.licences |= package.licences
        kept.files += package.files
        kept.versions |= package.versions
    return sorted(packages.values(), key=lambda package: hash_of(package.name))


def hash_of(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)


def read(path: Path) -> str | None:
    """The text of a file; None for other files, and for tables, minified code and languages without letters."""
    is_man = MAN.fullmatch(str(path)) is not None
    if (
        not (is_man or TEXT.fullmatch(path.suffix))
        or SKIPPED & {*path.parts}
        or path.is_symlink()
        or not path.is_file()
    ):
        return None
    raw = path.read_bytes()
    if is_man:
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error):
            return None
    text = raw.decode("utf-8", "ignore").replace(END, "")
    if not MIN_BYTES <= len(raw) <= MAX_BYTES or len(raw) > 80 * (text.count("\n") + 1):
        return None
    return text if sum(map(str.isalpha, text)) + text.count(" ") > 0.65 * len(text) else None


class Unseen:
    """Tells text that is new from text most of whose lines were there before."""

    def __init__(self) -> None:
        self.lines: set[int] = set()

    def take(self, text: str) -> bool:
        lines = {" ".join(line.split()) for line in text.splitlines()}
        hashes = {hash(line) for line in lines if len(line) >= LONG_LINE}
        if not hashes or len(hashes & self.lines) > SEEN_BEFORE * len(hashes):
            return False
        self.lines |= hashes
        return True


def part_of(package: str, file: str) -> str:
    if hash_of(package) % HELD_OUT_PACKAGES_ONE_IN == 0:
        return "packages"
    return "files" if hash_of(file) % HELD_OUT_FILES_ONE_IN == 0 else "train"


def gather(packages: list[Package]) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Texts of each part, and for each package its part, licences, files and bytes.

    What is held out comes last, so that a copy of anything trained on is left out of it.
    """
    unseen, texts, facts = Unseen(), {part: list[str]() for part in PARTS}, {part: dict[str, Any]() for part in PARTS}
    for part in PARTS:
        for package in packages:
            count, size = 0, 0
            # By a hash, so that what the limit leaves out is no folder.
            for path in sorted(set(package.files), key=lambda path: hash_of(str(path))):
                if part_of(package.name, "/".join(path.parts[-2:])) != part or size > MOST_OF_A_PACKAGE[part]:
                    continue
                text = read(path)
                if text is not None and unseen.take(text):
                    texts[part].append(text)
                    count, size = count + 1, size + len(text.encode())
            if count:
                about = {"licences": sorted(package.licences), "versions": sorted(package.versions)}
                facts[part][package.name] = {"files": count, "bytes": size, **about}
    return texts, facts


def train_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE, with digits one by one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Any, texts: list[str]) -> bytes:
    """Token numbers as little-endian 16-bit integers, END after each text."""
    import numpy as np

    (end,) = tokenizer.encode(END).ids
    chunks = []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[start : start + 256]):
            chunks.append(np.array([*encoding.ids, end], dtype="<u2").tobytes())
    return b"".join(chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site-packages", type=Path, nargs="+", default=[])
    parser.add_argument("--stdlib", type=Path, nargs="+", default=[])
    parser.add_argument("--no-debian", action="store_true", help="leave out the packages of the system")
    parser.add_argument("--sources", type=Path, required=True, help="where packages and licences are listed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = [package for folder in options.site_packages for package in python_packages(folder)]
    found += [stdlib(folder) for folder in options.stdlib]
    texts, packages = gather(joined([*found, *([] if options.no_debian else debian_packages())]))
    tokenizer = train_tokenizer(texts["train"][::6])
    tokens = {part: encode(tokenizer, texts[part]) for part in PARTS}
    facts = {
        part: {
            "packages": len(packages[part]),
            "files": len(texts[part]),
            "bytes": sum(len(text.encode()) for text in texts[part]),
            "tokens": len(tokens[part]) // 2,
            "sha256": hashlib.sha256(tokens[part]).hexdigest(),
        }
        for part in PARTS
    }
    held_out = "".join(texts["packages"]).encode()
    facts["xz_bits_per_byte"] = 8 * len(lzma.compress(held_out, preset=9)) / len(held_out)
    options.sources.write_text(json.dumps({"facts": facts, "packages": packages}, indent=1) + "\n")
    print(json.dumps(facts, indent=1), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"facts": facts, "tokenizer": tokenizer.to_str()}).encode() + b"\n"
    blob = lzma.compress(head + b"".join(tokens.values()), preset=9 | lzma.PRESET_EXTREME)
    options.out.write_bytes(blob)
    print(f"{options.out}: {len(blob) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
