"""The patterns of all experts of a layer, for ``slidesparse inspect``, which reads one expert at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slidesparse.base.progress import progress_bar
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.expert_tensors import ExpertTensor, marker_name, read_experts, tensors_of
from slidesparse.checkpoints.marker import Marker
from slidesparse.errors import SlideSparseError, UnsupportedError
from slidesparse.files.stored import STORED_NAMES
from slidesparse.models.layer_kinds import alike, kind_of, shared_name
from slidesparse.offline.source import Source
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.support import PATTERNS, check_pattern, check_weight, is_nonzero, tightest_pattern, value_bits

NAMES = {stored: str(dtype).removeprefix("torch.") for dtype, stored in STORED_NAMES.items()}
"""Type in a file -> its name in the table of linears."""


@dataclass(frozen=True)
class ExpertLayer:
    """The weights of one kind of all experts of a layer.

    Attributes:
        name: Name by which they are pruned.
        experts: The module that holds them.
        count: Number of experts.
        shape: [out, in] of one; gate and up may be one weight in the model and two in the checkpoint.
        dtype: Storage type.
        bits: Bits in which every value can be kept: 6 after ``prune --rounding 6bit``.
        sparsity: Share of zeros.
        marked: Pattern that the checkpoint claims, or None.
        tightest: Tightest pattern that every expert satisfies, or ``dense``; ``-`` where one has NaN or Inf.
        stored_bytes: Bytes of the weights as stored.
        problem: Reason why one of them cannot be used as marked, or None.
    """

    name: str
    experts: str
    count: int
    shape: tuple[int, int]
    dtype: str
    bits: int
    sparsity: float
    marked: str | None
    tightest: str
    stored_bytes: int
    problem: str | None


def inspect_experts(source: Source) -> list[ExpertLayer]:
    """Return the experts of a checkpoint, except those of unknown layout."""
    layers: dict[str, dict[str, ExpertTensor]] = {}
    for one in source.experts:
        try:
            for name, tensor in tensors_of(one, source.meta, source.checkpoint).items():
                layers.setdefault(tensor.layer, {})[name] = tensor
        except UnsupportedError:
            continue
    with progress_bar("inspect", len(layers), unit="layers of experts") as advance:
        inspected = []
        for layer, tensors in layers.items():
            inspected.append(_inspect(layer, tensors, source.checkpoint, source.marker))
            advance(1)
    return inspected


def _inspect(
    layer: str, tensors: dict[str, ExpertTensor], checkpoint: Checkpoint, marker: Marker | None
) -> ExpertLayer:
    stored = {name: checkpoint.stored(name) for name in tensors}
    marks = {marker.experts.get(marker_name(name, len(one.shape))) if marker else None for name, one in stored.items()}
    mark = next(iter(marks)) if len(marks) == 1 else None
    candidates: list[Pattern] | None = list(PATTERNS)
    zeros, total, bits, problem = 0, 0, 0, None
    for name, weight in ((n, one) for n, tensor in tensors.items() for one in read_experts(checkpoint, n, tensor)):
        bits = max(bits, value_bits(weight))
        zeros, total = zeros + weight.numel() - int(is_nonzero(weight).sum()), total + weight.numel()
        try:
            check_weight(weight, name)
        except SlideSparseError as error:
            candidates, problem = None, problem or str(error)
            continue
        try:
            if mark is not None:
                check_pattern(weight, mark, name=name)
        except SlideSparseError as error:
            problem = problem or str(error)
        candidates = candidates and [one for one in candidates if tightest_pattern(weight, [one]) is not None]
    if len(marks) > 1:
        problem = problem or f"{layer} is marked by several patterns"
    experts = next(iter(tensors.values())).experts
    leaf = next(leaf for leaf in experts.weights if experts.layer(leaf) == layer)
    shape = experts.weights[leaf][-2:]
    return ExpertLayer(
        name=layer,
        experts=experts.name,
        count=experts.count,
        shape=(shape[1], shape[0]) if experts.transposed else (shape[0], shape[1]),
        dtype=" ".join(dict.fromkeys(NAMES.get(one.dtype, one.dtype) for one in stored.values())),
        bits=bits,
        sparsity=zeros / max(total, 1),
        marked=None if mark is None else str(mark),
        tightest="-" if candidates is None else str(min(candidates, key=lambda p: (p.density, p.group), default=DENSE)),
        stored_bytes=sum(one.n_bytes for one in stored.values()),
        problem=problem,
    )


def describe_expert_layers(layers: Iterable[ExpertLayer]) -> list[str]:
    """Return a line for each kind of experts' weights; layers that differ by number share it."""
    kinds = alike(
        layers, lambda one: (kind_of(one.name), one.count, one.shape, one.dtype, one.bits, one.marked, one.tightest)
    )
    return [_describe(group) for group in kinds]


def _describe(group: list[ExpertLayer]) -> str:
    one = group[0]
    zeros = dict.fromkeys(f"{share:.3f}" for share in sorted(each.sparsity for each in group))
    megabytes = sum(each.stored_bytes for each in group) / 1e6
    dtype = f"{one.dtype} of six bits" if one.bits == 6 else one.dtype
    return (
        f"experts: {shared_name([each.name for each in group])}, {one.count} of {one.shape[0]}x{one.shape[1]}, {dtype},"
        f" marked {one.marked or '-'}, tightest {one.tightest}, zeros {'-'.join([*zeros][:: max(len(zeros) - 1, 1)])},"
        f" {megabytes:.2f} MB"
    )
