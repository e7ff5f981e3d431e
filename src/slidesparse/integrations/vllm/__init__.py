"""The vLLM plugin: with slidesparse installed, ``vllm serve DIR`` serves pruned checkpoints.

vLLM calls :func:`register` once in every process, through the entry point ``vllm.general_plugins``. It must be cheap
and must not touch CUDA, since workers may fork afterwards. The rest of the plugin, besides what
:mod:`slidesparse.integrations` has for every server, in the order of its use:

================== ==============================================================================================
``releases.py``    the releases of vLLM that are tested
``options.py``     what a user may say in ``--additional-config``
``config.py``      the quantisation method ``slidesparse``: vLLM's compressed-tensors with our linears
``refused.py``     options of vLLM that sparse layers cannot follow
``engine.py``      what is prepared once for each model: its state, the graph pass, stack room
``model_state.py`` what the layers of a model share: options, status, warm-up, specs, measured speeds
``scheme.py``      a loaded and sharded layer becomes a SlideLinear, or stays as vLLM made it, and says why
``status.py``      what every layer runs as, logged once
``graph_pass.py``  the pass over every graph that vLLM compiles, for all models of a process
``graph_sizes.py`` CUDA graphs beyond vLLM's own, where the host would be the slower one
``unasked.py``     a warning about a pruned checkpoint in floats, for which vLLM asks no plugin by itself
``attention.py``   attention between such graphs is not split for their sake
``fuse_norms.py``  in such a graph, norms and SiLU are joined with the linear after them
``fuse_chains.py`` in such a graph, linears that follow one another are joined into one operator
``host_bound.py``  a chain of linears stays on one backend while the host limits the speed
``cache_key.py``   a hash of the package's sources, for the key of vLLM's compile cache
``private.py``     the one door to what vLLM does not offer to plugins
``stack_room.py``  vLLM's busy loops get room on CPython's stack
``reload.py``      weights that are loaded again are packed into the same tensors
================== ==============================================================================================
"""

from __future__ import annotations

import logging
from importlib import metadata

from slidesparse.integrations import NAME
from slidesparse.integrations.vllm.releases import describe_tested

LOGGER = "vllm.plugins.slidesparse"
"""A child of vLLM's logger, so that its level and format hold."""


def register() -> None:
    """Make vLLM know the quantisation method; a second call does nothing."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if NAME in QUANTIZATION_METHODS:
        return
    try:
        from slidesparse.integrations.vllm.config import SlideSparseConfig
    except ImportError as error:  # vLLM moved what we build on; other models must go on working
        logging.getLogger(LOGGER).warning(
            "slidesparse cannot work with vLLM %s (%s): sparse checkpoints run dense. Tried: vLLM %s.",
            metadata.version("vllm"),
            error,
            describe_tested(),
        )
        return
    register_quantization_config(NAME)(SlideSparseConfig)
    from slidesparse.integrations.vllm.graph_sizes import capture_more

    capture_more()
