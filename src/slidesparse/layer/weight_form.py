"""A packed weight in the form that one backend reads."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from slidesparse.gemm import get_backend
from slidesparse.gemm.spec import FormSpec
from slidesparse.weights.packed import PackedWeight


class WeightForm(nn.Module):
    """A packed weight as one backend, by its name, keeps it: column map and operand, as buffers."""

    column_map: torch.Tensor

    def __init__(self, packed: PackedWeight, backend: str) -> None:
        super().__init__()
        chosen = get_backend(backend)
        self.backend = backend
        order = chosen.layout.order(packed)
        self._order = () if order is None else tuple(order.numbers)
        self.register_buffer("column_map", chosen.layout.column_map(packed), persistent=False)
        operand = chosen.prepare(packed)
        self._names = [f"operand_{i}" for i in range(len(operand))]
        for name, tensor in zip(self._names, operand, strict=True):
            self.register_buffer(name, tensor, persistent=False)

    @property
    def operand(self) -> list[torch.Tensor]:
        """The tensors that the backend's kernel reads of the weight."""
        return [getattr(self, name) for name in self._names]

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operand."""
        return sum(tensor.nbytes for tensor in self.operand)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers in the order in which they were registered, as the operator ``linear`` takes them."""
        return cast("list[torch.Tensor]", list(self._buffers.values()))

    def spec(self) -> FormSpec:
        """Return the description of these tensors that the operator takes."""
        return FormSpec(self.backend, self._order, len(self.tensors))
