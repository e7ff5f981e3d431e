"""Settle the experts of a layer that a server has loaded: packed, or left to the server with the reason.

Parameters, their loaders, sharding and the router are the server's own. A plugin says what of them it found, how other
GPUs share them, and how the server runs them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from slidesparse.errors import UnsupportedError
from slidesparse.gemm.backend import Problem
from slidesparse.gemm.expert_times import GROUPED, ExpertChoice, ExpertKind, choose_experts
from slidesparse.gemm.grouped import GroupedProduct
from slidesparse.gemm.select_grouped import grouped_product
from slidesparse.gemm.speed import DENSE
from slidesparse.integrations.names import NamedExperts
from slidesparse.integrations.options import Experts
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.experts import SlideExperts, split_rows
from slidesparse.tuning.at_load import LoadTuner
from slidesparse.tuning.measure_experts import RunExperts
from slidesparse.weights.packing import pack, slid_groups
from slidesparse.weights.support import find_pattern, satisfies, value_bits

NAMES = ("w13", "w2")
"""Servers' names of gate and up, and of down."""

ASKED_FOR = "grouped products for any number of tokens; asked for"

NO_MEMORY = "not enough memory to pack them"

NO_PATTERN = "their weights satisfy no pattern"

SHARED = "a shared expert that is one of them follows another pattern"


def why_asked(asked: Experts, moved: Mapping[str, str], option: str, server: str) -> str | None:
    """Return why experts are left to a server before they are loaded, by the user's options; None otherwise.

    Args:
        asked: The user's option of ours, in the server's ``option``.
        moved: The server's options that change loaded experts, in force -> what each does.
        option: Where the user gave ours.
        server: The server's name.

    Raises:
        UnsupportedError: They are to run sparse whatever was measured, and the server changes them.
    """
    if asked == "dense":
        return f"left to {server}, as asked for"
    if not moved:
        return None
    name, does = next(iter(moved.items()))
    if asked == "sparse":
        raise UnsupportedError(
            f'"experts": "sparse" in {option}',
            got=f"{name}, which {does}",
            needed="experts that stay as they were loaded",
            remedy="leave one of the two out",
        )
    return f"left to {server}: {name} {does}"


def with_packing(packing: type, method: Any, **attributes: Any) -> Any:
    """Return a server's method or scheme as one of a class of its name, which the server may ask for: a subclass of it.

    ``packing`` has what changes, and reads the ``attributes``.
    """
    kind: Any = type(type(method).__name__, (packing, type(method)), {})
    made = kind.__new__(kind)  # what its own constructor did has been done
    made.__dict__.update(method.__dict__, **attributes)
    return made


def why_unfit(layer: Any, activation: str, limits: Mapping[str, object], weighs_input: bool) -> str | None:
    """Return why loaded experts cannot be packed, in words; None where they can.

    Args:
        layer: With ``w13_weight`` [E, 2I, H], ``w2_weight`` [E, H, I of this rank], and their scales.
        activation: Its name.
        limits: The server's name of what changes SiLU -> the value, where there is one.
        weighs_input: The router's weights apply to the input of experts.
    """
    if activation != "silu":
        return f"their activation is {activation}, not silu"
    if limits:
        return "their SiLU has {} {}".format(*next(iter(limits.items())))
    if weighs_input:
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
class Sharing:
    """How the GPUs of a server share the experts of a layer.

    Attributes:
        everywhere: Experts on all GPUs.
        top_k: Experts of a token.
        rank: Which shard of each expert is here; 0 where whole ones are.
        shared: The last experts here, so many, which every token goes through, and which were pruned as linears.
    """

    everywhere: int
    top_k: int
    rank: int = 0
    shared: int = 0


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


def unless_memory_ends(find: Callable[[], LoadedExperts | str], asked: Experts) -> LoadedExperts | str:
    """Return what was found, or that memory ended where nobody asked for more."""
    try:
        return find()
    except torch.OutOfMemoryError:
        if asked == "sparse":
            raise
        return NO_MEMORY


def find_loaded(layer: Any, named: NamedExperts, sharing: Sharing) -> LoadedExperts | str:
    """Return the loaded experts of a layer (see :func:`why_unfit`) with their patterns, or why they cannot be packed.

    One that does not satisfy the pattern which the checkpoint names is a PatternViolation.
    """
    if isinstance(named.patterns, str):
        return named.patterns
    patterns, starts = [], []
    for name, marked in zip(NAMES, named.patterns or (None, None), strict=True):
        weight = getattr(layer, f"{name}_weight").data
        start = sharing.rank * weight.shape[2] if name == "w2" else 0
        routed = len(weight) - sharing.shared
        rows = weight[:routed].flatten(0, 1)
        pattern = marked or find_pattern(rows, start)
        if pattern is None:
            return NO_PATTERN
        start %= pattern.group
        slid_groups(rows, pattern, k_offset=start, name=f"{named.name}.{name}_weight")
        if sharing.shared and not satisfies(weight[routed:].flatten(0, 1), pattern, start):
            return SHARED
        patterns.append(pattern)
        starts.append(start)
    gate_up, down = layer.w13_weight.data, layer.w2_weight.data
    count, out, columns = gate_up.shape
    product = grouped_product(Problem(patterns[0], gate_up.dtype, out, columns, gate_up.device))
    if isinstance(product, str):
        return product
    numbers = count, sharing.everywhere, sharing.top_k
    sizes, bits = (columns, down.shape[2]), max(map(value_bits, (gate_up, down)))
    kind = ExpertKind(gate_up.dtype, patterns[0], patterns[1], *sizes, *numbers, gate_up.device, bits)
    return LoadedExperts(kind, (gate_up, down), (starts[0], starts[1]), product)


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


@dataclass(frozen=True)
class OwnExperts:
    """A server's own experts of a loaded layer.

    Attributes:
        process: Makes them ready to run; called once where they are measured, or stay.
        run: Runs them.
        run_packed: Makes what runs packed ones on the same arguments.
        around: Surrounds measuring.
    """

    process: Callable[[], None]
    run: RunExperts
    run_packed: Callable[[SlideExperts], RunExperts]
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)


@dataclass(frozen=True)
class ExpertChooser:
    """What decides whether experts run sparse.

    Attributes:
        asked: The user's option.
        tuner: Measures the first experts of each kind; None where nothing is to be measured.
        warmup: Runs the first experts of each kind that are packed.
        log: Where lines go.
        apart: Why they cannot be measured now, nor times be used; None where they can.
    """

    asked: Experts
    tuner: LoadTuner | None
    warmup: WarmUp | None
    log: logging.Logger
    apart: str | None = None

    def settle(self, layer: Any, experts: LoadedExperts, own: OwnExperts) -> tuple[SlideExperts | None, ExpertChoice]:
        """Pack experts where the user asked for it or measured times favour it; None: the server's own are ready.

        Loaded weights stay where they are, for the caller to free.
        """
        tuner, kind = self.tuner, experts.kind
        timed = self.asked != "sparse" and self.apart is None and tuner is not None and tuner.wants_experts(kind)
        choice = None if timed else self._choose(kind)
        packed = None
        if choice is None or choice.sparse:
            packed = self._pack(layer, experts)
            choice = ExpertChoice(False, NO_MEMORY) if packed is None else choice
        measured = timed and packed is not None
        if tuner is not None and timed and packed is not None:
            own.process()
            with own.around:
                tuner.measure_experts(kind, {DENSE: own.run, GROUPED: own.run_packed(packed)})
        choice = choice or self._choose(kind)
        if packed is not None and choice.sparse:
            return packed, choice
        if not measured:
            own.process()
        return None, choice

    def _choose(self, kind: ExpertKind) -> ExpertChoice:
        if self.asked == "sparse":
            return ExpertChoice(True, ASKED_FOR)
        if self.apart is not None:
            return ExpertChoice(False, self.apart)
        return choose_experts(kind, () if self.tuner is None else self.tuner.expert_sizes)

    def _pack(self, layer: Any, experts: LoadedExperts) -> SlideExperts | None:
        """Return packed experts next to the dense ones; None, and a warning, where memory ends and ``auto`` decides."""
        try:
            return pack_experts(layer, experts, self.warmup)
        except torch.OutOfMemoryError:
            if self.asked == "sparse":
                raise
            self.log.warning("slidesparse: %s stay dense: out of memory while they were packed", experts.kind)
            return None
