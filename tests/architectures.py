"""Small random models of many architectures, under the tensor names that their checkpoints on the hub have."""

from __future__ import annotations

from small_decoders import DECODERS
from small_encoders import ENCODERS
from small_mixtures import MIXTURES
from small_models import Architecture
from small_multimodal import MULTIMODAL

ARCHITECTURES: dict[str, Architecture] = {**DECODERS, **MIXTURES, **ENCODERS, **MULTIMODAL}
