"""Imports go downwards: the layers of the package, as the design lists them, enforced on the source text."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import slidesparse

ROOT = Path(slidesparse.__file__).parent

LAYERS = [
    {"errors"},
    {"base"},
    {"weights"},
    {"lifting", "pruning"},
    {"gemm"},
    {"ops"},
    {"layer"},
    {"tuning"},
    {"models"},
    {"files"},
    {"checkpoints"},
    {"offline"},
    {"recovery"},
    {"integrations"},
    {"cli"},
    {"__main__"},
]
"""Lowest first. A part may import those of lower layers and its own files; a new part must be given its place here."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

FORBIDDEN = {
    "lifting": {"torch.nn", "safetensors", "transformers"},  # kernels and GEMMs never see modules or files
    "gemm": {"torch.nn", "safetensors", "transformers"},
    "gemm/hopper": {
        "slidesparse.gemm.cusparselt",
        "slidesparse.gemm.ampere",
    },  # a backend can be deleted without touching another
    "gemm/ampere": {"slidesparse.gemm.cusparselt", "slidesparse.gemm.hopper"},
    "gemm/cusparselt": {"slidesparse.gemm.hopper", "slidesparse.gemm.ampere"},
    "layer": {"json", "pathlib", "safetensors"},  # a layer never sees files
    "models": {"json", "pathlib", "safetensors"},
}
"""What the files of a part must not import. ``torch.nn.functional`` is not ``torch.nn``."""


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every name that a file imports, wherever in the file; ``from a import b`` gives ``a.b``."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any(getattr(node, "level", 0) for node in nodes), f"{path} imports relative to itself"
    starts = ((f"{node.module}." if isinstance(node, ast.ImportFrom) else "", node.names) for node in nodes)
    return tuple(f"{start}{alias.name}" for start, names in starts for alias in names)


def _part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _depends_on(name: str) -> str | None:
    """The part of the package that an imported name belongs to; ``__init__`` for the public face; None for others."""
    parts = name.split(".")
    if parts[0] != "slidesparse":
        return None
    inside = len(parts) > 1 and ((ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").is_file())
    return parts[1] if inside else "__init__"


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def test_imports_go_downwards_and_none_to_the_benchmarks() -> None:
    """The benchmarks are another distribution, which is asked through entry points (cli/measuring.py)."""
    assert {_part(path) for path in FILES} == RANK.keys(), f"give each part its layer in {Path(__file__).name}"
    imported = {(path, name) for path in FILES for name in imports(path)}
    for path, name in imported:
        part, other = _part(path), _depends_on(name)
        assert name.split(".")[0] != "slidesparse_bench", f"{path} imports {name}"
        if other is None or other == part:
            continue
        if other == "__init__":
            # The public face imports nearly everything, so only what stands above all of that may use it.
            assert RANK[part] > RANK["checkpoints"], f"{path} imports the public face: {name}"
        else:
            assert RANK[other] < RANK[part], f"{path} imports {name}, which is not below it"


def _files(place: str) -> list[Path]:
    """Those of a folder or a file that the rules name."""
    return [
        path for path in FILES if place in map(str, (where := path.relative_to(ROOT).with_suffix(""), *where.parents))
    ]


def _is_inside(name: str, package: str) -> bool:
    return name == package or (name.startswith(f"{package}.") and not name.startswith("torch.nn.functional"))


@pytest.mark.parametrize("place", FORBIDDEN)
def test_no_part_imports_what_it_must_not_see(place: str) -> None:
    assert _files(place)
    for path in _files(place):
        seen = {name for name in imports(path) for other in FORBIDDEN[place] if _is_inside(name, other)}
        assert not seen, f"{path.relative_to(ROOT)} imports {seen}"


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_public_names_need_torch_alone() -> None:
    """But for the functions that read checkpoints."""
    code = (
        "import json, sys, torch; before = set(sys.modules); import slidesparse; "
        "of_files = {'compress', 'evaluate', 'load', 'prune', 'recover'}; "
        "[getattr(slidesparse, name) for name in slidesparse.__all__ if name not in of_files]; "
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    brought = set(json.loads(_run(code)))
    assert "slidesparse" in brought
    heavy = {"accelerate", "compressed_tensors", "cuda", "matplotlib", "safetensors", "transformers", "triton", "vllm"}
    assert not brought & heavy


def test_theory_and_command_line_are_imported_without_torch() -> None:
    modules = ["slidesparse.weights.pattern", "slidesparse.errors", "slidesparse.cli"]
    code = (
        "import importlib, sys; sys.modules['torch'] = sys.modules['numpy'] = None; "
        f"[print(importlib.import_module(name).__name__) for name in {modules}]"
    )
    assert _run(code).split() == modules
