"""Refuse what vLLM offers and sparse layers cannot do, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slidesparse.errors import UnsupportedError

SERVE_DENSE = "serve it dense with --quantization compressed-tensors"
SERVE_FLOATS_DENSE = "serve it dense without --quantization slidesparse"
"""The same for a checkpoint without a ``quantization_config``, of which compressed-tensors can make nothing."""

RANDOM = "random weights, which follow no pattern"
SAVED = "tensors as another engine held them, which sparse layers do not have"
LOAD_FORMATS = {
    "dummy": RANDOM,
    "ipc_cache": "tensors of another process, after they were processed there",
    "runai_streamer_sharded": SAVED,
    "sharded_state": SAVED,
    "tensorizer": SAVED,
}
"""``--load-format`` that sparse layers cannot be made from -> what it brings instead of a checkpoint's weights."""

OFFLOADING = {"uva": ("cpu_offload_gb", "--cpu-offload-gb"), "prefetch": ("offload_group_size", "--offload-group-size")}
"""Part of vLLM's ``offload_config`` -> its size, which is 0 where it is off, and the option that sets it."""


def require_supported(vllm_config: Any, serve_dense: str = SERVE_DENSE) -> None:
    """Refuse options of an engine that sparse layers cannot follow.

    Args:
        vllm_config: vLLM's configuration.
        serve_dense: How the user goes on without sparse layers.

    Raises:
        UnsupportedError: A load format that brings other tensors than a checkpoint's, weights kept in host memory, or
            linears that vLLM is to quantise anew.
    """
    refuse_load_format(vllm_config.load_config, LOAD_FORMATS, serve_dense)
    for option, size in offloaded(getattr(vllm_config, "offload_config", None)).items():
        raise UnsupportedError(
            f"{option} with sparse layers",
            got=size,
            needed="0, since packed weights are made on the GPU and stay there",
            remedy=f"leave the option out, or {serve_dense}",
        )
    for part in quantised_anew(vllm_config.quant_config):
        raise UnsupportedError(
            f"{part} of --quantization-config with sparse layers",
            got="linears that vLLM quantises anew when they are loaded",
            needed="the weights that slidesparse prune wrote",
            remedy=f"leave {part} out",
        )


def refuse_load_format(config: Any, brought: Mapping[str, str], serve_dense: str) -> None:
    """Refuse a ``--load-format`` that sparse layers cannot be made from.

    Args:
        config: What holds the option.
        brought: Format -> what it brings instead of a checkpoint's weights.
        serve_dense: How the user goes on without sparse layers.

    Raises:
        UnsupportedError: One of these formats.
    """
    load_format = str(getattr(config, "load_format", "auto"))
    if load_format in brought:
        raise UnsupportedError(
            f"--load-format {load_format} with sparse layers",
            got=brought[load_format],
            needed="the checkpoint that slidesparse prune wrote",
            remedy=f"leave the option out, or {serve_dense}",
        )


def quantised_anew(quant_config: Any) -> list[str]:
    """Return the parts of ``--quantization-config`` that are about linears, of vLLM from 0.33 on; experts may be."""
    online = getattr(quant_config, "online_quantization_config", None)
    return [part for part in ("linear", "targets") if online is not None and getattr(online.args, part) is not None]


def offloaded(config: Any) -> Mapping[str, object]:
    """Return the options with which a user keeps weights in host memory, and their values."""
    sizes = {option: getattr(getattr(config, part, None), size, 0) for part, (size, option) in OFFLOADING.items()}
    return {option: size for option, size in sizes.items() if size}
