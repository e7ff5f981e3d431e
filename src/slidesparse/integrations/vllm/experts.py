"""Run the pruned experts of a mixture by grouped products, or leave them to vLLM with the reason.

Parameters, their loaders, sharding and the router are vLLM's own. A method of vLLM's for W8A8 experts gets a subclass,
of the same name because vLLM asks for it, which packs the experts when they are loaded, and multiplies.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from slidesparse.errors import UnsupportedError
from slidesparse.experts import SlideExperts, split_rows
from slidesparse.gemm.backend import Problem
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.select_grouped import grouped_product
from slidesparse.integrations.vllm import LOGGER
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.scheme import find_pattern
from slidesparse.integrations.vllm.status import Outcome
from slidesparse.packing import pack

METHODS = ("CompressedTensorsW8A8Int8MoEMethod", "CompressedTensorsW8A8Fp8MoEMethod")
"""vLLM's methods of experts whose weights have one scale a channel and activations one a token, or may have."""

log = logging.getLogger(LOGGER)


def is_of_experts(method: QuantizeMethodBase | None) -> bool:
    """Return whether a method loads and multiplies INT8 or FP8 experts."""
    return type(method).__name__ in METHODS


def pack_experts_by(method: Any, name: str, model: ModelState) -> QuantizeMethodBase:
    """Return the method as one that packs experts when they are loaded.

    Args:
        method: vLLM's, of :data:`METHODS`.
        name: The layer's name.
        model: The state of its model.
    """
    kind: Any = type(type(method).__name__, (_Packing, type(method)), {})
    made: Any = kind.__new__(kind)  # what its own constructor did has been done
    made.__dict__.update(method.__dict__, slide_name=name, slide_model=model, slide=None)
    packing: QuantizeMethodBase = made
    return packing


class _Packing:
    """The parts of a method of vLLM's that change when experts are packed."""

    slide_name: str
    slide_model: ModelState
    slide: SlideExperts | None

    supports_eplb = False
    """vLLM would move an expert's scales to another place, and not its packed weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the experts, or let vLLM go on with them.

        Raises:
            UnsupportedError: They are packed already: CUDA graphs know where.
        """
        if self.slide is not None:
            raise UnsupportedError(
                f"weights that are loaded again into packed experts ({self.slide_name})", remedy="start vLLM again"
            )
        reason = why_not(layer)
        packed = reason or pack_experts(layer, self.slide_model)
        if isinstance(packed, str):
            outcome = Outcome(False, False, f"experts: {packed}")
            super().process_weights_after_loading(layer)  # type: ignore[misc]
        else:
            self.slide, outcome = packed
        self.slide_model.status.note_outcome(self.slide_name, outcome, log)

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *more: Any, **named: Any
    ) -> torch.Tensor:
        """Multiply: [M, H] -> [M, H]; shared experts are the caller's."""
        if self.slide is None:
            return super().apply(layer, x, topk_weights, topk_ids, *more, **named)  # type: ignore[misc, no-any-return]
        here = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        y: torch.Tensor = self.slide(x, topk_weights, here)
        return y

    def maybe_make_prepare_finalize(self, *given: Any, **named: Any) -> Any:
        """Return None for packed experts: nothing of vLLM's stands around them (vLLM up to 0.26 asks)."""
        if self.slide is not None:
            return None
        return super().maybe_make_prepare_finalize(*given, **named)  # type: ignore[misc]


def why_not(layer: Any) -> str | None:
    """Return why loaded experts cannot be packed, in words; None where they can."""
    activation = getattr(layer.activation, "value", layer.activation)
    if activation != "silu":
        return f"their activation is {activation}, not silu"
    config = getattr(layer, "moe_config", None)
    for name, plain in (("limit", None), ("alpha", 1), ("beta", 0)):
        found = {getattr(place, f"swiglu_{name}", None) for place in (layer, config)} - {None, plain}
        if found:
            return f"their SiLU has swiglu_{name} {found.pop()}"
    if layer.apply_router_weight_on_input:
        return "the router's weights apply to their input"
    if getattr(layer, "w13_bias", None) is not None:
        return "they have a bias"
    if getattr(layer, "w13_input_scale", None) is not None:
        return "their activations have a fixed scale"
    for name in ("w13", "w2"):
        weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
        if scale.numel() != weight.shape[0] * weight.shape[1]:
            return "their weights need one scale a channel"
    return None


def pack_experts(layer: Any, model: ModelState) -> tuple[SlideExperts, Outcome] | str:
    """Pack loaded experts, and free their dense weights; return why not where they cannot be.

    Args:
        layer: With ``w13_weight`` [E, 2I, H] and ``w2_weight`` [E, H, I of this rank], and their scales.
        model: The state of its model.

    Raises:
        UnsupportedError: See :func:`slidesparse.gemm.hopper.launch.load_kernel`.
    """
    parallel = layer.moe_config.moe_parallel_config
    patterns, starts = [], []
    for name in ("w13", "w2"):
        weight = getattr(layer, f"{name}_weight").data
        start = parallel.tp_rank * weight.shape[2] if name == "w2" and parallel.tp_size > 1 else 0
        pattern = find_pattern(weight.flatten(0, 1), start)
        if pattern is None:
            return "their weights satisfy no pattern"
        patterns.append(pattern)
        starts.append(start % pattern.group)
    weight = layer.w13_weight.data
    _, out, columns = weight.shape
    product = grouped_product(Problem(patterns[0], weight.dtype, out, columns, weight.device))
    if isinstance(product, str):
        return product
    packed, dense_bytes = [], 0
    for name, pattern, k_offset in zip(("w13", "w2"), patterns, starts, strict=True):
        weight, scale = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
        dense_bytes += weight.nbytes
        whole = pack(weight.flatten(0, 1), pattern, scale=scale.flatten(), k_offset=k_offset, name=name)
        packed.append(split_rows(whole, weight.shape[0]))
        delattr(layer, f"{name}_weight")
        del weight
    slide = SlideExperts(packed[0], packed[1], product)
    if isinstance(product, HopperExperts):
        product.warm_up(slide.gate_up.dtype, layer.moe_config.in_dtype, slide.gate_up.operand.get_device())
    kept = slide.gate_up.operand.nbytes + slide.down.operand.nbytes
    named = " and ".join(dict.fromkeys(map(str, patterns)))
    text = f"{len(packed[0])} experts, {named}: grouped products for any number of tokens; asked for"
    return slide, Outcome(True, True, text, True, kept, dense_bytes)
