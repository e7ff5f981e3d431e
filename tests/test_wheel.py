"""Two builds of one source are one wheel, and it holds what a user needs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "src")
EPOCH = 1_790_000_000

pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling (extra test) is not installed")


def build(folder: Path, *, age: int, mode: int) -> Path:
    """A wheel of a copy of the sources, as old as told and with such rights."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES[:-1]:
        shutil.copy(ROOT / name, folder)
    for path in sorted(folder.rglob("*"), reverse=age > 1000):
        if path.is_file():
            path.chmod(mode)
            os.utime(path, (age, age))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, env=os.environ | {"SOURCE_DATE_EPOCH": str(EPOCH)}
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def test_two_builds_are_one_wheel_with_every_source(tmp_path: Path) -> None:
    """Of copies that differ in all but contents."""
    first = build(tmp_path / "one", age=1_000_000_000, mode=0o644)
    second = build(tmp_path / "two", age=1_700_000_000, mode=0o600)
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        entries = archive.infolist()
        (points,) = (entry for entry in entries if entry.filename.endswith("entry_points.txt"))
        text = archive.read(points).decode()
    assert {entry.date_time[:3] for entry in entries} == {(2026, 9, 21)}
    assert {stat.S_IMODE(entry.external_attr >> 16) for entry in entries} == {0o644}
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    sources = {name for name in files if "__pycache__" not in name}
    assert {entry.filename for entry in entries if not entry.filename.startswith("slidesparse-")} == sources
    assert "[vllm.general_plugins]\nslidesparse = slidesparse.integrations.vllm:register" in text
