"""slidesparse-bench as a distribution: its version, its entry points, and what reads records without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

import slidesparse
from slidesparse.cli.measuring import GROUP, OF_BENCH

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]


def test_it_goes_with_the_slidesparse_of_its_own_version() -> None:
    assert PROJECT["version"] == slidesparse.__version__
    assert f"slidesparse=={slidesparse.__version__}" in PROJECT["dependencies"]


def test_what_slidesparse_asks_for_is_there() -> None:
    parts = PROJECT["entry-points"][GROUP]
    assert parts.keys() == set(OF_BENCH)
    assert all(resolve_name(where) for where in parts.values())


def test_records_are_drawn_without_torch_and_without_a_screen() -> None:
    modules = [f"slidesparse_bench.{name}" for name in ("records", "served_records", "report", "report.serve", "cli")]
    code = (
        "import importlib, sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'matplotlib.pyplot'))); "
        f"[print(importlib.import_module(name).__name__) for name in {modules}]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == modules
