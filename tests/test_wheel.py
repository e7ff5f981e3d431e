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


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of copies that differ in all but contents."""
    ages, modes = (1_000_000_000, 1_700_000_000), (0o644, 0o600)
    return [build(tmp_path_factory.mktemp("copy"), age=age, mode=mode) for age, mode in zip(ages, modes, strict=True)]


def test_two_builds_are_equal_in_every_byte(wheels: list[Path]) -> None:
    first, second = wheels
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_the_date_is_that_of_the_commit(wheels: list[Path]) -> None:
    with zipfile.ZipFile(wheels[0]) as archive:
        assert {entry.date_time[:3] for entry in archive.infolist()} == {(2026, 9, 21)}


def test_it_holds_every_source_and_the_plugin(wheels: list[Path]) -> None:
    with zipfile.ZipFile(wheels[0]) as archive:
        names = set(archive.namelist())
        (points,) = (name for name in names if name.endswith("entry_points.txt"))
        text = archive.read(points).decode()
        modes = {stat.S_IMODE(entry.external_attr >> 16) for entry in archive.infolist()}
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    sources = {name for name in files if "__pycache__" not in name}
    assert {name for name in names if not name.startswith("slidesparse-")} == sources
    assert "[vllm.general_plugins]\nslidesparse = slidesparse.integrations.vllm:register" in text
    assert modes == {0o644}
