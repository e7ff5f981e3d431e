"""Tell users of a pruned checkpoint in floats that vLLM serves it dense, since nothing else would.

vLLM asks a quantisation method about checkpoints with a ``quantization_config``, and one in BF16 or FP16 has none.
"""

from __future__ import annotations

import logging
from typing import Any

from slidesparse.base.log import log_once
from slidesparse.integrations import NAME
from slidesparse.integrations.vllm import LOGGER
from slidesparse.models.config_keys import MARKER_KEY

UNASKED = (
    f"slidesparse: %s is pruned, but served dense. For BF16 and FP16 vLLM asks no plugin by itself:"
    f' add --quantization {NAME}, or for a draft "quantization": "{NAME}" in --speculative-config'
)

log = logging.getLogger(LOGGER)


def tell_if_unasked(model_config: Any) -> None:
    """Warn of a model that carries our marker, and that vLLM loads without any quantisation method."""
    if model_config is None or model_config.quantization is not None:
        return
    if getattr(model_config.hf_config, MARKER_KEY, None) is not None:
        log_once(UNASKED % model_config.model, logging.WARNING, log)
