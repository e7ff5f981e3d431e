"""Dense eight-bit checkpoints as llm-compressor writes them: what many hubs have, and no tool of ours made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from slidesparse.models.config_keys import MARKER_KEY

PART = {
    **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8},
    **{"observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "channel"},
    **{"symmetric": True, "type": "int", "zp_dtype": None},
}
"""All keys of a part of a config group."""


def group(
    weights: Mapping[str, Any] | None = None, inputs: Mapping[str, Any] | None = None, targets: str = "Linear"
) -> dict[str, Any]:
    """A config group of INT8 W8A8 with other values; weights alone are quantised where ``inputs`` has no bits."""
    activations = {**PART, "strategy": "token", "dynamic": True, "observer": None, **(inputs or {})}
    return {
        "format": None,
        "input_activations": activations if activations["num_bits"] else None,
        "output_activations": None,
        "targets": [targets],
        "weights": {**PART, **(weights or {})},
    }


def quantised(*groups: Mapping[str, Any], form: str = "int-quantized") -> dict[str, Any]:
    """The ``quantization_config`` with these config groups, of INT8 W8A8 without any."""
    named = {f"group_{i}": one for i, one in enumerate(groups or (group(),))}
    return {
        **{"config_groups": named, "format": form, "global_compression_ratio": None, "ignore": ["lm_head"]},
        **{"kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed"},
        **{"sparsity_config": {}, "transform_config": {}, "version": "0.15.0"},
    }


def rewritten(source: Path, folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """Write a quantised checkpoint of ours as llm-compressor does: its configuration, scales in BF16, INT8 from -128.

    Layers that are static by ``config`` lack the scale of their activations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads((source / "config.json").read_text()) | {"quantization_config": config or quantised()}
    settings.pop(MARKER_KEY, None)
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("weight_scale"):
            tensors[name] = tensor.bfloat16()
        elif tensor.dtype == torch.int8:
            tensor[0, :2] = -128
    save_file(tensors, folder / "model.safetensors")
    return folder
