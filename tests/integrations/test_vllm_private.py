"""What the plugin does in a vLLM that has moved something which is no part of its interface for plugins."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse.integrations import NAME
from slidesparse.integrations.vllm import fuse_norms, private

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


SILU = "vllm.model_executor.layers.activation.SiluAndMul.forward_native"


@pytest.fixture(autouse=True)
def _forgotten(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log is heard; nothing that was found before is remembered, and nothing afterwards."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING)
    private.silu_and_mul.cache_clear()
    private.norm_operator.cache_clear()
    yield
    private.silu_and_mul.cache_clear()
    private.norm_operator.cache_clear()


def _hide(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    """Let our door find all names but one."""

    def resolve(name: str) -> Any:
        if name == hidden:
            raise AttributeError(name)
        return resolve_name(name)

    monkeypatch.setattr(private, "resolve_name", resolve)


def test_this_vllm_has_it_all() -> None:
    import_module("vllm.ir.ops")
    assert private.silu_and_mul() is not None
    assert private.norm_operator("rms_norm") is torch.ops.vllm_ir.rms_norm.default
    for name in private.PRIVATE:
        if not name.startswith("vllm.v1"):  # importing loops needs more than Python; another test reads their source
            assert resolve_name(name)


@pytest.mark.parametrize(("module", "name", "loop"), private.LOOPS)
def test_loops_are_called_with_room_once(monkeypatch: pytest.MonkeyPatch, module: str, name: str, loop: str) -> None:
    # Importing the module needs more than Python.
    source = Path(str(find_spec("vllm").origin)).parents[1] / f"{module.replace('.', '/')}.py"
    (found,) = (one for one in ast.parse(source.read_text()).body if getattr(one, "name", None) == name)
    assert loop in {getattr(node, "name", None) for node in found.body}
    made = type(name, (), {loop: lambda self, *a, **k: (a, k)})
    before = getattr(made, loop)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: made}))
    private.add_stack_room.cache_clear()
    private.add_stack_room()
    private.add_stack_room()
    private.add_stack_room.cache_clear()
    assert getattr(made, loop).__wrapped__ is before
    assert getattr(made(), loop)(1, b=2) == ((1,), {"b": 2})


def test_without_a_silu_of_plain_torch_none_is_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _hide(monkeypatch, SILU)
    source, graph = SimpleNamespace(meta={"val": torch.empty(4, 8)}), torch.fx.Graph()
    fuse_norms._silu_pattern.cache_clear()
    for _ in range(2):
        assert fuse_norms._join_silu(graph, None, source, [], {}) is None
    fuse_norms._silu_pattern.cache_clear()
    (line,) = caplog.messages
    assert f"has no {SILU}: no SiLU is fused" in line


@pytest.mark.parametrize("norm", ["rms_norm", "fused_add_rms_norm"])
def test_without_an_operator_for_a_norm_that_norm_is_not_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, norm: str
) -> None:
    _hide(monkeypatch, f"torch.ops.vllm_ir.{norm}")
    assert [private.norm_operator(norm) for _ in range(2)] == [None, None]
    (line,) = caplog.messages
    assert f"has no torch.ops.vllm_ir.{norm}: this norm" in line


def test_without_a_class_of_passes_registering_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.compilation.passes import inductor_pass
    from vllm.model_executor.layers import quantization

    from slidesparse.integrations.vllm import register

    monkeypatch.delattr(inductor_pass, "InductorPass")
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", [])
    for module in ("config", "graph_pass"):
        monkeypatch.delitem(sys.modules, f"slidesparse.integrations.vllm.{module}")
    register()
    assert NAME not in quantization.QUANTIZATION_METHODS
    (line,) = caplog.messages
    assert "InductorPass" in line
    assert "sparse checkpoints run dense" in line


def test_the_memory_that_vllm_shares_between_layers_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import workspace

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is no accelerator
    monkeypatch.setattr(workspace, "_manager", workspace.WorkspaceManager(torch.device("cpu")))
    take = workspace.current_workspace_manager().get_simultaneous
    (small,) = take(((8,), torch.int8))
    with private.given_back_workspace():
        assert take(((800,), torch.int8))[0].data_ptr() != small.data_ptr()
    assert take(((8,), torch.int8))[0].data_ptr() == small.data_ptr()
    monkeypatch.setattr(workspace, "_manager", None)
    with private.given_back_workspace():
        pass
