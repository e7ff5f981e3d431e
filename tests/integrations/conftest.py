"""vLLM's own Python, without its compiled parts and without a GPU.

``fetch_vllm.py`` puts it into an environment; ``try_vllm.py`` does so for every release that is tested. vLLM must
believe that it runs on a CPU before any of its modules is imported, since many ask for the platform at that moment.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from vllm_models import be_the_only_rank

from slidesparse.base.log import log_once

MISSING = "vLLM's Python is not installed here: python tests/integrations/fetch_vllm.py VERSION does that, as CI does"

SMALL = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

OPERATORS: list[Any] = []
"""Keeps what defines operators: without it they are gone again."""


@pytest.fixture(autouse=True)
def default_type() -> Iterator[None]:
    """A model that vLLM fails to load leaves torch's default type changed."""
    import torch

    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The log of vLLM from INFO on, whether or not this release set its logging up when it was imported."""
    logger = logging.getLogger("vllm")
    before, logger.propagate = logger.propagate, True
    caplog.set_level(logging.INFO, "vllm")
    log_once.cache_clear()
    yield
    logger.propagate = before


@pytest.fixture(scope="session")
def vllm_on_cpu() -> None:
    if find_spec("vllm") is None:
        pytest.skip(MISSING)
    import torch
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    if torch.cuda.is_available():
        pytest.skip("these tests make vLLM believe in a CPU; with a GPU tests/gpu/test_vllm.py runs the real engine")
    vllm.platforms._current_platform = CpuPlatform()
    _stand_in_for_what_is_compiled()
    from slidesparse.integrations.vllm import register

    register()


def _stand_in_for_what_is_compiled() -> None:
    """Let vLLM's models be built and loaded without its compiled parts; what the plugin replaces is none of these."""
    import torch
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def load_without_kernels(layer: Any, remove_weight: bool = False) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = load_without_kernels
    if not hasattr(torch.ops._C, "silu_and_mul"):  # 0.26 looks it up when a layer is made, and does not call it
        OPERATORS.append(torch.library.Library("_C", "FRAGMENT"))
        OPERATORS[-1].define("silu_and_mul(Tensor! out, Tensor input) -> ()")
    torch.accelerator.empty_cache = lambda: None  # 0.33 empties the cache of a GPU that is not there


@pytest.fixture
def no_dense_kernels(vllm_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that stays dense is handed to vLLM's kernel, which is not here."""
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    monkeypatch.setattr(schemes.CompressedTensorsW8A8Int8, "process_weights_after_loading", lambda *_: None)


@pytest.fixture
def vllm_config(vllm_on_cpu: None) -> Iterator[Any]:
    """The configuration under which vLLM builds a model."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        be_the_only_rank()
        yield config


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Pattern and type -> a small checkpoint, made once."""
    import torch

    from slidesparse.weights.pattern import Pattern
    from slidesparse_bench.engine.vllm_checkpoint import model_config, write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")

    def make(pattern: str, dtype: torch.dtype = torch.int8) -> Path:
        path: Path = folder / f"{pattern.replace(':', 'of').replace('%', '')}-{dtype}"
        if not path.exists():
            config = model_config("Qwen2.5-7B", 1) | SMALL
            write_checkpoint(path, config, dtype, Pattern.parse(pattern), torch.device("cpu"))
        return path

    return make
