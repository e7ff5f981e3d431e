"""The code keeps to the glossary: one word for each thing, one thing for each word, and none of those not used."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import slidesparse

ROOT = Path(__file__).parent.parent
PACKAGE = Path(slidesparse.__file__).parent
GLOSSARY = ROOT / "docs/glossary.md"
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if ROOT / "docs/log" not in path.parents]

ALLOWED = {
    r"stack[ _]room": "the glossary's word",
    r"\broom (on|for|around|to)\b|(spare|need|with|without|with_|make_)[ _]?room": "space for a number of things",
    r"\broom(?= =| \+|\]|:|$)": "how many more things fit",
    r"\blinks?\b(?! of a chain)": "a link of a file system",
    r"\bswitch(es|ed|ing| (on|off))\b|switching": "to change from one thing to another, or a setting",
    r"besides": "a word of its own",
    r"PIECE_TOKENS": "the kernel's PIECE, which a warpgroup transposes at a time",
    r"in one piece|pieces? of memory|into pieces": "a contiguous range, or its opposite",
    r"\b(checkpoint|pattern|it) claims|not claimed": "said without proof",
}
"""Phrases in which a forbidden word means something else -> what it means."""

ORDINARY = ("first", "part")
"""Words that nobody can do without: forbidden in names of classes and constants alone."""

ORDINALS = {"FIRST_TOKEN", "FIRST_GUESS_S"}
"""Constants whose names hold such a word and mean what it says."""


def not_used(page: str) -> list[str]:
    """Words in the first column of the glossary's last table; ``weight, of a norm`` is tested apart."""
    table = page.partition("## Not used")[2]
    rows = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")][1:]
    return [word for row in rows if ", of " not in row for word in row.split(", ")]


FORBIDDEN = not_used(GLOSSARY.read_text())


def forms(word: str) -> str:
    """Expression for a word and what it becomes in a sentence: race, races, raced, racing."""
    stem = word.removesuffix("e")
    return rf"{stem}(?:{'e|es|ed' if stem != word else '|s|es|ed'}|ing)"


def words_of(name: str) -> str:
    """``HopperLinear`` and ``hopper_linear`` as ``hopper linear``."""
    return " ".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)).lower()


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Lines of docstrings, those of attributes too, and comments, with their numbers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), node.lineno)
    yield from ((line, text) for kind, line, text in tokens(source) if kind == tokenize.COMMENT)


def tokens(source: str) -> Iterator[tuple[int, int, str]]:
    """Kind, line and text of each."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        yield token.type, token.start[0], token.string


def classes_and_constants(source: str) -> Iterator[tuple[int, str]]:
    """Names, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.isupper():
            yield node.lineno, node.id


def without_allowed(text: str) -> str:
    return re.sub("|".join(f"(?:{phrase})" for phrase in ALLOWED), "", text, flags=re.IGNORECASE)


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(map(forms, words))})\b", re.IGNORECASE)


STRICT = any_of(word for word in FORBIDDEN if word not in ORDINARY)


def offences(source: str) -> Iterator[str]:
    """``line: word``, or the name that holds it, of every forbidden word in a file."""
    for line, text in prose(source):
        yield from (f"{line}: {found[0]}" for found in STRICT.finditer(without_allowed(text)))
    for kind, line, name in tokens(source):
        if kind == tokenize.NAME and STRICT.search(words_of(without_allowed(name))):
            yield f"{line}: {name}"
    for line, name in classes_and_constants(source):
        if any_of(ORDINARY).search(words_of(name)) and name not in ORDINALS:
            yield f"{line}: {name}"


def test_words_that_are_not_used_do_not_occur() -> None:
    found = [f"{path.relative_to(PACKAGE)}:{offence}" for path in FILES for offence in offences(path.read_text())]
    assert not found, "docs/glossary.md says what to say instead:\n" + "\n".join(found)


def test_the_gain_of_a_norm_is_not_called_its_weight() -> None:
    norm = re.compile(r"\bnorm(?:'s)? weights?\b|\bweights? of (?:a|the|its) (?:RMS)?norm\b|norm_weight", re.IGNORECASE)
    found = [f"{path.relative_to(PACKAGE)}: {match[0]}" for path in FILES for match in norm.finditer(path.read_text())]
    assert not found, "\n".join(found)


def test_nothing_is_behind_anything() -> None:
    texts = {path: path.read_text() for path in (*FILES, *PACKAGE.rglob("*.cu*"), *PAGES, ROOT / "README.md")}
    texts[GLOSSARY] = texts[GLOSSARY].partition("## Not used")[0]
    found = [
        f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{number}: {line.strip()}"
        for path, text in sorted(texts.items())
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"\bbehind\b", line, re.IGNORECASE)
    ]
    assert not found, "say after:\n" + "\n".join(found)


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    shared = [f"{name}: {', '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1]
    assert not shared, "one name for each thing:\n" + "\n".join(shared)


# -- the search itself ---------------------------------------------------------------------------------------------


def test_the_glossary_names_what_is_not_used() -> None:
    assert {"switch", "rehearsal", "ledger", "behind", *ORDINARY} <= set(FORBIDDEN)
    assert "weight" not in FORBIDDEN
    assert not {"instead", "word", "---"} & set(FORBIDDEN)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""A link of a chain."""', ["1: link"]),
        ('x = 1\n"""Races are run."""', ["2: Races"]),
        ("x = 1  # as it was rehearsed, and placed", ["1: placed"]),
        ("class RaceWay: ...", ["1: RaceWay"]),
        ("ledger_of = 1", ["1: ledger_of"]),
        ("FIRSTS = {}", ["1: FIRSTS"]),
        ("class ChainPart: ...", ["1: ChainPart"]),
        ("def list_parts(first): ...", []),
        ('"""The first part of a trace."""', []),
        ('def with_room(): "Make room for two."', []),
        ("# a link gives way to a file; TF32 is switched on; stack room", []),
    ],
)
def test_forbidden_words_are_found_where_they_mean_what_is_forbidden(source: str, found: list[str]) -> None:
    assert list(offences(source)) == found


def test_every_exception_is_needed() -> None:
    """One that no file needs any more goes."""
    sources = [path.read_text() for path in FILES]
    assert [phrase for phrase in ALLOWED if not re.search(phrase, "\n".join(sources))] == []
    assert {name for source in sources for _, name in classes_and_constants(source)} >= ORDINALS
