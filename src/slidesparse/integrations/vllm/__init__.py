"""The vLLM plugin: with slidesparse installed, ``vllm serve DIR`` serves pruned checkpoints.

vLLM calls :func:`register` once in every process, through the entry point ``vllm.general_plugins``. It must be cheap
and must not touch CUDA, since workers may fork afterwards. Read ``config.py`` first, then ``model_state.py`` and
``scheme.py``, which turn a loaded layer into a SlideLinear or leave it; ``graph_pass.py`` rewrites graphs by
``fuse_norms.py`` and ``fuse_chains.py``; ``private.py`` is the one door to vLLM's names outside its plugin interface.
"""

from __future__ import annotations

from importlib import metadata

from slidesparse.base.log import own_logger
from slidesparse.integrations import NAME
from slidesparse.integrations.vllm.releases import describe_tested

LOGGER = "vllm.plugins.slidesparse"
"""A child of vLLM's logger, which inherits its level and format."""

log = own_logger(LOGGER)


def register() -> None:
    """Register the quantisation method in vLLM; a second call does nothing."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if NAME in QUANTIZATION_METHODS:
        return
    try:
        from slidesparse.integrations.vllm.config import SlideSparseConfig
        from slidesparse.integrations.vllm.private import require_names

        require_names()
    except (ImportError, AttributeError) as error:  # vLLM moved what we build on; other models must go on working
        log.warning(
            "slidesparse cannot work with vLLM %s (%s): sparse checkpoints run dense. Tried: vLLM %s.",
            metadata.version("vllm"),
            error,
            describe_tested(),
        )
        return
    register_quantization_config(NAME)(SlideSparseConfig)
    from slidesparse.integrations.vllm.graph_sizes import capture_more

    capture_more()
