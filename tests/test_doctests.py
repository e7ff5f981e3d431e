from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import slidesparse

OPTIONAL = {"cuda", "matplotlib", "triton", "transformers", "vllm"}
"""Top-level packages that extras or GPUs bring; a module that imports one of them is tested where it is installed."""


def _modules() -> list[str]:
    found = pkgutil.walk_packages(slidesparse.__path__, "slidesparse.", onerror=lambda name: None)
    return ["slidesparse", *(info.name for info in found if not info.name.endswith("__main__"))]


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        if missing not in OPTIONAL:
            raise
        pytest.skip(f"{name} needs {missing}, which is not installed")


@pytest.mark.parametrize("name", _modules())
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(_import(name)).failed == 0


@pytest.mark.parametrize("name", ["slidesparse", "slidesparse.pattern", "slidesparse.slide", "slidesparse.packed"])
def test_the_parts_that_readers_meet_first_have_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).attempted > 0
