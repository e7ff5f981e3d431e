"""Where the rows of an expert's weight are in a checkpoint: a model joins gate and up, and a checkpoint may not.

Which rows become which is not assumed. Numbers of rows go the way that the tensors go while transformers loads them,
and are looked at where they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from slidesparse.base.traced_tensor import replay, sources
from slidesparse.errors import UnsupportedError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.expert_tensors import ExpertTensor
from slidesparse.files.meta_model import MetaModel
from slidesparse.models.experts import LEAVE_DENSE, Experts

ROW_BITS = 32
"""Lowest bits of a number that say which row of an expert it is; those above say which expert of which tensor."""


@dataclass(frozen=True)
class ExpertRows:
    """Rows of one expert's weight [out, in], which a tensor of the checkpoint holds.

    Attributes:
        weight: Name of the weight, :meth:`Experts.expert`.
        tensor: The tensor.
        index: Place in the tensor's first dimension; 0 for a tensor of one expert.
        begin: The first row.
        end: The row after the last.
    """

    weight: str
    tensor: str
    index: int
    begin: int
    end: int


def find_expert_rows(
    found: Iterable[Experts], meta: MetaModel, checkpoint: Checkpoint, tensors: Mapping[str, ExpertTensor]
) -> list[ExpertRows]:
    """Return where the rows of all experts' weights are, in the order of the rows.

    Args:
        found: Experts of the model.
        meta: The model.
        checkpoint: The checkpoint.
        tensors: Its tensors with weights of experts that are wanted.

    Raises:
        UnsupportedError: The rows of a tensor are torn apart while transformers loads it.
    """
    rows: list[ExpertRows] = []
    for one in found:
        for leaf in one.weights:
            members = one.members or (None,)
            for member, state in zip(members, one.states(leaf), strict=True):
                origin = meta.names.origins.get(state)
                if origin is None or not {*sources(origin)} <= {*tensors}:
                    continue
                numbers = _Numbers(checkpoint, tensors)
                parameter = replay(origin, numbers.of)
                experts = [parameter] if member is not None else list(parameter)
                for expert, weight in enumerate(experts):
                    rows += numbers.found(one.expert(leaf, expert if member is None else member), weight.flatten())
    return rows


class _Numbers:
    """Gives each row of each expert in some tensors a number, and finds the rows again by it."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, ExpertTensor]) -> None:
        self.checkpoint, self.tensors = checkpoint, tensors
        self.places: list[tuple[str, int, int]] = []  # tensor, index, rows

    def of(self, name: str) -> torch.Tensor:
        """Return the numbers of a tensor's rows in its form, with one column."""
        shape, transposed = self.checkpoint.stored(name).shape, self.tensors[name].transposed
        count, height = (1 if len(shape) == 2 else shape[0]), shape[-1 if transposed else -2]
        first = len(self.places)
        self.places += [(name, index, height) for index in range(count)]
        numbers = (torch.arange(first, first + count).unsqueeze(1) << ROW_BITS) + torch.arange(height)
        numbers = numbers.unsqueeze(1 if transposed else 2)
        return numbers[0] if len(shape) == 2 else numbers

    def found(self, weight: str, numbers: torch.Tensor) -> Iterable[ExpertRows]:
        """Yield which tensors an expert's rows are from, by their numbers."""
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
    """The rows of some experts' weights, to read them, and to find what has become of them.

    Args:
        rows: From :func:`find_expert_rows`.
        tensors: The tensors in which they are.

    Attributes:
        layer_of: Weight -> the name under which the weights of this kind of all experts are pruned.
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
        """Return an expert's weight [out, in].

        Args:
            name: The weight.
            read: Reads what a tensor holds at a place of its first dimension, or a tensor of one expert, as a float.
        """
        parts = [self.tensors[one.tensor].matrix(read(one.tensor, one.index)) for one in self.rows[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def part(self, tensor: str, index: int, weight: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return what has become of the rows that a tensor holds of an expert: [out, in].

        Args:
            tensor: The tensor.
            index: The place in its first dimension.
            weight: Name of an expert's weight -> the weight.
        """
        rows = self.places[tensor, index]
        return weight(rows.weight)[rows.begin : rows.end]
