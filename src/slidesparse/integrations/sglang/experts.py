"""Run the pruned experts of a mixture by grouped products, or leave them to SGLang with the reason.

Parameters, their loaders, sharding and the router are SGLang's own. A scheme of SGLang's for W8A8 experts gets a
subclass, which packs the experts when they are loaded, and multiplies. For INT8 experts SGLang has none on an NVIDIA
GPU, and would not start; it has a method for the format w8a8_int8, and :class:`Int8Experts` makes a scheme of that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.moe import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsFusedMoEMethod
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsMoEScheme
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8MoEMethod

from slidesparse.base.log import log_once
from slidesparse.errors import UnsupportedError
from slidesparse.integrations.experts import (
    NAMES,
    ExpertChooser,
    LoadedExperts,
    OwnExperts,
    Sharing,
    find_loaded,
    unless_memory_ends,
    why_unfit,
)
from slidesparse.integrations.names import NamedExperts
from slidesparse.integrations.sglang import LOGGER
from slidesparse.integrations.sglang.scheme import SUBMODULE, refuse_updates
from slidesparse.layer.experts import SlideExperts
from slidesparse.models.layer_kinds import kind_of

LIMITS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
"""SGLang's names of what changes SiLU."""

log = logging.getLogger(LOGGER)


class Int8Experts(W8A8Int8MoEMethod, CompressedTensorsMoEScheme):
    """SGLang's own INT8 experts, by its Triton kernel, as a scheme of compressed-tensors."""

    def __init__(self, quant_config: Any) -> None:
        reason = why_tokens_stay()
        if reason is not None:
            raise UnsupportedError(
                "INT8 experts in SGLang", got=reason, needed="its Triton kernel", remedy="leave the option out"
            )
        super().__init__(quant_config)

    def apply_weights(self, layer: Any, dispatch_output: Any) -> Any:
        """Multiply what SGLang's dispatcher hands over."""
        return self.apply(layer, dispatch_output)


class Packing:
    """The parts of a scheme of SGLang's that change when experts are packed."""

    slide_named: NamedExperts
    slide_chooser: ExpertChooser
    slide_converted: bool | None  # None: not loaded yet

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the experts, or let SGLang go on with them; experts that were left to SGLang stay so.

        Raises:
            PatternViolation: A weight does not satisfy the pattern that the checkpoint names.
        """
        if self.slide_converted is None:
            self.slide_converted = self._convert(layer)
        elif not self.slide_converted:
            super().process_weights_after_loading(layer)  # type: ignore[misc]
        # else it is the end of an update, which was refused

    def _convert(self, layer: Any) -> bool:
        """Pack loaded experts and free the dense ones, or let SGLang go on with them; say which, and why."""
        chooser, name, slide = self.slide_chooser, self.slide_named.name, None
        found = why_not(layer) or unless_memory_ends(partial(find_experts, layer, self.slide_named), chooser.asked)
        if isinstance(found, str):
            reason = found
            super().process_weights_after_loading(layer)  # type: ignore[misc]
        else:
            own = OwnExperts(
                process=partial(super().process_weights_after_loading, layer),  # type: ignore[misc]
                run=partial(_run, layer, super().apply_weights),  # type: ignore[misc]
                run_packed=lambda packed: partial(_run, layer, partial(_multiply, packed)),
                around=inputs_kept(layer.moe_runner_config),
            )
            slide, choice = chooser.settle(layer, found, own)
            reason = f"{found.kind.experts} experts, {found.kind.form}: {choice.reason}"
        log_once(f"slidesparse: {kind_of(name)}: {'dense' if slide is None else 'sparse'}, {reason}", log=log)
        if slide is None:
            return False
        del found
        for weight in NAMES:
            delattr(layer, f"{weight}_weight")
            delattr(layer, f"{weight}_weight_scale")
        layer.add_module(SUBMODULE, slide)
        refuse_updates(layer, name)
        if slide.gate_up.operand.is_cuda:
            torch.cuda.empty_cache()  # or the next layer's, a little smaller, would each take a whole dense block
        return True

    def apply_weights(self, layer: Any, dispatch_output: Any) -> Any:
        """Multiply what SGLang's dispatcher hands over; shared experts that are not among these are the caller's."""
        if not self.slide_converted:
            return super().apply_weights(layer, dispatch_output)  # type: ignore[misc]
        return _multiply(layer.slide, layer, dispatch_output)


def why_tokens_stay() -> str | None:
    """Return why plain tokens, with the numbers of experts that are here, do not reach a scheme; None where they do."""
    exchange, runner = get_moe_a2a_backend(), get_moe_runner_backend()
    if not exchange.is_none():
        return f"--moe-a2a-backend {exchange.value} hands over rows in an order of its own"
    if not (runner.is_auto() or runner.is_triton()):
        return f"--moe-runner-backend {runner.value} takes tokens in a form of its own"
    return None


def why_not(layer: Any) -> str | None:
    """Return why the loaded experts of a ``FusedMoE`` cannot be packed, in words; None where they can."""
    config = layer.moe_runner_config
    if type(layer.quant_method) is not CompressedTensorsFusedMoEMethod:
        return f"{type(layer.quant_method).__name__} of SGLang's keeps some of them elsewhere"
    if not config.is_gated:
        return "they have no gate"
    if config.no_combine:
        return "SGLang sums their products itself"
    if layer.with_bias:
        return "they have a bias"
    limits = {name: value for name in LIMITS if (value := getattr(config, name, None)) is not None}
    reason = why_unfit(layer, config.activation, limits, config.apply_router_weight_on_input)
    return why_tokens_stay() or reason


def find_experts(layer: Any, named: NamedExperts) -> LoadedExperts | str:
    """Return the loaded experts of a ``FusedMoE`` with their patterns, or why they cannot be packed."""
    sharing = Sharing(layer.num_experts, layer.top_k, layer.moe_tp_rank, layer.num_fused_shared_experts)
    return find_loaded(layer, named, sharing)


@contextmanager
def inputs_kept(config: Any) -> Iterator[None]:
    """Let SGLang's experts write to memory of their own, and not over their input, which the next call reads."""
    inplace, config.inplace = config.inplace, False
    try:
        yield
    finally:
        config.inplace = inplace


def _run(
    layer: Any, multiply: Callable[[Any, Any], Any], x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Multiply tokens as SGLang's dispatcher hands them over."""
    given = layer.dispatcher.dispatch(hidden_states=x, topk_output=StandardTopKOutput(weights, chosen, None))
    y: torch.Tensor = multiply(layer, given).hidden_states
    return y


@torch.compiler.disable  # type: ignore[untyped-decorator] # Dynamo cannot trace how our kernels are launched
def _multiply(slide: SlideExperts, layer: Any, given: Any) -> Any:
    """Multiply by packed experts, and by the model's factor of routed experts, as SGLang's kernel does."""
    weights, factor = given.topk_output.topk_weights, layer.moe_runner_config.routed_scaling_factor
    if factor not in (None, 1):
        weights = weights * factor
    return StandardCombineInput(hidden_states=slide(given.hidden_states, weights, given.topk_output.topk_ids))
