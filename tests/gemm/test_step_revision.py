"""A kernel's revision, by which measured times are found again, changes when the kernel does."""

from __future__ import annotations

import hashlib
import inspect
import re
from pathlib import Path

import pytest

from slidesparse.gemm.ampere import compile as ampere_compile
from slidesparse.gemm.ampere import tiles as ampere_tiles
from slidesparse.gemm.ampere.backend import Ampere
from slidesparse.gemm.ampere.tiles import (
    FEWEST_STAGES,
    MOST_STAGES,
    STEP_CYCLES,
    TILE_CYCLES,
    MmaTile,
    cheapest,
    choose_bands,
)
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.choose_tiles import CLUSTER_MULTIPROCESSORS, TWO_BAND_TOKENS
from slidesparse.gemm.hopper.compile import FOLDER
from slidesparse.gemm.hopper.tiles import DENSE_TILES, TILES
from slidesparse.gemm.launch import GROUP, SECOND_LAUNCH
from slidesparse.gemm.nvrtc import SHARED

KERNELS = {"hopper-7": "f177ae5c44301be0", "ampere-3": "dee16e20486ae477"}
"""Revision -> digest of the kernel and its tiles. Where the test fails: count the backend's ``revision`` up, so that
users' times are measured again, and write the new pair here; or, when no time has changed, the new digest alone."""


def code(source: str) -> str:
    """CUDA source without comments, and with one space for every stretch of white space."""
    words = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', lambda found: found[1] or " ", source, flags=re.DOTALL)
    return " ".join(words.split())


def sources(folder: Path) -> str:
    files = [path for each in (folder, SHARED) for path in sorted(each.iterdir()) if path.suffix[:3] == ".cu"]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def ampere_digest() -> str:
    """Of the source and of all that decides which tile runs."""
    parts = [code(sources(ampere_compile.FOLDER)), *map(repr, ampere_tiles.TILES)]
    parts += map(inspect.getsource, (MmaTile.cycles, MmaTile.fitted, choose_bands, cheapest))
    parts += [f"{GROUP} {SECOND_LAUNCH} {TILE_CYCLES} {STEP_CYCLES} {FEWEST_STAGES} {MOST_STAGES}"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def digest(source: str) -> str:
    """Of the source and of all that decides which tile runs."""
    tiles = sorted(f"{tile!r} {cost!r}" for tile, cost in (TILES | DENSE_TILES).items())
    numbers = f"{GROUP} {CLUSTER_MULTIPROCESSORS} {SECOND_LAUNCH} {TWO_BAND_TOKENS}"
    return hashlib.sha256("\n".join([code(source), *tiles, numbers]).encode()).hexdigest()[:16]


def test_a_changed_kernel_has_a_new_revision() -> None:
    assert {Hopper.revision: digest(sources(FOLDER)), Ampere.revision: ampere_digest()} == KERNELS


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("int x = 1;  // one\n", "/* a\n b */ int x\n= 1;", True),
        ('asm("a // b");', 'asm("a // c");', False),
        ("int x = 1;", "int x = 2;", False),
    ],
)
def test_only_code_counts(a: str, b: str, same: bool) -> None:
    assert (digest(a) == digest(b)) == same
