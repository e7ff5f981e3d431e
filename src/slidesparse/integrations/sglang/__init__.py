"""The SGLang plugin: with slidesparse installed, SGLang serves pruned W8A8 checkpoints sparse.

SGLang calls :func:`register` in every process that holds a model, through the entry point ``sglang.srt.plugins``. It
has no registry for a method like ours, so a subclass replaces the entry of compressed-tensors in its table, and returns
the original for every checkpoint without our marker.

tests/gpu/test_sglang.py compares engines with stock SGLang's. The other tests build, load and multiply layers inside
SGLang's own Python, without its compiled parts.
"""

from __future__ import annotations

from importlib.metadata import version

from slidesparse.base.log import own_logger

TESTED = ("0.5.17", "0.5.23")
"""Releases whose Python ran the plugin's tests; CI runs the last one. The first one ran on a GPU."""

METHOD = "compressed-tensors"
"""SGLang's name of the quantisation method of our checkpoints."""

LOGGER = "sglang.srt.plugins.slidesparse"
"""A child of SGLang's loggers, which inherits its level and format."""

log = own_logger(LOGGER)


def register() -> None:
    """Make SGLang see our marker; a second call changes nothing. An unsuitable release serves dense."""
    try:
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS

        from slidesparse.integrations.sglang.config import SGLangConfig
    except ImportError as error:
        line = "slidesparse: pruned checkpoints run dense in SGLang %s: %s; tested are %s"
        log.warning(line, version("sglang"), str(error).partition(" (")[0], " and ".join(TESTED))
        return
    QUANTIZATION_METHODS[METHOD] = SGLangConfig
