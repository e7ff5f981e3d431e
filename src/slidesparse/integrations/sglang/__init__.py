"""The SGLang plugin: with slidesparse installed, SGLang serves pruned W8A8 checkpoints sparse.

SGLang calls :func:`register` in every process that holds a model, through the entry point ``sglang.srt.plugins``. It
has no registry for a method like ours, so the entry of compressed-tensors in its table is replaced by a subclass, which
gives the original for every checkpoint without our marker.

**The engine was never run.** Tests build, load and multiply layers inside SGLang's own Python, without a GPU and
without its compiled parts.

================ ================================================================================================
``config.py``    SGLang's compressed-tensors configuration, with our linears where the marker names them
``refusals.py``  what cannot work with sparse layers, asked before anything is loaded
``scheme.py``    a loaded and sharded layer becomes a SlideLinear, or stays as SGLang made it, and says why
================ ================================================================================================
"""

from __future__ import annotations

import logging
from importlib.metadata import version

TESTED = ("0.5.16", "0.5.23")
"""The releases inside whose Python the plugin's tests were run; CI runs the last one. The first is for PyTorch 2.11."""

METHOD = "compressed-tensors"
"""SGLang's name of the quantisation method of our checkpoints."""

LOGGER = "sglang.srt.plugins.slidesparse"
"""A child of SGLang's loggers, so that its level and format hold."""


def register() -> None:
    """Make SGLang see our marker; a second call changes nothing. A release that lacks what we need serves dense."""
    try:
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS

        from slidesparse.integrations.sglang.config import SGLangConfig
    except ImportError as error:
        line = "slidesparse: pruned checkpoints run dense in SGLang %s: %s; tested are %s"
        logging.getLogger(LOGGER).warning(line, version("sglang"), str(error).partition(" (")[0], " and ".join(TESTED))
        return
    QUANTIZATION_METHODS[METHOD] = SGLangConfig
