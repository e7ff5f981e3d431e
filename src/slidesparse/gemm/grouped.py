"""Grouped GEMM over the experts of a mixture: the interface of backends, and its definition in torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from slidesparse.gemm.reference import apply_scales, product
from slidesparse.lifting.expert_order import Arrangement
from slidesparse.lifting.layout import Layout, Lifted
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import DENSE, Pattern


def grouped_patterns(gate_up: Collection[Pattern], down: Collection[Pattern]) -> tuple[Pattern, Pattern] | str:
    """Return the patterns of gate and up, and of down, or the reason why experts with these distinct ones run dense.

    Experts at ``dense`` run dense, too, unless their values have six bits (:data:`AT_DENSE`).

    >>> grouped_patterns({Pattern(6, 8), DENSE}, {Pattern(6, 8)})
    'not all of them were pruned to one pattern'
    """
    if len(gate_up) != 1 or len(down) != 1:
        return "not all of them were pruned to one pattern"
    (of_gate_up,), (of_down,) = gate_up, down
    if of_gate_up != of_down and DENSE in (of_gate_up, of_down):
        return "one of their patterns is dense"
    return of_gate_up, of_down


AT_DENSE = "their pattern is dense"


class GroupedOperand(NamedTuple):
    """The weights of all experts in a product's layout.

    Attributes:
        weights: One tensor, [experts, ...].
        form: The form of a weight in it, for products with several.
    """

    weights: torch.Tensor
    form: Any = None


class TokenTile(Protocol):
    """A tile of a grouped product: some rows of X, all of one expert."""

    @property
    def tokens(self) -> int:
        """Rows of X."""
        ...


@dataclass(frozen=True)
class Rows:
    """A tile of a number of rows of X."""

    tokens: int


class GroupedProduct:
    """The definition of a grouped product, tile by tile in torch: exact for INT8, slow, and waiting for the device.

    Backends of mixtures are subclasses: :class:`slidesparse.gemm.hopper.grouped.HopperExperts`.

    Attributes:
        layout: The layout in which it reads activations.
    """

    layout = Layout(lifted=True)

    def prepare(self, experts: Sequence[PackedWeight]) -> GroupedOperand:
        """Return the weights of all experts, which share one shape, type and pattern.

        Here: the slid matrices, zeros in place, [experts, N, K'].
        """
        return GroupedOperand(torch.stack([packed.columns() for packed in experts]))

    def tiles(
        self, pairs: int, operands: Sequence[GroupedOperand], out_features: Sequence[int]
    ) -> tuple[TokenTile, ...]:
        """Return a tile for each linear of the same rows, all with one number of tokens.

        ``pairs`` is the number of (token, expert) pairs, ``out_features`` the rows of one expert's weight.
        """
        return tuple(Rows(4) for _ in operands)

    def warm_up(self, dtype: torch.dtype, out_dtype: torch.dtype, operands: Sequence[GroupedOperand]) -> None:
        """Compile and load the kernels for these weights of type ``dtype``; here none."""

    def multiply(
        self,
        x: Lifted,
        operand: GroupedOperand,
        scale: torch.Tensor,
        arrangement: Arrangement,
        out_dtype: torch.dtype,
        tile: Any,
    ) -> torch.Tensor:
        """Return ``scale_x[p] * scale[e, n] * sum over k of W[e, n, k] x[p, k]`` [P, N] for expert e of row p.

        Rows past the used tiles are zeros here, and undefined in backends.

        Args:
            x: P rows in the layout, with their scales.
            operand: From :meth:`prepare`.
            scale: float32 [experts, N], contiguous.
            arrangement: The expert of every tile.
            out_dtype: Type of the result.
            tile: From :meth:`tiles`, as for ``arrangement``.

        Raises:
            InputError: Sizes that do not fit each other.
        """
        y = torch.zeros(x.values.shape[0], scale.shape[1], dtype=out_dtype, device=operand.weights.device)
        for number, expert in enumerate(arrangement.experts[: int(arrangement.used)].tolist()):
            rows = slice(number * tile.tokens, (number + 1) * tile.tokens)
            of_rows = None if x.scale is None else x.scale[rows]
            products = product(x.values[rows], operand.weights[expert])
            y[rows] = apply_scales(products, of_rows, scale[expert], None, out_dtype)
        return y
