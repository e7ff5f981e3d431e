"""The exact product of FP4 operands, dense or lifted, in integers: what a kernel would be tested against.

Twice an E2M1 value is a whole number. An E4M3 scale is a whole number times ``2^-9``, and an E8M0 scale a power of two.
So every operand is a matrix of whole numbers times a power of two and its tensor scale; and the sum of the products of
two such matrices is exact in int64 while it fits, which is checked before. Hardware sums in float32, in an order of its
own: its results differ from these by roundings, between the dense and the sparse instruction too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slidesparse.errors import InputError
from slidesparse.fp4.e2m1 import decode, unpack_bytes
from slidesparse.fp4.scales import E8M0_BIAS, Fp4Tensor, by_column

E4M3_UNIT = -9
"""Exponent of E4M3's smallest number, ``2^-9``, of which each of its numbers is a multiple."""

LARGEST_SUM = 2**63 - 1


class ExactProduct(NamedTuple):
    """``total * 2^exponent * tensor_scale`` [M, out].

    Attributes:
        total: int64 [M, out], exact.
        exponent: That of the unit of ``total``.
        tensor_scale: float64 [], the product of the two tensor scales, exact.
    """

    total: torch.Tensor
    exponent: int
    tensor_scale: torch.Tensor

    def to_float(self) -> torch.Tensor:
        """Return the product in float64 [M, out]: rounded only here."""
        return self.total.to(torch.float64) * 2.0**self.exponent * self.tensor_scale


def product(x: Fp4Tensor, weight: Fp4Tensor) -> ExactProduct:
    """Return ``x @ weight^T``: x [M, K], weight [out, K] -> [M, out].

    Both as they are, or both lifted (``PackedPairs.lift`` and ``PackedPairs.operand``): the totals are equal integers.

    Raises:
        InputError: The operands do not fit each other, or the sum may not fit into int64. That takes MXFP4 scales that
            differ by some 40 powers of two in all: the exact sum would need wider numbers, and is not rounded instead.
    """
    if x.format != weight.format or x.block != weight.block or x.columns != weight.columns:
        got, needed = (f"{t.format.name} [., {t.columns}] with a scale for {t.block} columns" for t in (x, weight))
        raise InputError("activations do not fit the weight", got=got, needed=needed)
    numbers, exponents = zip(*(_whole_numbers(tensor) for tensor in (x, weight)), strict=True)
    largest = [int(number.abs().max()) if number.numel() else 0 for number in numbers]
    if x.columns * largest[0] * largest[1] > LARGEST_SUM:
        raise _too_wide(f"up to {x.columns} products of {largest[0]} and {largest[1]}")
    # An exponent that differs would make another integer of the same sum.
    scale = x.tensor_scale.to(torch.float64) * weight.tensor_scale.to(torch.float64)
    return ExactProduct(numbers[0] @ numbers[1].T, sum(exponents), scale)


def _whole_numbers(tensor: Fp4Tensor) -> tuple[torch.Tensor, int]:
    """Return values times block scales as whole numbers, int64 [rows, K], and the exponent of their unit."""
    doubled = (2 * decode(unpack_bytes(tensor.pairs))).to(torch.int64)
    if tensor.format.scale_dtype != torch.uint8:
        scale, unit = (tensor.block_scale() * 2.0**-E4M3_UNIT).to(torch.int64), E4M3_UNIT
    else:
        exponent = tensor.scale.to(torch.int64) - E8M0_BIAS
        # Blocks of zeros have any scale, such as 2^-127. They must not set the unit.
        used = doubled.new_zeros(doubled.shape[0], exponent.shape[1] * tensor.block, dtype=torch.bool)
        used[:, : doubled.shape[1]] = doubled != 0
        used = used.unflatten(-1, (-1, tensor.block)).any(-1)
        unit = int(exponent[used].min()) if bool(used.any()) else 0
        shift = torch.where(used, exponent - unit, 0)
        if shift.numel() and int(shift.max()) > 58:  # 12 << 58 is the last that int64 holds
            raise _too_wide(f"scales from 2^{unit} to 2^{unit + int(shift.max())} in one operand")
        scale = torch.where(used, 1 << shift, 0)
    return doubled * by_column(scale, tensor.block, tensor.columns), unit - 1


def _too_wide(got: str) -> InputError:
    return InputError("the exact sum may not fit into 63 bits", got=got, needed="scales closer to each other")
