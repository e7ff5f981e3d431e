"""The two keys of a config.json that describe pruning and quantisation, as they are written.

``slidesparse_config`` is the marker, a key of our own that other programs ignore; ``quantization_config`` is that
of compressed-tensors. :mod:`slidesparse.checkpoints.marker` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from slidesparse.weights.pattern import Pattern

MARKER_KEY = "slidesparse_config"
MARKER_VERSION = 1
EXPERTS_VERSION = 2
"""Version of a marker that names experts, so that a reader without support for them refuses it."""

QUANTIZATION_KEY = "quantization_config"

LINEAR = "Linear"
"""The target that means every linear."""


def marker_config(
    pattern: Pattern, ignore: Iterable[str], layers: Mapping[str, Pattern], experts: Mapping[str, Pattern] | None = None
) -> dict[str, Any]:
    """Return the value of the marker, ready for JSON."""
    exceptions = {name: str(exception) for name, exception in layers.items()}
    value = {"version": MARKER_VERSION, "pattern": str(pattern), "ignore": list(ignore), "layers": exceptions}
    if not experts:
        return value
    return {**value, "version": EXPERTS_VERSION, "experts": {name: str(one) for name, one in experts.items()}}


def head_target(name: str) -> str:
    """Return the target that means an output embedding, whatever the model around it is.

    >>> head_target("model.lm_head")
    're:(.*[.])?lm_head$'
    """
    return f"re:(.*[.])?{re.escape(name.rpartition('.')[2])}$"


def quantization_config(dtype: torch.dtype, ignore: Iterable[str], head: str | None = None) -> dict[str, Any]:
    """Return the compressed-tensors entry for channel-wise 8-bit weights and dynamic per-token activations."""
    # The output embedding is named, since vLLM's is no linear.
    targets = [LINEAR] if head is None else [LINEAR, head_target(head)]
    is_int = dtype == torch.int8
    common = {"num_bits": 8, "type": "int" if is_int else "float", "symmetric": True}
    weights = {**common, "strategy": "channel", "dynamic": False}
    activations = {**common, "strategy": "token", "dynamic": True}
    group = {"targets": targets, "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if is_int else "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }
