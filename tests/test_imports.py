"""Imports go downwards: the layers of the package, as the design lists them, enforced on the source text."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from import_graph import chains, imports

import slidesparse

ROOT = Path(slidesparse.__file__).parent

LAYERS = [
    {"errors"},
    {"base"},
    {"expert_sizes", "pattern", "records"},
    {"served_figures", "support"},
    {"served_records"},
    {"expert_order", "prologue", "quant", "slide"},
    {"packed", "prune"},
    {"fp4", "layout"},
    {"kernels"},
    {"expert_sum", "lifting"},
    {"expert_lift", "gemm", "packing"},
    {"dense_weight", "ops", "read_back", "weight_form"},
    {"experts", "linear", "tuning"},
    {"models"},
    {"files"},
    {"recover"},
    {"recovery"},
    {"commands", "integrations"},
    {"bench", "report"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
"""Lowest first. A part may import those of lower layers and its own files; a new part must be given its place here."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

OPTIONAL = {"cuda", "matplotlib", "scipy", "sglang", "transformers", "triton", "vllm"}
"""Top-level packages that extras or GPUs bring."""

FORBIDDEN = {
    "pattern": {"torch", "numpy"},  # the theory reads as plain Python
    "errors": {"torch", "numpy"},
    "kernels": {"torch.nn", "safetensors", "transformers"},  # kernels and GEMMs never see modules or files
    "gemm": {"torch.nn", "safetensors", "transformers"},
    "fp4": {"slidesparse.kernels", "slidesparse.gemm", "triton"},  # arithmetic, without a path to a GPU
    "gemm/hopper": {"slidesparse.gemm.cusparselt"},  # a backend can be deleted without touching another
    "gemm/cusparselt": {"slidesparse.gemm.hopper"},
    "expert_sizes": {"torch", "numpy"},
    "records": {"torch", "numpy"},
    "served_figures": {"torch", "numpy"},
    "served_records": {"torch", "numpy"},
    "report": {"torch", "slidesparse.bench", "matplotlib.pyplot"},  # it draws records, anywhere
    "bench": {"matplotlib"},
    "linear": {"safetensors"},  # a layer never sees files
    "models": {"safetensors"},
    "files/checkpoint": {"slidesparse.kernels", "triton"},
    "files/marker": {"slidesparse.kernels", "triton"},
}
"""What a part must not import, nor any file of the package that it imports. ``torch.nn.functional`` is not
``torch.nn``."""

FORBIDDEN_ITSELF = {
    "linear": {"json", "pathlib"},  # the backends keep tables in files
    "models": {"json", "pathlib"},
}
"""What the files of a part must not import, though those that they import may."""


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    part = _part(path)
    assert part in RANK, f"give {part} its layer in {Path(__file__).name}"
    for name in imports(path, ROOT):
        other = _depends_on(name)
        if other is None or other == part:
            continue
        if other == "__init__":
            # The public face imports nearly everything, so only what stands above all of that may use it.
            assert RANK[part] > RANK["files"], f"{part} imports the public face: {name}"
        else:
            assert RANK[other] < RANK[part], f"{part} imports {name}, which is not below it"


def _forbidden(path: Path, rules: dict[str, set[str]]) -> set[str]:
    """What the rules for a file, and for the folders that it is in, forbid."""
    where = path.relative_to(ROOT).with_suffix("")
    return set().union(*(rules.get(str(place), set()) for place in (where, *where.parents)))


def _is_inside(name: str, package: str) -> bool:
    return name == package or (name.startswith(f"{package}.") and not name.startswith("torch.nn.functional"))


def _under(rules: dict[str, set[str]]) -> list[Path]:
    return [path for path in FILES if _forbidden(path, rules)]


@pytest.mark.parametrize("path", _under(FORBIDDEN), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_part_imports_what_it_must_not_see(path: Path) -> None:
    forbidden = _forbidden(path, FORBIDDEN)
    for file, chain in chains(path, ROOT).items():
        seen = {name for name in imports(file, ROOT) for other in forbidden if _is_inside(name, other)}
        assert not seen, f"{' -> '.join(str(file.relative_to(ROOT)) for file in chain)} imports {seen}"


@pytest.mark.parametrize("path", _under(FORBIDDEN_ITSELF), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_part_imports_itself_what_others_may(path: Path) -> None:
    forbidden = _forbidden(path, FORBIDDEN_ITSELF)
    assert not {name for name in imports(path, ROOT) for other in forbidden if _is_inside(name, other)}


@pytest.mark.parametrize("place", [*FORBIDDEN, *FORBIDDEN_ITSELF])
def test_what_the_rules_name_exists(place: str) -> None:
    assert (ROOT / place).is_dir() or (ROOT / f"{place}.py").is_file()


def _package(root: Path, **files: str) -> Path:
    """A package of those files: ``a__b`` is ``a/b.py``."""
    for name, source in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def test_every_way_to_import_is_seen(tmp_path: Path) -> None:
    source = "import a.b\nfrom p import ops\ndef f():\n    from .backend import Problem\n    from .. import quant\n"
    root = _package(tmp_path / "p", gemm__select=source)
    assert imports(root / "gemm/select.py", root) == ("a.b", "p.ops", "p.gemm.backend.Problem", "p.quant")
    assert [_depends_on(name) for name in ("a.b", "slidesparse.ops.linear", "slidesparse.weights.quant")] == [
        None,
        "ops",
        "quant",
    ]
    assert _depends_on("slidesparse.Pattern") == "__init__"


def test_imports_are_followed_through_other_files(tmp_path: Path) -> None:
    root = _package(
        tmp_path / "p",
        report__engines="from p.quant import DTYPES\n",
        quant="def f():\n    import p.folder.support\n",
        folder__support="",
        alone="import torch\n",
    )
    (root / "folder/__init__.py").write_text("import torch\n")
    (root / "report/__init__.py").write_text("from p.alone import torch\n")  # runs, but is not what engines asks for
    start, quant, around = root / "report/engines.py", root / "quant.py", root / "folder/__init__.py"
    assert chains(start, root) == {
        start: (start,),
        quant: (start, quant),
        around: (start, quant, around),
        root / "folder/support.py": (start, quant, root / "folder/support.py"),
    }


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_public_names_need_torch_alone() -> None:
    code = (
        "import json, sys, torch; before = set(sys.modules); import slidesparse; "
        "[getattr(slidesparse, name) for name in slidesparse.__all__ if name != 'load']; "
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    brought = set(json.loads(_run(code)))
    assert "slidesparse" in brought
    heavy = {"accelerate", "compressed_tensors", "cuda", "matplotlib", "safetensors", "transformers", "triton", "vllm"}
    assert not brought & heavy


def test_every_name_that_pages_give_the_package_is_there() -> None:
    """``slidesparse.NAME`` with a capital is a class, which a reader imports as the page writes it."""
    checkout = Path(__file__).parent.parent
    pages = [checkout / "README.md", *(checkout / "docs").glob("*.md")]
    names = {name for page in pages for name in re.findall(r"`(?:slidesparse|ss)\.([A-Z]\w+)", page.read_text())}
    assert "HeldZeros" in names
    assert names <= set(slidesparse.__all__)


def test_theory_report_and_command_line_are_imported_without_torch() -> None:
    names = ("pattern", "errors", "records", "served_records", "report", "report.serve", "cli")
    modules = [f"slidesparse.{name}" for name in names]
    code = (
        "import importlib, sys; sys.modules['torch'] = sys.modules['numpy'] = None; "
        f"[print(importlib.import_module(name).__name__) for name in {modules}]"
    )
    assert _run(code).split() == modules


def test_every_module_can_be_imported() -> None:
    """Those that need what an extra or a GPU brings only where it is installed."""
    for path in FILES:
        name = ".".join(("slidesparse", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if str(error.name).split(".")[0] not in OPTIONAL:
                raise
