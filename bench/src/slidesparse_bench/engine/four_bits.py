"""Weights of four bits as compressed-tensors packs them: what a user would take in place of a sparse model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

GROUP = 128
"""Columns that share a scale."""

ACTIVATIONS: dict[str, dict[str, Any] | None] = {
    "w4a8": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    "w4a16": None,
}
"""Type of weights -> how activations are quantised."""


def four_bit_config(weights: str, ignore: Iterable[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a type of :data:`ACTIVATIONS`."""
    stored = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": stored | {"dynamic": False}, "input_activations": ACTIVATIONS[weights]}
    form = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return form | {"ignore": list(ignore), "config_groups": {"group_0": group}}


def four_bit_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round a weight [out, in] to four bits, to nearest; ``in`` is a multiple of :data:`GROUP`.

    Returns ``weight_packed`` int32 [out, in / 8] of values plus 8, the first in the lowest bits, ``weight_scale``
    bfloat16 [out, in / 128], and ``weight_shape``.
    """
    out, columns = weight.shape
    groups = weight.float().view(out, -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).clamp(min=1e-8).bfloat16()
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7).view(out, -1, 8).long() + 8
    words = (values << torch.arange(0, 32, 4, device=weight.device)).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([out, columns])}
