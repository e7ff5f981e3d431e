"""Small random models of many architectures, under the tensor names that their checkpoints on the hub have."""

from __future__ import annotations

from typing import Any

import torch
from small_decoders import DECODERS
from small_encoders import ENCODERS
from small_mixtures import MIXTURES
from small_models import Architecture, build
from small_multimodal import MULTIMODAL

ARCHITECTURES: dict[str, Architecture] = {**DECODERS, **MIXTURES, **ENCODERS, **MULTIMODAL}


def on_meta(name: str) -> Any:
    """Make a model of an architecture without its weights."""
    with torch.device("meta"):
        return build(ARCHITECTURES[name])
