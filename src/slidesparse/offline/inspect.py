"""``slidesparse inspect``: the patterns that the weights of a checkpoint actually satisfy."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.counted import counted
from slidesparse.base.progress import advice, progress_bar, table
from slidesparse.checkpoints.check_tensors import find_faults, not_finite, stored_names
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import other_quantisation, quantisation_dtype
from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.errors import CheckpointError, SlideSparseError
from slidesparse.gemm import Choice, Problem, choose
from slidesparse.gemm.cards import warn_of_type
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.experts import Experts, describe_experts
from slidesparse.models.float_linears import float_heads, linears_of_float_mixers
from slidesparse.models.layer_kinds import alike, kind_of
from slidesparse.models.targets import IGNORED, Targets, describe_dense, find_targets, treated_head
from slidesparse.offline.inspect_experts import ExpertLayer, describe_expert_layers, inspect_experts
from slidesparse.offline.source import Source
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.support import (
    check_form,
    check_pattern,
    check_weight,
    is_finite,
    is_nonzero,
    tightest_pattern,
    value_bits,
)


@dataclass(frozen=True)
class Layer:
    """One linear layer.

    Attributes:
        name: Module name.
        shape: [out, in].
        dtype: Storage type.
        bits: Bits in which every value can be kept: 6 after ``prune --rounding 6bit``.
        sparsity: Share of zeros.
        marked: Pattern that the checkpoint claims, or None.
        tightest: Tightest pattern that holds, or ``dense``; ``-`` for a weight that holds NaN or Inf.
        dense_bytes: Bytes of the weight as stored.
        packed_bytes: Bytes of its 2:4 form under the marked (else the tightest) pattern, metadata included.
        ideal_speedup: Under the same pattern, on hardware whose 2:4 rate is twice the dense rate.
        backends: Backends of ``backend="auto"`` here, with their numbers of tokens.
        reason: Reason for these backends.
        problem: Reason why the weight cannot be used as marked, or None.
    """

    name: str
    shape: tuple[int, int]
    dtype: str
    bits: int
    sparsity: float
    marked: str | None
    tightest: str
    dense_bytes: int
    packed_bytes: int
    ideal_speedup: float
    backends: str
    reason: str
    problem: str | None


@dataclass(frozen=True)
class Inspection:
    """The layers of a checkpoint.

    Attributes:
        path: The checkpoint.
        layers: All linears except those left dense.
        dense: Linear left dense -> reason.
        faults: Unusable tensors: missing, of wrong shape or type, with NaN, or with unusable scales.
        other: Module or parameter that multiplies and is no ``nn.Linear`` -> reason why it is not treated.
        experts: The mixtures of experts.
        expert_layers: The readable weights of experts, all experts of a layer in one.
    """

    path: str
    layers: list[Layer]
    dense: dict[str, str]
    faults: list[str]
    other: dict[str, str]
    experts: list[Experts]
    expert_layers: list[ExpertLayer]

    @property
    def ok(self) -> bool:
        """True when every layer satisfies its mark, and every tensor can be used."""
        return not self._problems()

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and whether the checkpoint can be used."""
        return {**asdict(self), "ok": self.ok}

    def describe(self) -> str:
        """Return the inspection as text: layers that differ only by number share a line; problems come last."""
        rows = [
            (
                kind_of(group[0].name) if len(group) > 1 else group[0].name,
                len(group),
                f"{group[0].shape[0]}x{group[0].shape[1]}",
                group[0].dtype,
                group[0].marked or "-",
                " ".join(dict.fromkeys(layer.tightest for layer in group)),
                _range([layer.sparsity for layer in group], 3),
                f"{sum(layer.dense_bytes for layer in group) / 1e6:.2f}",
                f"{sum(layer.packed_bytes for layer in group) / 1e6:.2f}",
                _range([layer.ideal_speedup for layer in group], 2) + "x",
            )
            for group in alike(self.layers, lambda o: (kind_of(o.name), o.shape, o.dtype, o.marked, o.problem is None))
        ]
        columns = ("layer", "count", "shape", "type", "marked", "tightest", "zeros", "dense MB", "2:4 MB", "ideal")
        read = {layer.experts for layer in self.expert_layers}
        unread = [one for one in self.experts if one.name not in read]
        types = dict.fromkeys(getattr(torch, layer.dtype) for layer in self.layers)
        lines = [
            *_describe_six_bits(self.layers),
            *_describe_choices(self.layers),
            *describe_dense({**self.dense, **self.other}),
            *describe_expert_layers(self.expert_layers),
            *(f"experts in an unknown layout: {line}" for line in describe_experts(unread)),
            *advice(warning for dtype in types if (warning := warn_of_type(dtype)) is not None),
        ]
        problems = [f"PROBLEM: {problem}" for problem in self._problems()]
        return "\n".join([table(columns, rows), *lines, *problems])

    def _problems(self) -> list[str]:
        problems = [*(layer.problem for layer in self.layers), *(layer.problem for layer in self.expert_layers)]
        return [*(problem for problem in problems if problem is not None), *self.faults]


def _describe_six_bits(layers: list[Layer]) -> list[str]:
    count = sum(layer.bits == 6 for layer in layers)
    kept = "a Hopper GPU keeps 0.8 of the 2:4 MB, or 0.75 of a dense layer's"
    return [f"{counted(count, 'layer')} of six bits a value: {kept}"] if count else []


def _describe_choices(layers: list[Layer]) -> list[str]:
    """Return a line for each choice of backends; none for layers that cannot run."""
    lines = []
    for group in alike((one for one in layers if one.problem is None), lambda one: (one.backends, one.reason)):
        layers_run = "1 layer runs" if len(group) == 1 else f"{len(group)} layers run"
        where = f"{group[0].backends} ({group[0].reason})" if torch.cuda.is_available() else "dense, without a GPU"
        lines.append(f"{layers_run} here on {where}")
    return lines


def _range(values: list[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}-{high}"


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Find the tightest patterns of all linears and experts of a local checkpoint."""
    source = Source.of(Checkpoint(path))
    checkpoint, marker, meta = source.checkpoint, source.marker, source.meta
    targets = _find_targets(source)
    stored = stored_names(meta)
    present = {name: stored[f"{name}.weight"] for name in targets.linears if f"{name}.weight" in stored}
    layers: list[Layer] = []
    faults = _faults(meta, checkpoint, present)
    with progress_bar("inspect", len(present), unit="layers") as advance:
        for name, tensor in present.items():
            weight = checkpoint.tensor(tensor)
            try:
                check_form(weight, name)
            except SlideSparseError as error:
                faults.append(str(error))
            else:
                layers.append(_inspect_layer(name, weight, marker.pattern_of(name) if marker else None))
            advance(1)
    experts = inspect_experts(source)
    problems = list(dict.fromkeys(faults))
    return Inspection(str(path), layers, targets.dense, problems, targets.other, source.experts, experts)


def _find_targets(source: Source) -> Targets:
    """Sort the linears of a checkpoint by its marker, or without one as ``prune --part all`` would."""
    marker, meta, model = source.marker, source.meta, source.meta.model
    marked = None if marker is None else meta.linears(marker)
    rounded = marker is not None and quantisation_dtype(source.checkpoint.config) is not None
    head = marked is not None and treated_head(model, marked) is not None
    keep = {**meta.why_stored_otherwise(), **source.routers}
    targets = find_targets(model, lm_head=head, part="all", keep=keep)
    if marker is None or marked is None:
        return targets
    floats = {**linears_of_float_mixers(model), **float_heads(model)} if rounded else {}
    known = {**targets.dense, **floats, **source.routers}
    # A router is listed by its names in the model and in the checkpoint.
    names = {
        stored.removesuffix(".weight"): name.removesuffix(".weight") for name, stored in stored_names(meta).items()
    }
    dense = {name: known.get(name, IGNORED) for name in (names.get(entry, entry) for entry in marker.ignore)}
    return Targets(marked, dense, targets.other)


def _faults(meta: MetaModel, checkpoint: Checkpoint, shown: Container[str]) -> list[str]:
    """Return the faults of a checkpoint's files, a line each, except for the values of shown layers.

    An unsupported quantisation is a fault only where the checkpoint has our marker.
    """
    faults: list[str] = []
    try:
        meta.require_complete()
    except CheckpointError as error:
        faults.append(str(other_quantisation(checkpoint.config) or error))
    try:
        faults += map(str, find_faults(meta, checkpoint))
    except CheckpointError as error:
        if checkpoint.config.get(MARKER_KEY) is not None:
            faults.append(str(error))
    return faults + [f"{tensor} holds NaN or Inf" for tensor in not_finite(meta, checkpoint, shown)]


def _inspect_layer(name: str, weight: torch.Tensor, marked: Pattern | None) -> Layer:
    problem = None
    try:
        check_weight(weight, name)
        if marked is not None:
            check_pattern(weight, marked, name=name)
    except SlideSparseError as error:
        problem = str(error)
    tightest = (tightest_pattern(weight) or DENSE) if is_finite(weight) else None
    pattern = marked or tightest or DENSE
    bits = value_bits(weight)
    choice = _choose(pattern, weight, bits) if problem is None else None
    return Layer(
        name=name,
        shape=(weight.shape[0], weight.shape[1]),
        dtype=str(weight.dtype).removeprefix("torch."),
        bits=bits,
        sparsity=1 - is_nonzero(weight).sum().item() / max(weight.numel(), 1),
        marked=None if marked is None else str(marked),
        tightest="-" if tightest is None else str(tightest),
        dense_bytes=weight.numel() * weight.element_size(),
        packed_bytes=round(weight.numel() * pattern.bytes_per_weight("2:4", 8 * weight.element_size())),
        ideal_speedup=float(pattern.ideal_speedup),
        backends="-" if choice is None else choice.describe(),
        reason="-" if choice is None else choice.reason,
        problem=problem,
    )


def _choose(pattern: Pattern, weight: torch.Tensor, bits: int) -> Choice:
    """Return the choice of ``auto`` on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out, columns = weight.shape
    return choose(Problem(pattern, weight.dtype, out, columns, device, pattern != DENSE, bits))
