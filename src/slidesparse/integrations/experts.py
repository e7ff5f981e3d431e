"""Settle the loaded experts of a server's layer: packed, or left to the server with the reason.

Parameters, their loaders, sharding and the router are the server's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from slidesparse.base.device import give_blocks_back
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.backend import Problem
from slidesparse.gemm.expert_times import GROUPED, ExpertChoice, ExpertKind, choose_experts
from slidesparse.gemm.grouped import AT_DENSE, GroupedProduct
from slidesparse.gemm.select import grouped_product
from slidesparse.gemm.speed import DENSE_FORM
from slidesparse.integrations.names import NamedExperts
from slidesparse.integrations.options import Experts
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.experts import SlideExperts, split_rows
from slidesparse.weights.packing import check, pack_checked
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import ActivationRounding
from slidesparse.weights.support import find_pattern, satisfies, value_bits

NAMES = ("w13", "w2")
"""Servers' names of gate and up, and of down."""

ASKED_FOR = "grouped products for any number of tokens; asked for"

NO_MEMORY = "not enough memory to pack them"

NO_PATTERN = "their weights satisfy no pattern"

SHARED = "a shared expert that is one of them follows another pattern"


def why_asked(asked: Experts, changed: Mapping[str, str], option: str, server: str) -> str | None:
    """Return the reason to leave experts to a server before they are loaded, by the user's ``option``; or None.

    ``changed``: active options of the server that change loaded experts -> their effect, an UnsupportedError for
    experts that the user wants sparse.
    """
    if asked == "dense":
        return f"left to {server}, as asked for"
    for name, does in changed.items():
        if asked == "auto":
            return f"left to {server}: {name} {does}"
        raise UnsupportedError(
            f'"experts": "sparse" in {option}',
            got=f"{name}, which {does}",
            needed="experts that stay as they were loaded",
            remedy="leave one of the two out",
        )
    return None


def why_unfit(layer: Any) -> str | None:
    """Return the reason why the tensors of loaded experts cannot be packed; None where they can."""
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
        starts: Offset of each in the pattern's groups of columns.
        product: The grouped product.
    """

    kind: ExpertKind
    weights: tuple[torch.Tensor, torch.Tensor]
    starts: tuple[int, int]
    product: GroupedProduct


def find_loaded(
    layer: Any, named: NamedExperts, everywhere: int, top_k: int, *, rank: int = 0, shared: int = 0
) -> LoadedExperts | str:
    """Return the loaded experts of a layer with their patterns, or the reason why they cannot be packed.

    ``layer`` has ``w13_weight`` [E, 2I, H], ``w2_weight`` [E, H, I of this ``rank``], and their scales. The last
    ``shared`` experts were pruned as linears. Another one that violates the checkpoint's pattern is a PatternViolation.
    ``everywhere``: experts on all GPUs; ``top_k``: experts of a token.
    """
    if isinstance(named.patterns, str):
        return named.patterns
    patterns, starts = [], []
    for name, marked in zip(NAMES, named.patterns or (None, None), strict=True):
        weight = getattr(layer, f"{name}_weight").data
        start, routed = rank * weight.shape[2] if name == "w2" else 0, len(weight) - shared
        rows = weight[:routed].flatten(0, 1)
        pattern = marked or find_pattern(rows, start)
        if pattern is None:
            return NO_PATTERN
        start %= pattern.group
        if pattern != DENSE:
            check(rows, pattern, k_offset=start, name=f"{named.name}.{name}_weight")
        if shared and not satisfies(weight[routed:].flatten(0, 1), pattern, start):
            return SHARED
        patterns.append(pattern)
        starts.append(start)
    gate_up, down = layer.w13_weight.data, layer.w2_weight.data
    count, out, columns = gate_up.shape
    numbers, slid, bits = (count, everywhere, top_k), DENSE not in patterns, max(map(value_bits, (gate_up, down)))
    problem = Problem(patterns[0], gate_up.dtype, out, columns, gate_up.device, slid, bits)
    product = grouped_product(problem) if slid or bits == 6 else AT_DENSE
    if isinstance(product, str):
        return product
    sizes = columns, down.shape[2]
    kind = ExpertKind(gate_up.dtype, patterns[0], patterns[1], *sizes, *numbers, gate_up.device, bits)
    return LoadedExperts(kind, (gate_up, down), (starts[0], starts[1]), product)


def pack_experts(
    layer: Any, experts: LoadedExperts, warmup: WarmUp | None, quantiser: ActivationRounding = "vllm"
) -> SlideExperts:
    """Pack experts, and warm up the first ones of a kind; their dense weights stay in the layer."""
    packed, patterns = [], (experts.kind.pattern, experts.kind.down)
    for name, weight, pattern, start in zip(NAMES, experts.weights, patterns, experts.starts, strict=True):
        scale = getattr(layer, f"{name}_weight_scale").data.flatten()
        whole = pack_checked(weight.flatten(0, 1), pattern, scale=scale, k_offset=start, name=name)
        packed.append(split_rows(whole, weight.shape[0]))
    slide = SlideExperts(packed[0], packed[1], experts.product, experts.kind.everywhere, quantiser)
    if warmup is not None:
        warmup.experts(slide, (experts.kind, experts.starts), experts.kind.top_k)
    return slide


class PackingExperts:
    """Mixin for a server's method or scheme of experts, which packs them at load: see :func:`with_packing`.

    A plugin's subclass implements ``slide_find(layer)``, which returns :class:`LoadedExperts` or the reason why there
    are none; ``slide_forms(layer)``, which returns the stock experts' run, a maker of the packed ones' run, and the
    context of both measurements, or the reason why they cannot be measured; and ``slide_settled(layer, found,
    reason)``, which notes the outcome and frees the weights of packed experts.

    Attributes:
        slide_named: The experts' name and patterns in the checkpoint.
        slide_model: The plugin's state of the model, with ``options``, ``tuner`` and ``warmup``.
        slide_log: The plugin's logger.
        slide_quantiser: Server whose rounding of activations is reproduced.
        slide: Packed experts; None: the server's own run.
        slide_stays_dense: They were left to the server when they were loaded first.
    """

    slide_named: NamedExperts
    slide_model: Any
    slide_log: logging.Logger
    slide_quantiser: ActivationRounding = "vllm"
    slide: SlideExperts | None = None
    slide_stays_dense = False

    def slide_again(self) -> None:
        """Ignore packed experts that were loaded again: the server refused it."""

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        """Pack the experts, or leave them to the server, then also when they are loaded again.

        Raises:
            PatternViolation: A weight violates the checkpoint's pattern.
        """
        process = partial(super().process_weights_after_loading, layer)  # type: ignore[misc]
        if self.slide is not None:
            self.slide_again()
        elif self.slide_stays_dense:
            process()
        else:
            self._settle(layer, process)

    def _settle(self: Any, layer: Any, process: Callable[[], None]) -> None:
        try:
            found = self.slide_find(layer)
        except torch.OutOfMemoryError:
            if self._asked:
                raise
            found = NO_MEMORY
        if isinstance(found, str):
            reason = found
            process()
        else:
            choice = self._choose_form(layer, found, process)
            reason = f"{found.kind.experts} experts, {found.kind.form}: {choice.reason}"
        self.slide_stays_dense = self.slide is None
        self.slide_settled(layer, found, reason)
        device = None if isinstance(found, str) else found.weights[0].device
        del found
        if device is not None:
            give_blocks_back(device)  # else the next layer's packed weights, a little smaller, would take dense blocks

    def _choose_form(self: Any, layer: Any, experts: LoadedExperts, process: Callable[[], None]) -> ExpertChoice:
        """Pack experts where the user or measured times choose it; else prepare the server's own."""
        tuner, kind, forms = self.slide_model.tuner, experts.kind, self.slide_forms(layer)
        unmeasurable = forms if isinstance(forms, str) else None
        timed = not self._asked and unmeasurable is None and tuner is not None and tuner.wants_experts(kind)
        choice = None if timed else self._choose(kind, unmeasurable)
        packed = None
        try:
            if choice is None or choice.sparse:
                packed = pack_experts(layer, experts, self.slide_model.warmup, self.slide_quantiser)
        except torch.OutOfMemoryError:
            if self._asked:
                raise
            self.slide_log.warning("slidesparse: %s stay dense: out of memory while they were packed", kind)
            choice = ExpertChoice(False, NO_MEMORY)
        measured = timed and packed is not None
        if measured:
            process()
            dense, sparse, context = forms
            with context:
                tuner.measure_experts(kind, {DENSE_FORM: dense, GROUPED: sparse(packed)})
        settled: ExpertChoice = choice or self._choose(kind, unmeasurable)
        if settled.sparse:
            self.slide = packed
        elif not measured:
            process()
        return settled

    @property
    def _asked(self) -> bool:
        """Whether the user wants experts sparse wherever possible."""
        return bool(self.slide_model.options.experts == "sparse")

    def _choose(self, kind: ExpertKind, unmeasurable: str | None) -> ExpertChoice:
        if self._asked or unmeasurable is not None:
            return ExpertChoice(self._asked, ASKED_FOR if self._asked else unmeasurable or "")
        tuner = self.slide_model.tuner
        return choose_experts(kind, () if tuner is None else tuner.expert_sizes)


def with_packing(packing: type[PackingExperts], method: Any, named: NamedExperts, model: Any) -> Any:
    """Return a server's method or scheme with ``packing`` mixed in; the class keeps its name, which servers check."""
    kind: Any = type(type(method).__name__, (packing, type(method)), {})
    made = kind.__new__(kind)  # not its constructor, which has run; Python cannot assign __class__ across such bases
    made.__dict__.update(method.__dict__, slide_named=named, slide_model=model)
    return made
