"""Pack weights that are loaded again into a running engine, where captured CUDA graphs read them.

``reload_weights`` and all weight transfer (reinforcement learning) go layer by layer: vLLM removes every tensor of the
layer, restores its unpacked parameters, loads them, and calls the layer's method as at the start of the engine. So the
packed tensors are kept outside of vLLM's reach (:func:`keep`), and a new weight is copied into them: a captured graph
holds their addresses. A weight that does not fit is refused.
"""

from __future__ import annotations

from typing import Any

from slidesparse.errors import PatternViolation, UnsupportedError
from slidesparse.layer.linear import SlideLinear

ATTRIBUTE = "slide"
"""Attribute of a converted layer for its SlideLinear."""


def keep(layer: Any, slide: SlideLinear, adapters: bool = False) -> None:
    """Store a SlideLinear in a layer of vLLM's, as a plain attribute and not as a submodule.

    LoRA ``adapters`` around the layer call its method, and read the device of a tensor under one of three names; only
    that of a packed weight need not be a matrix.
    """
    object.__setattr__(layer, ATTRIBUTE, slide)
    layer.requires_unquantized_input = True  # vLLM from 0.33 on may quantise before the layer is called
    if adapters:
        object.__setattr__(layer, "weight_packed", slide.forms[0].tensors[-1])


def kept(layer: Any) -> SlideLinear | None:
    """Return the SlideLinear of a converted layer, or None."""
    slide: SlideLinear | None = vars(layer).get(ATTRIBUTE)
    return slide


def pack_again(layer: Any, slide: SlideLinear, name: str) -> None:
    """Pack a layer's new weight into the tensors of the old one; a dense SlideLinear takes any weight.

    Args:
        layer: With ``weight`` [out, in of this rank] and, of a quantised layer, ``weight_scale`` [out, 1]. Both are
            gone afterwards, also when they are refused.
        slide: The layer's SlideLinear.
        name: The layer's name.

    Raises:
        UnsupportedError: The weight does not satisfy the layer's pattern, has another size, or its values have more
            bits than the layer's backend reads.
    """
    weight = layer.weight.data
    scale = layer.weight_scale.data if hasattr(layer, "weight_scale") else None
    del layer.weight
    if scale is not None:
        del layer.weight_scale
    try:
        packed = slide.pack(weight, scale, name=name)
    except PatternViolation as violation:
        raise _refusal(name, violation.what, f"zeros of {slide.pattern}, as when the engine started") from violation
    if not slide.holds_bits(packed):
        raise _refusal(name, "values of more than six bits", "six, as when the engine started")
    if not slide.refill(packed):
        raise _refusal(name, f"{list(packed.shape)}", f"{[slide.out_features, slide.in_features]}, as when it started")


def _refusal(name: str, got: str, needed: str) -> UnsupportedError:
    return UnsupportedError(
        f"the weight of {name} cannot be loaded into the running engine",
        got=got,
        needed=needed,
        remedy="start vLLM again, since some layers have new weights by now and others old ones",
    )
