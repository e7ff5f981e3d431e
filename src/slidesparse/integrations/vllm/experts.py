"""Run the pruned experts of a mixture by grouped products, or leave them to vLLM with the reason.

Parameters, their loaders, sharding and the router are vLLM's own. A method of vLLM's for W8A8 experts gets a subclass,
of the same name because vLLM asks for it, which packs the experts when they are loaded, and multiplies.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from slidesparse.base.device import give_blocks_back
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.backend import Problem
from slidesparse.gemm.expert_times import GROUPED, ExpertChoice, ExpertKind, choose_experts
from slidesparse.gemm.grouped import GroupedProduct
from slidesparse.gemm.select_grouped import grouped_product
from slidesparse.gemm.speed import DENSE
from slidesparse.integrations.names import NamedExperts
from slidesparse.integrations.vllm import LOGGER
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.options import Experts
from slidesparse.integrations.vllm.private import given_back_workspace
from slidesparse.integrations.vllm.status import Outcome
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.experts import SlideExperts, split_rows
from slidesparse.weights.packing import pack, slid_groups
from slidesparse.weights.support import find_pattern, value_bits

METHODS = ("CompressedTensorsW8A8Int8MoEMethod", "CompressedTensorsW8A8Fp8MoEMethod")
"""vLLM's methods of experts whose weights have one scale a channel and activations one a token, or may have."""

NAMES = ("w13", "w2")
"""vLLM's names of gate and up, and of down."""

GATHERED = "allgather_reducescatter"
"""vLLM's default way to the experts of other GPUs."""

ASKED_FOR = "grouped products for any number of tokens; asked for"

NO_MEMORY = "not enough memory to pack them"

NO_PATTERN = "their weights satisfy no pattern"

NOT_ALONE = "with data parallelism they cannot be measured: vLLM's own would wait for the other engines"

log = logging.getLogger(LOGGER)


def is_of_experts(method: QuantizeMethodBase | None) -> bool:
    """Return whether a method loads and multiplies INT8 or FP8 experts."""
    return type(method).__name__ in METHODS


def why_experts_left(method: Any, quant_config: Any, asked: Experts) -> str | None:
    """Return why experts of a method of :data:`METHODS` are left to vLLM before they are loaded; None otherwise.

    Where they are to run sparse whatever was measured, that is an UnsupportedError.
    """
    if asked == "dense":
        return "left to vLLM, as asked for"
    online = getattr(quant_config, "online_quantization_config", None)  # vLLM from 0.33 on
    if method.moe.moe_parallel_config.enable_eplb:
        option, does = "--enable-eplb", "moves them between GPUs"
    elif online is not None and online.args.moe is not None:
        option, does = "moe of --quantization-config", "requantises them"
    else:
        return None
    if asked == "sparse":
        raise UnsupportedError(
            '"experts": "sparse" in --additional-config',
            got=f"{option}, which {does}",
            needed="experts that stay as they were loaded",
            remedy="leave one of the two out",
        )
    return f"left to vLLM: {option} {does}"


def pack_experts_by(method: Any, named: NamedExperts, model: ModelState) -> QuantizeMethodBase:
    """Return the method, of :data:`METHODS`, as one that packs experts when they are loaded."""
    kind: Any = type(type(method).__name__, (_Packing, type(method)), {})
    made: Any = kind.__new__(kind)  # what its own constructor did has been done
    made.__dict__.update(method.__dict__, slide_named=named, slide_model=model, slide=None, slide_stays_dense=False)
    packing: QuantizeMethodBase = made
    return packing


class _Packing:
    """The parts of a method of vLLM's that change when experts are packed."""

    slide_named: NamedExperts
    slide_model: ModelState
    slide: SlideExperts | None
    slide_stays_dense: bool

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the experts, or let vLLM go on with them; experts that were left to vLLM are so when loaded again.

        Raises:
            PatternViolation: A weight does not satisfy the pattern that the checkpoint names.
            UnsupportedError: They are packed already: CUDA graphs know where.
        """
        if self.slide is not None:
            name = self.slide_named.name
            raise UnsupportedError(
                f"weights that are loaded again into packed experts ({name})", remedy="start vLLM again"
            )
        if self.slide_stays_dense:
            super().process_weights_after_loading(layer)  # type: ignore[misc]
            return
        found = self._find(layer)
        if isinstance(found, str):
            outcome = Outcome(False, found != NO_PATTERN, f"experts: {found}", experts=True)
            super().process_weights_after_loading(layer)  # type: ignore[misc]
        else:
            device = found.weights[0].device
            outcome = self._load(layer, found)
            del found
            give_blocks_back(device)
        self.slide_stays_dense = self.slide is None
        self.slide_model.status.note_outcome(self.slide_named.name, outcome, log)

    @property
    def _asked(self) -> bool:
        """Whether the user wants experts sparse wherever possible."""
        return self.slide_model.options.experts == "sparse"

    def _find(self, layer: Any) -> LoadedExperts | str:
        """Return experts that can be packed, or why they cannot be; GPUs that exchange tokens agree."""
        if self.slide_model.adapters:
            return "LoRA adapters read vLLM's own weights"
        reason = self.slide_model.why_left(layer.w13_weight.dtype) or why_not(layer)
        try:
            found = reason or find_experts(layer, self.slide_named)
        except torch.OutOfMemoryError:
            if self._asked:
                raise
            return NO_MEMORY
        return agreed(found) if self._asked and layer.moe_config.moe_parallel_config.dp_size > 1 else found

    def _load(self, layer: Any, experts: LoadedExperts) -> Outcome:
        """Pack experts where the user asked for it or measured times favour it, and free the other form."""
        tuner = self.slide_model.tuner
        timed = not self._asked and tuner is not None and is_alone(layer) and tuner.wants_experts(experts.kind)
        choice = None if timed else self._choose(layer, experts.kind)
        packed = None
        if choice is None or choice.sparse:
            packed = self._pack(layer, experts)
            choice = ExpertChoice(False, NO_MEMORY) if packed is None else choice
        measured = timed and packed is not None
        if tuner is not None and timed and packed is not None:
            super().process_weights_after_loading(layer)  # type: ignore[misc]
            forms = {DENSE: partial(self._multiply_dense, layer), GROUPED: partial(_multiply, layer, packed)}
            with given_back_workspace():
                tuner.measure_experts(experts.kind, forms)
        choice = choice or self._choose(layer, experts.kind)
        text = f"{experts.kind.experts} experts, {experts.kind.form}: {choice.reason}"
        if packed is None or not choice.sparse:
            if not measured:
                super().process_weights_after_loading(layer)  # type: ignore[misc]
            return Outcome(False, True, text, eligible=choice.reason != NO_MEMORY, experts=True)
        self.slide = packed
        self.moe_kernel = None  # with one, vLLM would leave the tokens of other GPUs to it
        dense_bytes = sum(weight.nbytes for weight in experts.weights)
        for name in NAMES:
            delattr(layer, f"{name}_weight")
        kept = self.slide.gate_up.operand.nbytes + self.slide.down.operand.nbytes
        return Outcome(True, True, text, eligible=True, experts=True, kept_bytes=kept, dense_bytes=dense_bytes)

    def _choose(self, layer: Any, kind: ExpertKind) -> ExpertChoice:
        if self._asked:
            return ExpertChoice(True, ASKED_FOR)
        if not is_alone(layer):
            return ExpertChoice(False, NOT_ALONE)
        tuner = self.slide_model.tuner
        return choose_experts(kind, () if tuner is None else tuner.expert_sizes)

    def _pack(self, layer: Any, experts: LoadedExperts) -> SlideExperts | None:
        """Return packed experts next to the dense ones; None, and a warning, where memory ends and ``auto`` decides."""
        try:
            return pack_experts(layer, experts, self.slide_model.warmup)
        except torch.OutOfMemoryError:
            if self._asked:
                raise
            log.warning("slidesparse: %s stay dense: out of memory while they were packed", experts.kind)
            return None

    def _multiply_dense(self, layer: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().apply(layer, x, weights, chosen, None, None)  # type: ignore[misc]
        return y

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *more: Any, **named: Any
    ) -> torch.Tensor:
        """Multiply: [M, H] -> [M, H]; shared experts are the caller's."""
        if self.slide is None:
            return super().apply(layer, x, topk_weights, topk_ids, *more, **named)  # type: ignore[misc, no-any-return]
        return _multiply(layer, self.slide, x, topk_weights, topk_ids)

    def maybe_make_prepare_finalize(self, *given: Any, **named: Any) -> Any:
        """Return None for packed experts, which vLLM is to wrap in nothing (vLLM up to 0.26 asks)."""
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
    for name in NAMES:
        weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
        if scale.numel() != weight.shape[0] * weight.shape[1]:
            return "their weights need one scale a channel"
    return None


@dataclass(frozen=True)
class LoadedExperts:
    """Loaded experts that can be packed.

    Attributes:
        kind: Their kind.
        weights: [E, 2I, H] and [E, H, I of this rank].
        starts: The column of the pattern's groups at which each begins.
        product: What multiplies.
    """

    kind: ExpertKind
    weights: tuple[torch.Tensor, torch.Tensor]
    starts: tuple[int, int]
    product: GroupedProduct


def why_tokens_stay(parallel: Any) -> str | None:
    """Return why the tokens of other GPUs do not reach packed experts, by vLLM's ``FusedMoEParallelConfig``; else None.

    vLLM gathers plain tokens around a method without a kernel of vLLM's own. Every other way is part of those kernels.
    """
    if parallel.pcp_size > 1:
        return "prompts are split over GPUs (prefill context parallelism)"
    if parallel.use_all2all_kernels and parallel.all2all_backend != GATHERED:
        return f"the all-to-all {parallel.all2all_backend} hands over rows that are quantised, in an order of its own"
    return None


def find_experts(layer: Any, named: NamedExperts) -> LoadedExperts | str:
    """Return the loaded experts of a layer with their patterns, or why they cannot be packed.

    ``layer`` has ``w13_weight`` [E, 2I, H] and ``w2_weight`` [E, H, I of this rank], and their scales. One that does
    not satisfy the pattern which the checkpoint names is a PatternViolation.
    """
    config, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    reason = why_tokens_stay(parallel)
    if reason is not None:
        return reason
    if isinstance(named.patterns, str):
        return named.patterns
    patterns, starts = [], []
    for name, marked in zip(NAMES, named.patterns or (None, None), strict=True):
        weight = getattr(layer, f"{name}_weight").data
        start = parallel.tp_rank * weight.shape[2] if name == "w2" and parallel.tp_size > 1 else 0
        rows = weight.flatten(0, 1)
        pattern = marked or find_pattern(rows, start)
        if pattern is None:
            return NO_PATTERN
        slid_groups(rows, pattern, k_offset=start % pattern.group, name=f"{named.name}.{name}_weight")
        patterns.append(pattern)
        starts.append(start % pattern.group)
    gate_up, down = layer.w13_weight.data, layer.w2_weight.data
    count, out, columns = gate_up.shape
    product = grouped_product(Problem(patterns[0], gate_up.dtype, out, columns, gate_up.device))
    if isinstance(product, str):
        return product
    numbers = count, config.num_experts, config.experts_per_token
    sizes, bits = (columns, down.shape[2]), max(map(value_bits, (gate_up, down)))
    kind = ExpertKind(gate_up.dtype, patterns[0], patterns[1], *sizes, *numbers, gate_up.device, bits)
    return LoadedExperts(kind, (gate_up, down), (starts[0], starts[1]), product)


def agreed(found: LoadedExperts | str) -> LoadedExperts | str:
    """Return what this process found, or why another one leaves its experts to vLLM: all of them call this together.

    GPUs that exchange tokens need one form, since each gathers something else: vLLM's kernels quantised rows, packed
    experts plain ones.
    """
    from vllm.distributed import get_ep_group

    group = get_ep_group()
    own, told = found if isinstance(found, str) else None, [None] * group.world_size
    torch.distributed.all_gather_object(told, own, group.cpu_group)
    elsewhere = next((reason for reason in told if reason is not None), None)
    return found if own is not None or elsewhere is None else f"those of another GPU cannot be packed: {elsewhere}"


def pack_experts(layer: Any, experts: LoadedExperts, warmup: WarmUp | None) -> SlideExperts:
    """Pack experts, and warm the first ones of a kind up; their dense weights stay where they are."""
    packed, patterns = [], (experts.kind.pattern, experts.kind.down)
    for name, weight, pattern, start in zip(NAMES, experts.weights, patterns, experts.starts, strict=True):
        scale = getattr(layer, f"{name}_weight_scale").data.flatten()
        whole = pack(weight.flatten(0, 1), pattern, scale=scale, k_offset=start, checked=True, name=name)
        packed.append(split_rows(whole, weight.shape[0]))
    slide = SlideExperts(packed[0], packed[1], experts.product, experts.kind.everywhere)
    if warmup is not None:
        warmup.experts(slide, (experts.kind, experts.starts), experts.kind.top_k)
    return slide


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
