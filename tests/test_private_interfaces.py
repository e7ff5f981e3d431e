"""What torch, Triton, CPython and vLLM do not document is touched by one module each, and none of it is needed.

:mod:`private_names` removes each private name of torch and runs a layer. What stands in for them, and what happens in a
changed Triton, CPython or vLLM, is tested beside the doors: base/test_torch_private.py, base/test_stack.py,
kernels/test_launcher.py, integrations/test_vllm_private.py.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

import slidesparse
from slidesparse.base.torch_private import PRIVATE

ROOT = Path(slidesparse.__file__).parent

DOORS = {"base/torch_private.py", "base/python_stack.py", "base/triton_launcher.py", "integrations/vllm/private.py"}

ELSEWHERE = {
    # A kernel of vLLM's that is looked for, and not used where it is not found.
    "gemm/dense.py": {"torch.ops._C", "vllm._C", "vllm._C_stable_libtorch"},
    # What a class inherits from torch.nn.Module: no torch can rename it without all modules that exist.
    "layer/linear.py": {"_apply", "_buffers", "_load_from_state_dict", "_save_to_state_dict"},
    "layer/weight_form.py": {"_buffers"},  # torch.nn.Module's
    "models/hooks.py": {
        *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    },
}
"""The rest, with its reasons."""

INHERITED = {name for name in {*dir(torch.nn.Module), *vars(torch.nn.Module())} if re.match("_[a-z]", name)}
LIBRARIES = ("torch", "triton", "vllm")
UNDOCUMENTED = (
    *("triton.knobs", "triton.runtime", "triton.backends", "triton.compiler"),
    *("torch.ops.vllm_ir", "vllm.compilation", "vllm.v1", "vllm.model_executor.layers.activation"),
    "types.FunctionType",
)
"""What has no underscore in its name and is private all the same. Of vLLM a plugin builds on the rest."""


def _is_private(name: str) -> bool:
    parts = name.split(".")
    if any(name == one or name.startswith(f"{one}.") for one in UNDOCUMENTED):
        return True
    return parts[0] in LIBRARIES and any(re.match("_(?!_)", part) for part in parts[1:])


def _dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """``torch._C.x`` of an expression, aliases resolved; None where it does not begin at an imported name."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (start := _dotted(node.value, names)) is not None:
        return f"{start}.{node.attr}"
    return None


def private_names(source: str) -> Iterator[str]:
    """What a file touches that its owner does not document, by import or as an attribute."""
    tree, names = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = {alias.asname or alias.name.partition(".")[0]: alias for alias in node.names}
            names |= {here: alias.name if alias.asname else here for here, alias in imported.items()}
            yield from (alias.name for alias in node.names if _is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= found
            yield from (name for name in found.values() if _is_private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = _dotted(node, names)
            if name is not None and _is_private(name) and not _is_private(name.rpartition(".")[0]):
                yield name
            elif name is None and node.attr in INHERITED:
                yield node.attr
        elif isinstance(node, ast.keyword) and str(node.arg).startswith("co_"):
            yield str(node.arg)


def private_strings(source: str) -> set[str]:
    """Such names in strings of a file."""
    constants = {str(node.value) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    return {text for text in constants if re.fullmatch(r"[\w.]+", text) and _is_private(text)}


FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))


def test_only_the_doors_touch_private_names() -> None:
    touched = {}
    for file in set(FILES) - DOORS:
        source = (ROOT / file).read_text(encoding="utf-8")
        touched[file] = {*private_names(source), *private_strings(source) - set(PRIVATE)}  # these the door is asked for
    assert {file: names for file, names in touched.items() if names} == ELSEWHERE, "ask one of the doors"


def test_the_list_of_torchs_names_is_complete_and_all_are_used() -> None:
    source = (ROOT / "base/torch_private.py").read_text(encoding="utf-8")
    listed, begin, rest = source.partition("@cache\ndef find(")
    assert private_strings(listed) == set(PRIVATE)
    used = private_strings(begin + rest)
    assert used <= set(PRIVATE)
    assert {PRIVATE[name] for name in used} == set(PRIVATE.values())


@pytest.mark.parametrize("name", PRIVATE)
def test_this_torch_has_them_all(name: str) -> None:
    if name.startswith("torch._C._cuda_") and torch.version.cuda is None:
        pytest.skip("a build of torch without CUDA")
    assert resolve_name(name) is not None


# -- without them --------------------------------------------------------------------------------------------------

NONE = "torch.no_such_name"


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Each private name of torch -> what a layer gave without it, and what the log said."""
    script = Path(__file__).with_name("private_names.py")
    run = subprocess.run([sys.executable, script, NONE, *PRIVATE], capture_output=True, text=True, check=True)
    given: dict[str, Any] = json.loads(run.stdout)
    return given


AT_EVERY_RUN = ["torch._int_mm", "torch.Tensor._make_wrapper_subclass"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
def test_the_package_runs_without_a_private_name(answers: dict[str, Any], name: str) -> None:
    answer = answers[name]
    assert "error" not in answer, answer
    assert answer["y"] == answers[NONE]["y"]
    line = f"slidesparse: torch {torch.__version__} has no {name}: {PRIVATE[name]}\n"
    assert answer["said"] == (line if name in AT_EVERY_RUN else "")
