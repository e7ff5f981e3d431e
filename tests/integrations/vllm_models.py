"""Small models of vLLM's on a CPU, built and loaded by vLLM itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

REFERENCE = {"slidesparse": {"backend": "reference"}}


def configured(path: Path, **settings: Any) -> Any:
    from vllm.config import ModelConfig

    return ModelConfig(model=str(path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, **settings)


def loaded(model: Any, additional: dict[str, Any]) -> Any:
    """A model of vLLM's, built and loaded by vLLM."""
    from vllm.config import VllmConfig

    return loaded_by(VllmConfig(model_config=model, additional_config=additional))


def loaded_by(config: Any, prefix: str = "") -> Any:
    """The same, of a whole configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        be_the_only_rank()
        return get_model(vllm_config=config, model_config=config.model_config, prefix=prefix)


def be_the_only_rank() -> None:
    """Let layers be built; within a configuration of vLLM's."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
    elif getattr(parallel_state, "_EP", None) is None:  # only a mixture's configuration makes this group
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)


def quantised_anew(path: Path, given: dict[str, object], additional: dict[str, Any]) -> Any:
    """The configuration of a model for which a user gave ``--quantization-config``."""
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    if not hasattr(QuantizationConfig, "online_quantization_config"):
        pytest.skip("vLLM before 0.33 quantises nothing anew that a checkpoint holds quantised")
    from vllm.config.quantization import resolve_quantization_config

    parsed = resolve_quantization_config("slidesparse", given)
    model = configured(path, quantization="slidesparse", quantization_config=parsed)
    return VllmConfig(model_config=model, additional_config=additional)
