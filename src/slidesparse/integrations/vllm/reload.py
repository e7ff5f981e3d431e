"""Refuse weights that are loaded again into a running engine, before anything of the engine is lost.

The dense weight is gone, and captured CUDA graphs hold the addresses of the packed one: a reload would pack the new
weight elsewhere, and the graphs would go on to read memory that is another tensor's by then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from typing import Any

from torch import nn

from slidesparse.errors import UnsupportedError
from slidesparse.linear import SlideLinear

FIRST_STEP = ("vllm.model_executor.model_loader.reload.layerwise", "get_layer_params_buffers")
"""The function with which vLLM's reload (``reload_weights`` and all weight transfer) begins, and where it is looked up:
it lists the tensors of a module, of the whole model first, before the first of them is taken away."""


def refusal(name: str) -> UnsupportedError:
    """Return the error for a model in which the layer of that name runs on packed weights."""
    return UnsupportedError(
        "weights cannot be loaded again into a running engine with sparse layers",
        got=f"{name}, whose dense weight is gone",
        remedy="start vLLM again, or serve dense (--quantization compressed-tensors)",
    )


@lru_cache  # once a process
def refuse_reloading() -> None:
    """Make vLLM's reload refuse models with sparse layers; where it has no such function, the layers refuse later."""
    module, function = FIRST_STEP
    try:
        found = import_module(module)
    except ImportError:  # before it reloaded layer by layer
        return
    if hasattr(found, function):
        setattr(found, function, _asking(getattr(found, function)))


def _asking(step: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    @wraps(step)
    def ask_and_step(layer: nn.Module) -> Any:
        for name, module in layer.named_modules():
            if isinstance(module, SlideLinear):
                raise refusal(name.rpartition(".")[0] or "a layer")
        return step(layer)

    return ask_and_step
