"""Refuse vLLM's options that sparse layers do not support, before anything is loaded."""

from __future__ import annotations

from typing import Any

from slidesparse.errors import UnsupportedError
from slidesparse.integrations.refusals import RANDOM, SAVED, refuse_load_format, refuse_offloading

SERVE_DENSE = "serve it dense with --quantization compressed-tensors"
SERVE_FLOATS_DENSE = "serve it dense without --quantization slidesparse"
"""The same for a checkpoint without a ``quantization_config``, which compressed-tensors does not load."""

LOAD_FORMATS = {
    "dummy": RANDOM,
    "ipc_cache": "tensors of another process, after they were processed there",
    "runai_streamer_sharded": SAVED,
    "sharded_state": SAVED,
    "tensorizer": SAVED,
}
"""Unsuitable ``--load-format`` -> its contents in place of a checkpoint's weights."""

OFFLOADING = {"--cpu-offload-gb": ("uva", "cpu_offload_gb"), "--offload-group-size": ("prefetch", "offload_group_size")}
"""Option -> its part of vLLM's ``offload_config``, and its size there."""


def require_supported(vllm_config: Any, serve_dense: str = SERVE_DENSE) -> None:
    """Raise an UnsupportedError, with ``serve_dense`` as remedy, for options that sparse layers do not support."""
    refuse_load_format(getattr(vllm_config.load_config, "load_format", "auto"), LOAD_FORMATS, serve_dense)
    config = getattr(vllm_config, "offload_config", None)
    sizes = {option: getattr(getattr(config, part, None), size, 0) for option, (part, size) in OFFLOADING.items()}
    refuse_offloading(sizes, serve_dense)
    online = getattr(vllm_config.quant_config, "online_quantization_config", None)  # vLLM from 0.33 on
    for part in ("linear", "targets"):  # experts may be requantised
        if online is not None and getattr(online.args, part) is not None:
            raise UnsupportedError(
                f"{part} of --quantization-config with sparse layers",
                got="linears that vLLM quantises anew when they are loaded",
                needed="the weights that slidesparse prune wrote",
                remedy=f"leave {part} out",
            )
