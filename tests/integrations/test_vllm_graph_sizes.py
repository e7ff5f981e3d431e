"""The sizes of CUDA graphs: beyond vLLM's own where the host would be the slower one, and only for our models."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_models import configured

from slidesparse.base.log import log_once
from slidesparse.integrations import NAME
from slidesparse.integrations.vllm import graph_sizes
from slidesparse.integrations.vllm.graph_sizes import MOST, layer_weights, sizes_beyond, wanted_sizes
from slidesparse.models.config_keys import MARKER_KEY

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

SIZES = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
Sizes = Callable[..., list[int]]


def config_of(
    own: list[int], gpus: int = 1, most: int = 16384, draft: Any = None, mode: str = "FULL_AND_PIECEWISE", **text: Any
) -> Any:
    from vllm.config import CUDAGraphMode

    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=own, cudagraph_mode=CUDAGraphMode[mode]),
        speculative_config=draft,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**SIZES | text)),
        parallel_config=SimpleNamespace(tensor_parallel_size=gpus),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=most, max_num_seqs=128),
    )


def test_graphs_reach_as_far_as_the_host_is_the_slower_one() -> None:
    own = [1, 256, 512]
    assert wanted_sizes(config_of(own))[-1] == 2048
    assert wanted_sizes(config_of(own, gpus=2))[-1] == MOST  # each GPU has half of the work, the host all of its own
    assert wanted_sizes(config_of(own, most=800))[-1] == 800
    llama_1b = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert wanted_sizes(config_of(own, **llama_1b))[-1] == MOST
    qwen_14b = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_key_value_heads": 8}
    assert wanted_sizes(config_of(own, **qwen_14b))[-1] == 1728
    assert wanted_sizes(config_of(own, hidden_size=12288, intermediate_size=28672, num_attention_heads=96)) == []
    assert wanted_sizes(config_of([])) == []  # no graphs at all
    assert wanted_sizes(config_of(own, draft=object())) == []
    assert wanted_sizes(config_of(own, intermediate_size=None)) == []  # a mixture, say
    assert layer_weights(SimpleNamespace(**SIZES, head_dim=256)) == 3 * 3584 * 18944 + 2 * 3584 * 256 * 32


def test_a_batch_is_padded_by_little() -> None:
    sizes = [512, *sizes_beyond(512, 4096)]
    assert sizes[-1] == 4096
    assert max(later / former for former, later in pairwise(sizes)) <= 1 + 1 / 16
    assert len(sizes) < 3 * 16 + 2


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("FULL_AND_PIECEWISE", True),
        ("PIECEWISE", True),
        ("FULL", False),  # a user's choice, which holds attention: its buffers grow with the largest graph
        ("FULL_DECODE_ONLY", False),  # prompts run in none
        ("NONE", False),
    ],
)
def test_only_graphs_of_prompts_between_attentions_grow(mode: str, more: bool) -> None:
    assert bool(wanted_sizes(config_of([1, 256, 512], mode=mode))) == more


@pytest.fixture
def sizes(checkpoints: Any) -> Sizes:
    """The sizes that vLLM ends with, for a checkpoint, what a user asked of vLLM, and what of us."""
    from vllm.config import CUDAGraphMode, VllmConfig

    def end(
        path: Path,
        sizes: list[int] | None = None,
        largest: int | None = None,
        quantization: str | None = None,
        **ours: Any,
    ) -> list[int]:
        model = configured(path, quantization=quantization)
        config = VllmConfig(model_config=model, additional_config={"slidesparse": ours})
        config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens = 256, 2048
        compilation = config.compilation_config  # on a CPU vLLM captures nothing, and asks for no sizes
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, largest
        config.model_config.enforce_eager = False
        config._set_cudagraph_sizes()
        assert compilation.max_cudagraph_capture_size == compilation.cudagraph_capture_sizes[-1]
        return list(compilation.cudagraph_capture_sizes)

    return end


def test_a_pruned_model_that_vllm_serves_dense_unasked_is_a_warning(
    sizes: Sizes, checkpoints: Any, caplog: pytest.LogCaptureFixture
) -> None:
    floats = checkpoints("6:8", torch.bfloat16)
    for _ in range(2):  # a multimodal model is configured once for each of its parts
        sizes(floats)
    (line,) = [line for line in caplog.messages if "served dense" in line]
    assert line.startswith(f"slidesparse: {floats} is pruned, but served dense")
    assert "--quantization slidesparse" in line
    caplog.clear()
    log_once.cache_clear()
    sizes(floats, quantization="slidesparse")
    sizes(checkpoints("6:8"), quantization="compressed-tensors")  # dense, as asked for
    assert not [line for line in caplog.messages if "served dense" in line]


def test_our_models_get_more_graphs_and_a_users_word_holds(sizes: Sizes, checkpoints: Any, tmp_path: Path) -> None:
    from test_vllm_plugin import edited

    ours = checkpoints("6:8")
    plain = edited(ours, tmp_path / "plain", **{MARKER_KEY: None})
    stock = sizes(plain)
    assert stock[-1] == 512
    more = sizes(ours)
    assert more[: len(stock)] == stock
    assert more[-1] == 2048  # a layer of this model is tiny, so the largest batch is the limit
    assert sizes(ours, graphs="vllm") == stock
    assert sizes(ours, largest=256)[-1] == 256
    assert sizes(ours, [1, 8, 64]) == [1, 8, 64]


# -- attention between graphs: cut for the sake of graphs that hold it, and of no larger batch -------------------------


@pytest.mark.parametrize(
    ("method", "ours", "asked", "largest"),
    [
        (NAME, {}, {}, 128),
        (NAME, {}, {"draft": SimpleNamespace(num_speculative_tokens=1)}, 256),
        (NAME, {}, {"mode": "PIECEWISE"}, 128),
        (NAME, {}, {"mode": "FULL"}, 2048),  # all graphs hold attention
        (NAME, {"graphs": "vllm"}, {}, 2048),
        ("compressed-tensors", {}, {}, 2048),
        (None, {}, {}, 2048),
    ],
)
def test_attention_is_cut_for_graphs_that_hold_it(
    monkeypatch: pytest.MonkeyPatch, method: str | None, ours: dict[str, Any], asked: dict[str, Any], largest: int
) -> None:
    class Builder:
        """What our code knows of vLLM's."""

        def __init__(self, vllm_config: Any, largest: int | None) -> None:
            self.vllm_config, self.max_cudagraph_size = vllm_config, largest

    monkeypatch.setattr(graph_sizes, "attention_builder", lambda: Builder)
    graph_sizes.cut_less_between_graphs.cache_clear()
    graph_sizes.cut_less_between_graphs()
    graph_sizes.cut_less_between_graphs()  # once a process, whatever it holds
    graph_sizes.cut_less_between_graphs.cache_clear()
    config = config_of([1, 2048], **asked)
    config.model_config.quantization, config.additional_config = method, {"slidesparse": ours}
    found = [Builder(config, most).max_cudagraph_size for most in (2048, 64, None)]
    assert found == [largest, 64, None]


def test_vllm_bounds_cuts_by_this_number_alone() -> None:
    spec = find_spec("vllm")
    source = (Path(str(spec.origin)).parent / "v1/attention/backends/flash_attn.py").read_text()
    assert "num_actual_tokens <= self.max_cudagraph_size" in source
    assert source.count("self.max_cudagraph_size") == 4  # set, a buffer's size when it is made, and this bound
