"""Run the pruned experts of a mixture by grouped products, or leave them to SGLang with the reason.

A subclass of SGLang's scheme for FP8 experts packs them when they are loaded, and multiplies. For INT8 experts SGLang
has none on NVIDIA GPUs, and would not start: :class:`Int8Experts` makes one of its method for another format.
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
from sglang.srt.runtime_context import get_server_args

from slidesparse.base.log import log_once
from slidesparse.errors import UnsupportedError
from slidesparse.integrations.experts import NAMES, LoadedExperts, PackingExperts, find_loaded, why_unfit
from slidesparse.integrations.sglang import LOGGER
from slidesparse.integrations.sglang.scheme import SUBMODULE, refuse_updates
from slidesparse.layer.experts import SlideExperts
from slidesparse.models.layer_kinds import kind_of

PLAIN = {
    **{"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False, "no_combine": False},
    **dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")),
}
"""SGLang's ``MoeRunnerConfig`` of packed experts: SiLU(gate) * up without limits, and the sum."""

SYMMETRIC = "with --enable-symm-mem they cannot be measured: SGLang's own would wait for the other GPUs"

log = logging.getLogger(LOGGER)


class Int8Experts(W8A8Int8MoEMethod, CompressedTensorsMoEScheme):
    """SGLang's own INT8 experts as a scheme of compressed-tensors; an UnsupportedError with other dispatchers."""

    apply_weights = W8A8Int8MoEMethod.apply

    def __init__(self, quant_config: Any) -> None:
        reason = why_tokens_stay()
        if reason is not None:
            remedy = "leave the option out"
            raise UnsupportedError("INT8 experts in SGLang", got=reason, needed="its Triton kernel", remedy=remedy)
        super().__init__(quant_config)


class PackingScheme(PackingExperts):
    """Mixin for SGLang's schemes of experts."""

    slide_log, slide_quantiser = log, "sglang"

    def slide_find(self, layer: Any) -> LoadedExperts | str:
        """Return the loaded experts, or the reason why they cannot be packed."""
        numbers = {"rank": layer.moe_tp_rank, "shared": layer.num_fused_shared_experts}
        return why_not(layer) or find_loaded(layer, self.slide_named, layer.num_experts, layer.top_k, **numbers)

    def slide_forms(self, layer: Any) -> tuple[Any, Any, Any] | str:
        """Return the runs of SGLang's own experts and of packed ones, or the reason why they cannot be measured."""
        if getattr(get_server_args(), "enable_symm_mem", False):
            return SYMMETRIC
        dense = partial(_run, layer, super().apply_weights)  # type: ignore[misc]
        return dense, lambda packed: partial(_run, layer, partial(_multiply, packed)), inputs_kept(layer)

    def slide_settled(self, layer: Any, found: LoadedExperts | str, reason: str) -> None:
        """Log the outcome of the experts, and free the dense weights of packed ones."""
        name, how = self.slide_named.name, "dense" if self.slide is None else "sparse"
        log_once(f"slidesparse: {kind_of(name)}: {how}, {reason}", log=log)
        if self.slide is not None:
            for weight in NAMES:
                delattr(layer, f"{weight}_weight")
                delattr(layer, f"{weight}_weight_scale")
            layer.add_module(SUBMODULE, self.slide)
            refuse_updates(layer, name)

    def apply_weights(self, layer: Any, dispatch_output: Any) -> Any:
        """Multiply the dispatcher's output; shared experts that are not among these are the caller's."""
        if self.slide is None:
            return super().apply_weights(layer, dispatch_output)  # type: ignore[misc]
        return _multiply(self.slide, layer, dispatch_output)


def why_tokens_stay() -> str | None:
    """Return the reason why a scheme gets no plain tokens with local numbers of experts; None where it does."""
    exchange, runner = get_moe_a2a_backend(), get_moe_runner_backend()
    if not exchange.is_none():
        return f"--moe-a2a-backend {exchange.value} hands over rows in an order of its own"
    if not (runner.is_auto() or runner.is_triton()):
        return f"--moe-runner-backend {runner.value} takes tokens in a form of its own"
    return None


def why_not(layer: Any) -> str | None:
    """Return the reason why the loaded experts of a ``FusedMoE`` cannot be packed; None where they can."""
    config = layer.moe_runner_config
    if type(layer.quant_method) is not CompressedTensorsFusedMoEMethod:
        return f"{type(layer.quant_method).__name__} of SGLang's keeps some of them elsewhere"
    for name, plain in PLAIN.items():
        if getattr(config, name, plain) != plain:
            return f"their {name} is {getattr(config, name)} in SGLang"
    return why_tokens_stay() or ("they have a bias" if layer.with_bias else why_unfit(layer))


@contextmanager
def inputs_kept(layer: Any) -> Iterator[None]:
    """Keep SGLang's experts from overwriting their input, which the next call reads, for a block."""
    config = layer.moe_runner_config
    inplace, config.inplace = config.inplace, False
    try:
        yield
    finally:
        config.inplace = inplace


def _run(
    layer: Any, multiply: Callable[[Any, Any], Any], x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
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
