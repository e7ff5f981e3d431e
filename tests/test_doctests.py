"""The examples in docstrings, of the modules that have some."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import slidesparse

OPTIONAL = {"cuda", "matplotlib", "triton", "transformers", "vllm"}
"""Top-level packages that extras or GPUs bring; a module that imports one of them is tested where it is installed."""

ROOT = Path(slidesparse.__file__).parent


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _with_examples() -> list[str]:
    return sorted(_name(path) for path in ROOT.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        if missing not in OPTIONAL:
            raise
        pytest.skip(f"{name} needs {missing}, which is not installed")


@pytest.mark.parametrize("name", _with_examples())
def test_examples_in_docstrings(name: str) -> None:
    found = doctest.testmod(_import(name))
    assert found.attempted > 0
    assert found.failed == 0
