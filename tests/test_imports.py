"""Imports go downwards: the layers of the package, as the design lists them, enforced on the source text."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slidesparse

ROOT = Path(slidesparse.__file__).parent

LAYERS = [
    {"errors"},
    {"base"},
    {"pattern", "records"},
    {"support"},
    {"prologue", "quant", "slide"},
    {"packed", "prune"},
    {"layout"},
    {"kernels"},
    {"gemm", "packing"},
    {"ops"},
    {"linear"},
    {"models"},
    {"files", "recovery"},
    {"commands", "integrations"},
    {"bench", "report"},
    {"demo"},
    {"cli"},
]
"""Lowest first. A part may import those of lower layers and its own files; a new part must be given its place here."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

FORBIDDEN = {
    "pattern": {"torch", "numpy"},  # the theory reads as plain Python
    "errors": {"torch", "numpy"},
    "kernels": {"torch.nn", "safetensors", "transformers"},  # kernels and GEMMs never see modules or files
    "gemm": {"torch.nn", "safetensors", "transformers"},
    "gemm/hopper": {"slidesparse.gemm.cusparselt"},  # a backend can be deleted without touching another
    "gemm/cusparselt": {"slidesparse.gemm.hopper"},
    "records": {"torch", "numpy"},
    "report": {"torch", "slidesparse.bench", "matplotlib.pyplot"},  # it draws records, anywhere
    "bench": {"matplotlib"},
    "linear": {"safetensors", "json", "pathlib"},  # a layer never sees files
    "models": {"safetensors", "json", "pathlib"},
    "files/checkpoint": {"slidesparse.kernels", "triton"},
    "files/marker": {"slidesparse.kernels", "triton"},
}
"""What a part must not import although nothing above it is concerned. ``torch.nn.functional`` is not ``torch.nn``."""


def _part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(source: str, path: Path) -> Iterator[str]:
    """Every name that a file imports, wherever in the file, absolute: ``from a import b`` gives ``a.b``."""
    package = ("slidesparse", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _depends_on(name: str) -> str | None:
    """The part of the package that an imported name belongs to; ``__init__`` for the public face; None for others."""
    parts = name.split(".")
    if parts[0] != "slidesparse":
        return None
    inside = len(parts) > 1 and ((ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").is_file())
    return parts[1] if inside else "__init__"


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    part = _part(path)
    assert part in RANK, f"give {part} its layer in {Path(__file__).name}"
    for name in _imports(path.read_text(encoding="utf-8"), path):
        other = _depends_on(name)
        if other is None or other == part:
            continue
        if other == "__init__":
            # The public face imports nearly everything, so only what stands above all of that may use it.
            assert RANK[part] > RANK["files"], f"{part} imports the public face: {name}"
        else:
            assert RANK[other] < RANK[part], f"{part} imports {name}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_part_imports_what_it_must_not_see(path: Path) -> None:
    where = path.relative_to(ROOT).with_suffix("")
    places = [str(where), *map(str, where.parents)]
    for name in _imports(path.read_text(encoding="utf-8"), path):
        for forbidden in set().union(*(FORBIDDEN.get(place, set()) for place in places)):
            inside = name == forbidden or name.startswith(f"{forbidden}.")
            assert not inside or name.startswith("torch.nn.functional"), f"{where} imports {name}"


def test_every_way_to_import_is_seen() -> None:
    source = (
        "import a.b\nfrom slidesparse import ops\ndef f():\n    from .spec import Route\n    from .. import quant\n"
    )
    names = list(_imports(source, ROOT / "gemm" / "select.py"))
    assert names == ["a.b", "slidesparse.ops", "slidesparse.gemm.spec.Route", "slidesparse.quant"]
    assert [_depends_on(name) for name in names] == [None, "ops", "gemm", "quant"]
    assert _depends_on("slidesparse.Pattern") == "__init__"


def test_importing_the_package_needs_torch_alone() -> None:
    code = (
        "import json, sys, torch; before = set(sys.modules); import slidesparse; "
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = set(json.loads(run.stdout))
    assert "slidesparse" in brought
    heavy = {"accelerate", "compressed_tensors", "cuda", "matplotlib", "safetensors", "transformers", "triton", "vllm"}
    assert not brought & heavy


def test_the_theory_needs_no_torch() -> None:
    # Importing slidesparse.pattern runs the package's __init__, which needs torch; the two files themselves do not.
    loader = (
        "import sys, types; package = types.ModuleType('slidesparse'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['slidesparse'] = package; import slidesparse.pattern; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", loader, str(ROOT)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
