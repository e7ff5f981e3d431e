"""Find the tensors of a checkpoint with weights of experts, and read them one expert at a time.

A hub has one tensor an expert, ``experts.7.gate_proj.weight`` [out, in], or one for all experts of a layer,
``experts.gate_up_proj`` [experts, out, in], which may be transposed, [experts, in, out]. A model joins gate and up, and
a checkpoint may not. The mapping of rows is not assumed: row numbers are sent through transformers' loading in place of
the tensors, and are read at their destination.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from slidesparse.base.traced_tensor import Computation, Origin, origins_of, replay, sources
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker
from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.errors import UnsupportedError
from slidesparse.models.experts import LEAVE_DENSE, Experts, find_experts
from slidesparse.weights.quant import dequantize
from slidesparse.weights.support import check_pattern

JOINS = {"stack", "cat"}
"""Functions that join whole tensors."""

SWAPS = {"transpose", "swapaxes", "swapdims"}

ROW_BITS = 32
"""Low bits of a number that encode the row of an expert; those above encode tensor and expert."""


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor of a checkpoint with weights of experts.

    Attributes:
        experts: The experts of the layer.
        layer: The name under which these weights are pruned, :meth:`Experts.layer`.
        transposed: Whether its last two dimensions are [in, out].
    """

    experts: Experts
    layer: str
    transposed: bool

    def matrix(self, stored: torch.Tensor) -> torch.Tensor:
        """Convert one expert's weight between its stored form and [out, in]; its own inverse."""
        return stored.T.contiguous() if self.transposed else stored


def find_expert_tensors(meta: MetaModel, checkpoint: Checkpoint) -> dict[str, ExpertTensor]:
    """Return the tensors with weights of experts, in the model's order: see :func:`tensors_of`."""
    return {
        name: tensor for one in find_experts(meta.model) for name, tensor in tensors_of(one, meta, checkpoint).items()
    }


def tensors_of(experts: Experts, meta: MetaModel, checkpoint: Checkpoint) -> dict[str, ExpertTensor]:
    """Return the tensors with the weights of the experts of one layer.

    Raises:
        UnsupportedError: The dimension along which an expert multiplies is unknown.
    """
    tensors: dict[str, ExpertTensor] = {}
    for leaf in experts.weights:
        layer = experts.layer(leaf)
        if (origin := meta.names.origins.get(layer)) is None:
            continue  # a tensor that is missing, which others name
        for name, swapped in _sources(origin, experts, meta):
            if experts.transposed is None:
                raise _unknown(experts, f"{leaf} {list(experts.weights[leaf])}", meta)
            tensors[name], shape = (
                ExpertTensor(experts, layer, experts.transposed != swapped),
                checkpoint.stored(name).shape,
            )
            if len(shape) not in (2, 3) or shape[-2 if tensors[name].transposed else -1] != experts.columns(leaf):
                raise _unknown(experts, f"{name} {list(shape)}", meta)
    return tensors


def _sources(origin: Origin, experts: Experts, meta: MetaModel) -> Iterator[tuple[str, bool]]:
    """Yield the tensors from which a parameter is made, each with whether its last two dimensions are swapped.

    Raises:
        UnsupportedError: A step of loading may divide the rows of a weight among tensors.
    """
    if isinstance(origin, str):
        yield origin, False
        return
    swaps = _swaps(origin)
    if swaps is None:
        raise _unknown(experts, f"a weight made by {getattr(origin.function, '__name__', origin.function)}", meta)
    for inner in origins_of(origin):
        for name, swapped in _sources(inner, experts, meta):
            yield name, swapped != swaps


def _swaps(step: Computation) -> bool | None:
    """Return whether a step swaps the last two dimensions; None for a step that neither swaps nor joins."""
    name = getattr(step.function, "__name__", "")
    if name in JOINS:
        return False
    dims = [value for value in (*step.args[1:], *step.kwargs.values()) if isinstance(value, int)]
    if name in SWAPS and sorted(dims) in ([-2, -1], [1, 2]):
        return True
    return False if name == "__getitem__" and step.args[1:] in ((None,), (Ellipsis,)) else None


def _unknown(experts: Experts, got: str, meta: MetaModel) -> UnsupportedError:
    names = dict.fromkeys(one.name.rpartition(".")[2] for one in find_experts(meta.model))
    return UnsupportedError(
        f"cannot tell along which dimension the experts of {experts.name} multiply",
        got=got,
        needed="experts that transformers describes, or gate_up_proj and down_proj",
        remedy="leave all experts dense with " + " ".join(f"--ignore 're:.*{name}'" for name in names),
    )


def marker_name(tensor: str, dimensions: int) -> str:
    """Return a marker's name of a tensor of experts.

    >>> marker_name("model.layers.3.mlp.experts.7.up_proj.weight", 2)
    'model.layers.3.mlp.experts.*.up_proj'
    >>> marker_name("model.layers.3.mlp.experts.down_proj", 3)
    'model.layers.3.mlp.experts.down_proj'
    """
    name = tensor.removesuffix(".weight")
    return name if dimensions == 3 else re.sub(r"(.*)\.\d+(\.|$)", r"\1.*\2", name, count=1)


def read_experts(checkpoint: Checkpoint, name: str, tensor: ExpertTensor) -> Iterator[torch.Tensor]:
    """Yield the weights [out, in] of a tensor of experts, as they are stored, one at a time."""
    shape = checkpoint.stored(name).shape
    if len(shape) == 2:
        yield tensor.matrix(checkpoint.tensor(name))
        return
    for index in range(shape[0]):
        yield tensor.matrix(checkpoint.part(name, index))


class ExpertReader:
    """Reads the tensors of a pruned checkpoint for a model that runs its experts dense."""

    def __init__(self, checkpoint: Checkpoint, meta: MetaModel, device: str | torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        marker = Marker.from_config(checkpoint.config)
        self.patterns = {} if marker is None else marker.experts
        self.tensors = find_expert_tensors(meta, checkpoint) if self.patterns else {}

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor, an expert's in a float type; a PatternViolation where it violates its marked pattern."""
        value = self.checkpoint.tensor(name, self.device)
        pattern = self.patterns.get(marker_name(name, value.dim())) if name in self.tensors else None
        if pattern is not None:
            for one in value if value.dim() == 3 else [value]:
                check_pattern(self.tensors[name].matrix(one), pattern, name=name)
        scale = f"{name}_scale"
        if name in self.tensors and scale in self.checkpoint.files:
            return dequantize(value, self.checkpoint.tensor(scale, self.device))
        return value


@dataclass(frozen=True)
class ExpertRows:
    """Rows ``begin`` to ``end`` of one expert's ``weight`` [out, in], stored in a ``tensor`` of the checkpoint.

    ``index`` is the place in the tensor's first dimension; 0 for a tensor of one expert.
    """

    weight: str
    tensor: str
    index: int
    begin: int
    end: int


def find_expert_rows(
    found: Iterable[Experts], meta: MetaModel, checkpoint: Checkpoint, tensors: Mapping[str, ExpertTensor]
) -> list[ExpertRows]:
    """Return the places of the rows of all experts' weights, in the order of the rows.

    Raises:
        UnsupportedError: transformers scatters the rows of a tensor while it loads it.
    """
    rows: list[ExpertRows] = []
    for one in found:
        for leaf in one.weights:
            origin = meta.names.origins.get(one.layer(leaf))
            if origin is None or not {*sources(origin)} <= {*tensors}:
                continue
            numbers = _Numbers(checkpoint, tensors)
            for expert, weight in enumerate(replay(origin, numbers.of)):
                rows += numbers.rows(one.expert(leaf, expert), weight.flatten())
    return rows


class _Numbers:
    """Numbers the rows of each expert in some tensors, and finds the rows again by number."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, ExpertTensor]) -> None:
        self.checkpoint, self.tensors = checkpoint, tensors
        self.places: list[tuple[str, int, int]] = []  # tensor, index, rows

    def of(self, name: str) -> torch.Tensor:
        """Return the numbers of a tensor's rows in the tensor's form, with one column."""
        shape, transposed = self.checkpoint.stored(name).shape, self.tensors[name].transposed
        count, height = (1 if len(shape) == 2 else shape[0]), shape[-1 if transposed else -2]
        first = len(self.places)
        self.places += [(name, index, height) for index in range(count)]
        numbers = (torch.arange(first, first + count).unsqueeze(1) << ROW_BITS) + torch.arange(height)
        numbers = numbers.unsqueeze(1 if transposed else 2)
        return numbers[0] if len(shape) == 2 else numbers

    def rows(self, weight: str, numbers: torch.Tensor) -> Iterable[ExpertRows]:
        """Yield the source of each block of an expert's rows, by their numbers."""
        begin = 0
        while begin < len(numbers):
            place = int(numbers[begin]) >> ROW_BITS
            name, index, height = self.places[place] if 0 <= place < len(self.places) else ("", 0, 0)
            end = begin + height
            if not height or not torch.equal(numbers[begin:end], (place << ROW_BITS) + torch.arange(height)):
                raise UnsupportedError(
                    f"the rows of {weight} come from the checkpoint in an order of their own",
                    needed="whole tensors below each other",
                    remedy=f"use --method magnitude, or leave experts dense with {LEAVE_DENSE}",
                )
            yield ExpertRows(weight, name, index, begin, end)
            begin = end


class ExpertRowsByName:
    """Reads some experts' weights from tensors, and finds a tensor's rows in new weights.

    Attributes:
        layer_of: Weight -> the name under which its kind is pruned for all experts.
        layers: All such names.
    """

    def __init__(self, rows: Iterable[ExpertRows], tensors: Mapping[str, ExpertTensor]) -> None:
        self.tensors = tensors
        self.rows: dict[str, list[ExpertRows]] = {}
        self.places: dict[tuple[str, int], ExpertRows] = {}
        for one in rows:
            self.rows.setdefault(one.weight, []).append(one)
            self.places[one.tensor, one.index] = one
        self.layer_of = {name: tensors[several[0].tensor].layer for name, several in self.rows.items()}
        self.layers = {*self.layer_of.values()}

    def __contains__(self, name: str) -> bool:
        """Whether a name is that of an expert's weight."""
        return name in self.rows

    def weight(self, name: str, read: Callable[[str, int], torch.Tensor]) -> torch.Tensor:
        """Return an expert's weight [out, in]."""
        parts = [self.tensors[one.tensor].matrix(read(one.tensor, one.index)) for one in self.rows[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def part(self, tensor: str, index: int, weight: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the new rows [out, in] of an expert that belong into a tensor."""
        rows = self.places[tensor, index]
        return weight(rows.weight)[rows.begin : rows.end]
