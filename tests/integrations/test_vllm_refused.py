"""Options of vLLM that sparse layers cannot follow: one line, before anything is loaded."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from vllm_models import REFERENCE, configured, loaded_by, quantised_anew

from slidesparse.errors import UnsupportedError
from slidesparse.integrations.vllm.refused import LOAD_FORMATS, require_supported

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


def offload(**sizes: Any) -> dict[str, Any]:
    from vllm.config.offload import OffloadConfig

    return {"offload_config": OffloadConfig(**sizes)}


def load_format(name: str) -> dict[str, Any]:
    from vllm.config.load import LoadConfig

    return {"load_config": LoadConfig(load_format=name)}


def test_formats_that_bring_no_checkpoint_are_refused() -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader import LoadFormats

    known = set(get_args(LoadFormats))
    assert known - LOAD_FORMATS.keys() >= {"auto", "hf", "safetensors", "fastsafetensors", "runai_streamer"}
    assert LOAD_FORMATS.keys() - known <= {"ipc_cache"}  # not in older releases
    for name in known:
        config = VllmConfig(**load_format(name))
        if name not in LOAD_FORMATS:
            require_supported(config)
            continue
        with pytest.raises(UnsupportedError, match=f"--load-format {name} with sparse layers"):
            require_supported(config)


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (lambda: load_format("dummy"), "--load-format dummy with sparse layers; got random weights, which follow no"),
        (lambda: offload(uva={"cpu_offload_gb": 2}), r"--cpu-offload-gb with sparse layers; got 2(\.0)?"),
        (lambda: offload(prefetch={"offload_group_size": 4}), "--offload-group-size with sparse layers; got 4"),
    ],
)
def test_a_model_is_refused_before_it_is_loaded(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch, refused: Any, told: str
) -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    monkeypatch.setattr(DefaultModelLoader, "load_weights", lambda *_: pytest.fail("weights were loaded"))
    model = configured(checkpoints("6:8"))
    config = VllmConfig(model_config=model, additional_config=REFERENCE, **refused())
    with pytest.raises(UnsupportedError, match=told) as error:
        loaded_by(config)
    assert "serve it dense with --quantization compressed-tensors" in str(error.value)


def test_the_way_to_serve_floats_dense_is_without_the_method(checkpoints: Any) -> None:
    """vLLM makes nothing of compressed-tensors without a ``quantization_config``, which it was told to do."""
    from vllm.config import VllmConfig

    path = checkpoints("6:8", torch.bfloat16)
    config = VllmConfig(model_config=configured(path, quantization="slidesparse"), **load_format("dummy"))
    with pytest.raises(UnsupportedError, match=r"or serve it dense without --quantization slidesparse$"):
        loaded_by(config)
    assert configured(path).quantization is None  # as the line says
    with pytest.raises(TypeError):
        VllmConfig(model_config=configured(path, quantization="compressed-tensors"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize(
    ("part", "value"), [("linear", "fp8_per_tensor"), ("targets", {"*.down_proj": "fp8_per_tensor"})]
)
def test_linears_that_vllm_would_quantise_anew_are_refused(
    checkpoints: Any, dtype: torch.dtype, part: str, value: object
) -> None:
    """vLLM itself ends with a traceback when all weights are loaded: it cannot read packed weights back."""
    config = quantised_anew(checkpoints("6:8", dtype), {part: value}, REFERENCE)
    with pytest.raises(
        UnsupportedError, match=f"{part} of --quantization-config with sparse layers; got .*leave {part}"
    ):
        loaded_by(config)
