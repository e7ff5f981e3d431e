"""Run the pruned experts of a mixture by grouped products, or leave them to vLLM with the reason.

Parameters, their loaders, sharding and the router are vLLM's own. A subclass of vLLM's method for W8A8 experts, of the
same name because vLLM checks it, packs the experts when they are loaded, and multiplies.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from slidesparse.errors import UnsupportedError
from slidesparse.integrations.experts import (
    NAMES,
    NO_MEMORY,
    NO_PATTERN,
    LoadedExperts,
    PackingExperts,
    find_loaded,
    why_asked,
    why_unfit,
)
from slidesparse.integrations.names import NamedExperts
from slidesparse.integrations.options import Experts
from slidesparse.integrations.vllm import LOGGER
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.options import OPTION
from slidesparse.integrations.vllm.private import given_back_workspace
from slidesparse.integrations.vllm.status import Outcome
from slidesparse.layer.experts import SlideExperts

METHODS = ("CompressedTensorsW8A8Int8MoEMethod", "CompressedTensorsW8A8Fp8MoEMethod")
"""vLLM's methods for experts with one scale a channel and one a token, or possibly so."""

GATHERED = "allgather_reducescatter"
"""vLLM's default all-to-all for the experts of other GPUs."""

NOT_ALONE = "with data parallelism they cannot be measured: vLLM's own would wait for the other engines"

log = logging.getLogger(LOGGER)


def why_experts_left(method: Any, quant_config: Any, asked: Experts) -> str | None:
    """Return the reason to leave experts of :data:`METHODS` to vLLM before they are loaded, or None.

    An UnsupportedError where the user wants them sparse.
    """
    online = getattr(quant_config, "online_quantization_config", None)  # vLLM from 0.33 on
    changed = {}
    if method.moe.moe_parallel_config.enable_eplb:
        changed["--enable-eplb"] = "moves them between GPUs"
    if online is not None and online.args.moe is not None:
        changed["moe of --quantization-config"] = "requantises them"
    return why_asked(asked, changed, OPTION, "vLLM")


class PackingMethod(PackingExperts):
    """Mixin for vLLM's methods of experts."""

    slide_model: ModelState
    slide_log = log

    def slide_again(self) -> None:
        """Raise an UnsupportedError: CUDA graphs hold the addresses of packed experts."""
        name = self.slide_named.name
        raise UnsupportedError(f"weights that are loaded again into packed experts ({name})", remedy="start vLLM again")

    def slide_find(self, layer: Any) -> LoadedExperts | str:
        """Return the loaded experts, or the reason why they cannot be packed; GPUs that exchange tokens agree."""
        if self.slide_model.adapters:
            return "LoRA adapters read vLLM's own weights"
        reason = self.slide_model.why_left(layer.w13_weight.dtype) or why_not(layer)
        found = reason or loaded_experts(layer, self.slide_named)
        return agreed(found) if self._asked and layer.moe_config.moe_parallel_config.dp_size > 1 else found

    def slide_forms(self, layer: Any) -> tuple[Any, Any, Any] | str:
        """Return the runs of vLLM's own experts and of packed ones, or the reason why they cannot be measured."""
        if not is_alone(layer):
            return NOT_ALONE
        run, context = super().apply, given_back_workspace()  # type: ignore[misc]
        return lambda *given: run(layer, *given, None, None), partial(partial, _multiply, layer), context

    def slide_settled(self, layer: Any, found: LoadedExperts | str, reason: str) -> None:
        """Note the outcome of the experts, and free the dense weights of packed ones."""
        if isinstance(found, str):
            outcome = Outcome(False, found != NO_PATTERN, f"experts: {found}")
        elif self.slide is None:
            outcome = Outcome(False, True, reason, eligible=not reason.endswith(NO_MEMORY))
        else:
            self.moe_kernel = None  # else vLLM would leave the tokens of other GPUs to it
            dense_bytes = sum(weight.nbytes for weight in found.weights)
            for name in NAMES:
                delattr(layer, f"{name}_weight")
            kept = self.slide.gate_up.operand.nbytes + self.slide.down.operand.nbytes
            outcome = Outcome(True, True, reason, True, kept_bytes=kept, dense_bytes=dense_bytes)
        self.slide_model.status.note_outcome(self.slide_named.name, outcome, log)

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *more: Any, **named: Any
    ) -> torch.Tensor:
        """Multiply: [M, H] -> [M, H]; shared experts are the caller's."""
        if self.slide is None:
            return super().apply(layer, x, topk_weights, topk_ids, *more, **named)  # type: ignore[misc, no-any-return]
        return _multiply(layer, self.slide, x, topk_weights, topk_ids)

    def maybe_make_prepare_finalize(self, *given: Any, **named: Any) -> Any:
        """Return None for packed experts, which vLLM must not wrap (up to vLLM 0.26)."""
        if self.slide is not None:
            return None
        return super().maybe_make_prepare_finalize(*given, **named)  # type: ignore[misc]


def why_not(layer: Any) -> str | None:
    """Return the reason why loaded experts cannot be packed; None where they can."""
    activation = getattr(layer.activation, "value", layer.activation)
    if activation != "silu":
        return f"their activation is {activation}, not silu"
    config = getattr(layer, "moe_config", None)
    for name, plain in (("limit", None), ("alpha", 1), ("beta", 0)):
        others = {getattr(place, f"swiglu_{name}", None) for place in (layer, config)} - {None, plain}
        if others:
            return f"their SiLU has swiglu_{name} {others.pop()}"
    return "the router's weights apply to their input" if layer.apply_router_weight_on_input else why_unfit(layer)


def why_tokens_stay(parallel: Any) -> str | None:
    """Return the reason why packed experts do not get the tokens of other GPUs, by ``FusedMoEParallelConfig``; or None.

    vLLM gathers plain tokens for a method without a kernel of its own. All other exchanges are parts of its kernels.
    """
    if parallel.pcp_size > 1:
        return "prompts are split over GPUs (prefill context parallelism)"
    if parallel.use_all2all_kernels and parallel.all2all_backend != GATHERED:
        return f"the all-to-all {parallel.all2all_backend} hands over rows that are quantised, in an order of its own"
    return None


def loaded_experts(layer: Any, named: NamedExperts) -> LoadedExperts | str:
    """Return the loaded experts of a layer, or the reason why they cannot be packed or get no tokens of other GPUs."""
    config, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    reason = why_tokens_stay(parallel)
    if reason is not None:
        return reason
    rank = parallel.tp_rank if parallel.tp_size > 1 else 0
    return find_loaded(layer, named, config.num_experts, config.experts_per_token, rank=rank)


def agreed(found: LoadedExperts | str) -> LoadedExperts | str:
    """Return this process's experts, or another one's reason to leave its own to vLLM; all call this together.

    GPUs that exchange tokens need one form: vLLM's kernels gather quantised rows, packed experts plain ones.
    """
    from vllm.distributed import get_ep_group

    group = get_ep_group()
    own, reasons = found if isinstance(found, str) else None, [None] * group.world_size
    torch.distributed.all_gather_object(reasons, own, group.cpu_group)
    elsewhere = next((reason for reason in reasons if reason is not None), None)
    return found if own is not None or elsewhere is None else f"those of another GPU cannot be packed: {elsewhere}"


def is_alone(layer: Any) -> bool:
    """Return whether vLLM's own experts can run now, without the tokens of other engines."""
    parallel = layer.moe_config.moe_parallel_config
    return parallel.dp_size == 1 and not parallel.use_all2all_kernels


def _multiply(
    layer: Any, slide: SlideExperts, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    here = chosen if layer.expert_map is None else layer.expert_map[chosen.long()]
    y: torch.Tensor = slide(x, weights, here)
    return y
