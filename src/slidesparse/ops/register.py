"""Registration of operators in ``torch.ops.slidesparse``, with little host time a call.

An operator has one kernel for all devices and a fake implementation for torch.compile, and switches autocast off
inside. It has no gradients: layers call it through :func:`slidesparse.ops.inference_only.no_backward` where they are
recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slidesparse.errors import UnsupportedError

_LIBRARY = torch.library.Library("slidesparse", "FRAGMENT")

LAYER = "linear"
"""The operator of a whole layer, with results in autocast's type as of ``nn.Linear``."""


def _without_autocast(name: str, device: str) -> Callable[..., Any]:
    """Return the operator for ``torch.autocast``, switched off inside: it would round products to 16 bits.

    The result of a whole layer is rounded once, at its end.
    """

    def run(*arguments: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            result = getattr(torch.ops.slidesparse, name)(*arguments, **options)
        return result.to(dtype) if name == LAYER else result

    return run


def _refuse_vmap(*_: Any, **options: Any) -> Any:
    raise UnsupportedError(
        "torch.vmap over a slidesparse layer", remedy="give the layer the whole batch: it takes activations [..., in]"
    )


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator ``torch.ops.slidesparse.NAME`` by its schema in torch.library's syntax.

    ``kernel`` computes it on every device; ``fake`` returns tensors of the results' shapes and types.
    """
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _LIBRARY.impl(name, _without_autocast(name, device), key)
    _LIBRARY.impl(name, _refuse_vmap, "FuncTorchBatched")
    torch.library.register_fake(f"slidesparse::{name}", fake, lib=_LIBRARY)
