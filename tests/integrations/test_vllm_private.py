"""What the plugin does in a vLLM that has moved something which is no part of its interface for plugins."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slidesparse.integrations import NAME
from slidesparse.integrations.vllm import private

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


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


@pytest.mark.parametrize("lost", ["InductorPass", "_set_cudagraph_sizes"])
def test_without_a_private_name_registering_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    from vllm.compilation.passes import inductor_pass
    from vllm.config.vllm import VllmConfig
    from vllm.model_executor.layers import quantization

    from slidesparse.integrations.vllm import register

    monkeypatch.delattr(inductor_pass if lost == "InductorPass" else VllmConfig, lost)
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", [])
    register()
    assert NAME not in quantization.QUANTIZATION_METHODS
    (line,) = caplog.messages
    assert lost in line
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
