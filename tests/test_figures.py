"""The committed pictures can be drawn again, and show what the library computes."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
import torch

import slidesparse as ss

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def windows() -> ModuleType:
    pytest.importorskip("matplotlib", reason="matplotlib (extra report) is not installed")
    spec = importlib.util.spec_from_file_location("windows", FIGURES / "windows.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(path: Path, row: str) -> dict[int, str]:
    """The texts of a row of the picture by column."""
    found = {}
    for element in ET.parse(path).iter(f"{SVG}g"):
        name, _, column = element.get("id", "").partition("-")
        if name == row:
            text = element.find(f"{SVG}text")
            found[int(column)] = text.text
    return found


@pytest.mark.parametrize("weight", [[0, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 0, 4, 5, 6], [7, 0, 0, 0, 0, 9, 0, 0]])
def test_windows_shows_the_packed_weight(windows: ModuleType, tmp_path: Path, weight: list[int]):
    path = tmp_path / "windows.svg"
    row = torch.tensor(weight, dtype=torch.int8)
    windows.draw(row, path)
    slid = ss.pack(row.unsqueeze(0), "6:8").columns()[0].tolist()
    assert cells(path, "weight") == {k: str(value) for k, value in enumerate(weight) if value}
    assert cells(path, "slid") == {c: str(value) for c, value in enumerate(slid) if value}
    assert list(cells(path, "lifted").values()) == [f"x{k}" for k in (0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7)]


def test_the_committed_windows_are_current(windows: ModuleType, tmp_path: Path):
    # Texts, not bytes: another matplotlib writes other bytes.
    windows.draw(windows.WEIGHT, tmp_path / "windows.svg")
    for row in ("weight", "slid", "lifted"):
        assert cells(FIGURES / "windows.svg", row) == cells(tmp_path / "windows.svg", row) != {}
