"""The choice of a tile against measured times."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from slidesparse.gemm.hopper_tiles import TILES, choose_tile
from slidesparse.pattern import Pattern

RECORD = Path(__file__).parents[1] / "results" / "h200" / "hopper-tiles.jsonl"


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORD.read_text().splitlines()[1:]]


def test_the_choice_is_close_to_the_best_measured(measured: list[dict[str, Any]]) -> None:
    losses = []
    for case in measured:
        slabs = math.ceil(Pattern.parse(case["pattern"]).expansion * case["columns"] / 128)
        tile = choose_tile(case["tokens"], case["out"], slabs, 0)
        losses.append(case["us"][str(tile)] / min(case["us"].values()) - 1)
    assert len(losses) == 72
    assert max(losses) < 0.04
    assert statistics.mean(losses) < 0.002


def test_every_tile_is_chosen_somewhere() -> None:
    sizes = [
        (m, out, slabs)
        for m in (1, 64, 200, 300, 500, 600, 800, 1000, 16384)
        for out in (1024, 3584, 37888)
        for slabs in (28, 222)
    ]
    assert {choose_tile(m, out, slabs, 0) for m, out, slabs in sizes} == set(TILES)


def test_a_dense_slab_counts_twice() -> None:
    once, twice = choose_tile(256, 4096, 3, 0), choose_tile(256, 4096, 6, 0)
    assert choose_tile(256, 4096, 0, 3) == twice != once
