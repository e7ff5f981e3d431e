"""vLLM's own Python, without its compiled parts and without a GPU.

``fetch_vllm.py`` puts it into an environment; ``.ci/run`` does so. vLLM must believe that it runs on a CPU before any
of its modules is imported, since many ask for the platform at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

MISSING = "vLLM's Python is not installed here: python tests/integrations/fetch_vllm.py does that, as CI does"

SMALL = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.fixture(autouse=True)
def default_type() -> Iterator[None]:
    """A model that vLLM fails to load leaves torch's default type changed."""
    import torch

    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


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
    from slidesparse.integrations.vllm import register

    register()


@pytest.fixture
def vllm_config(vllm_on_cpu: None) -> Iterator[Any]:
    """The configuration under which vLLM builds a model."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Pattern and type -> a small checkpoint, made once."""
    import torch

    from slidesparse.bench.vllm_checkpoint import model_config, write_checkpoint
    from slidesparse.pattern import Pattern

    folder = tmp_path_factory.mktemp("checkpoints")

    def make(pattern: str, dtype: torch.dtype = torch.int8) -> Path:
        path: Path = folder / f"{pattern.replace(':', 'of').replace('%', '')}-{dtype}"
        if not path.exists():
            config = model_config("Qwen2.5-7B", 1) | SMALL
            write_checkpoint(path, config, dtype, Pattern.parse(pattern), torch.device("cpu"))
        return path

    return make
