"""Attention between CUDA graphs: it is cut for the sake of those that hold attention, and of no larger batch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_graph_sizes import config_of

from slidesparse.integrations import NAME
from slidesparse.integrations.vllm import graph_sizes

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


class Builder:
    """What our code knows of vLLM's."""

    def __init__(self, vllm_config: Any, largest: int | None) -> None:
        self.vllm_config, self.max_cudagraph_size = vllm_config, largest


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Builder]]:
    """The class, changed as in an engine of one of our models."""
    kind = type("Builder", (Builder,), {})
    monkeypatch.setattr(graph_sizes, "attention_builder", lambda: kind)
    graph_sizes.cut_less_between_graphs.cache_clear()
    graph_sizes.cut_less_between_graphs()
    graph_sizes.cut_less_between_graphs()  # once a process, whatever it holds
    yield kind
    graph_sizes.cut_less_between_graphs.cache_clear()


def engine(method: str | None = NAME, mode: str = "FULL_AND_PIECEWISE", draft: Any = None, **ours: Any) -> Any:
    config = config_of([1, 2048], mode=mode, draft=draft)
    config.model_config.quantization = method
    config.additional_config = {"slidesparse": ours}
    return config


@pytest.mark.parametrize(
    ("config", "largest"),
    [
        ({}, 128),
        ({"draft": SimpleNamespace(num_speculative_tokens=1)}, 256),
        ({"mode": "PIECEWISE"}, 128),
        ({"mode": "FULL"}, 2048),  # all graphs hold attention
        ({"graphs": "vllm"}, 2048),
        ({"method": "compressed-tensors"}, 2048),
        ({"method": None}, 2048),
    ],
)
def test_attention_is_cut_for_graphs_that_hold_it(made: type[Builder], config: dict[str, Any], largest: int) -> None:
    assert made(engine(**config), 2048).max_cudagraph_size == largest
    assert made(engine(**config), 64).max_cudagraph_size == 64
    assert made(engine(**config), None).max_cudagraph_size is None


def test_vllm_bounds_cuts_by_this_number_alone() -> None:
    spec = find_spec("vllm")
    source = (Path(str(spec.origin)).parent / "v1/attention/backends/flash_attn.py").read_text()
    assert "num_actual_tokens <= self.max_cudagraph_size" in source
    assert source.count("self.max_cudagraph_size") == 4  # set, a buffer's size when it is made, and this bound
