"""A packed weight in the form of one backend."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from slidesparse.gemm import get_backend
from slidesparse.gemm.spec import FormSpec
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.support import INT_VIEW, as_bits


class WeightForm(nn.Module):
    """A packed weight in the form of one backend: column map and operand, as buffers."""

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
        """The weight's tensors for the backend's kernel."""
        return [getattr(self, name) for name in self._names]

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operand."""
        return sum(tensor.nbytes for tensor in self.operand)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers in order, for the operator ``linear``."""
        return cast("list[torch.Tensor]", list(self._buffers.values()))

    def unpack(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [out, in] of this shape and type, zeros in place, on its device: the inverse of packing.

        Raises:
            UnsupportedError: See :meth:`slidesparse.gemm.backend.Backend.columns`.
        """
        if self.column_map.is_meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        lifted = shape[0], len(self.column_map)
        matrix = get_backend(self.backend).columns(tuple(self.operand), lifted, dtype)
        return unlifted(matrix, self.column_map, shape[1])

    def spec(self) -> FormSpec:
        """Return the operator's description of these tensors."""
        return FormSpec(self.backend, self._order, len(self.tensors))


def unlifted(matrix: torch.Tensor, column_map: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the weight [out, in] of a matrix [out, K'] for lifted activations, bit for bit.

    Of the copies of an input column one has the value and the others have 0, so their bits are summed.
    """
    weight = torch.zeros(len(matrix), columns + 1, dtype=INT_VIEW[matrix.dtype], device=matrix.device)
    weight.index_add_(1, column_map % (columns + 1), as_bits(matrix))  # padding, -1, goes to the column at the end
    return weight[:, :columns].contiguous().view(matrix.dtype)
