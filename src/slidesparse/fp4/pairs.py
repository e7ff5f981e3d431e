"""Patterns over pairs of FP4 values: masks, packing, lifting, and an exact product to test a kernel against.

A pair of FP4 values is one byte, and a byte slides as a weight does: the packed form is
:class:`weights.packed.PackedWeight` with bytes for weights. Its metadata, two 2-bit positions for each window of
four pairs, are what sparse FP4 instructions read (PTX ISA, "Sparse tcgen05.mma.sp with .kind::mxf4 and
.kind::mxf4nvf4"). Only the scales are new: ``docs/fp4.md`` draws which columns must share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from slidesparse.errors import InputError, PatternViolation
from slidesparse.fp4.values import (
    SIGN,
    Fp4Format,
    Fp4Tensor,
    by_column,
    check_even,
    decode,
    pack_bytes,
    unpack_bytes,
)
from slidesparse.prune.mask import check_cost, cost_of, prune_masks
from slidesparse.weights.packed import PackedWeight, pack_segments
from slidesparse.weights.pattern import STRIDE, WINDOW, Pattern
from slidesparse.weights.slide import gather
from slidesparse.weights.support import check_weight

MANTISSA_BITS = 8
"""Enough for an E2M1 value times an E4M3 scale, which has six."""


class Span(NamedTuple):
    """The columns that sliding ties to one scale.

    Overlapping windows join the vectors of scales up to where a group and a vector end together. A block that crosses
    from one span into the next joins the two.

    Attributes:
        columns: Columns of as many groups as lift to whole vectors.
        shared: Columns throughout which the scales of an ordinary tensor must be equal: whole spans and whole blocks.
    """

    columns: int
    shared: int


def span(pattern: Pattern | str, fp4: Fp4Format) -> Span:
    """Return the span of a uniform pattern over pairs in a format.

    >>> from slidesparse.fp4 import NVFP4
    >>> span("6:8", NVFP4)
    Span(columns=64, shared=64)
    """
    pattern = _uniform(pattern)
    columns = lcm(2 * pattern.slid_group, fp4.vector) // pattern.slid_group * pattern.group
    return Span(columns, lcm(columns, fp4.block))


def pair_mask(weight: torch.Tensor, pattern: Pattern | str, cost: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weights to keep, whole pairs: bool [out, in], at most ``keep`` pairs in every group of pairs.

    Removing a pair, columns 2i and 2i + 1, costs the sum of what removing its two weights costs. For the arguments and
    errors see :func:`slidesparse.prune.prune_mask`; the pattern is uniform, and 6:8 keeps 12 of 16 weights.

    >>> w = torch.tensor([[4.0, 3, 0, 1, 5, 6, 7, 8]])
    >>> pair_mask(w, "2:4").int().tolist()
    [[0, 0, 0, 0, 1, 1, 1, 1]]
    """
    check_weight(weight)
    check_even(weight, "weight")
    cost = cost_of(weight, cost)
    check_cost(cost)
    of_pairs = cost.to(torch.float64).unflatten(-1, (-1, 2)).sum(-1)
    # Two huge costs may pass what float32 holds. They tie then, and neither is cheap.
    (mask,) = prune_masks([of_pairs.clamp(max=torch.finfo(torch.float32).max)], _uniform(pattern))
    return mask.repeat_interleave(2, -1)


@dataclass(frozen=True)
class PackedPairs:
    """An FP4 weight [out, in], packed.

    Attributes:
        format: NVFP4 or MXFP4.
        packed: The pairs, as int8: patterns, groups and windows are those of pairs.
        scale: One for each vector of lifted columns: [out, vectors] in the format's type.
        tensor_scale: float32 [].
    """

    format: Fp4Format
    packed: PackedWeight
    scale: torch.Tensor
    tensor_scale: torch.Tensor

    @property
    def n_bytes(self) -> int:
        """Bytes of values, metadata (two bits a kept pair) and scales, without the tensor's."""
        return self.packed.n_bytes + self.scale.numel()

    def unpack(self) -> Fp4Tensor:
        """Return the weight, bit for bit except for the sign of zeros: the inverse of :func:`pack_pairs`."""
        pairs = self.packed.unpack().view(torch.uint8)
        first = torch.arange(0, pairs.shape[1], self.format.block // 2, device=pairs.device)  # pair of each block
        copies = _lifted_pairs(self.packed.pattern, self.format, pairs) == first.unsqueeze(1)
        bits = self.scale.view(torch.uint8)[:, copies.int().argmax(1) // (self.format.vector // 2)]
        scale = bits.contiguous().view(self.format.scale_dtype)
        return Fp4Tensor(self.format, pairs, scale, self.tensor_scale, self.format.block)

    def metadata(self) -> torch.Tensor:
        """Return the metadata nibble of every window of four pairs: uint8 [out, windows]."""
        return cast("torch.Tensor", self.packed.metadata())  # the pattern is uniform, so there is a 2:4 segment

    def operand(self) -> Fp4Tensor:
        """Return the slid weight, zeros in place, which multiplies lifted activations: [out, K']."""
        pairs = self.packed.columns().view(torch.uint8)
        pairs = F.pad(pairs, (0, -pairs.shape[1] % (self.format.vector // 2)))
        return Fp4Tensor(self.format, pairs, self.scale, self.tensor_scale, self.format.vector)

    def lift(self, x: Fp4Tensor) -> Fp4Tensor:
        """Lift activations [M, in] -> [M, K']: values and scales are copied, none is computed.

        Raises:
            InputError: They have another size or format, or scales that do not line up.
        """
        if x.format != self.format or x.pairs.shape[1] != self.packed.shape[1]:
            got = f"{x.format.name} [{x.pairs.shape[0]}, {x.columns}]"
            raise InputError("activations", got=got, needed=f"{self.format.name} [M, {2 * self.packed.shape[1]}]")
        scale = lift_scale(x, self.packed.pattern, "activations")
        pairs = gather(x.pairs.view(torch.int8), _lifted_pairs(self.packed.pattern, self.format, x.pairs))
        return Fp4Tensor(self.format, pairs.view(torch.uint8), scale, x.tensor_scale, self.format.vector)


def pack_pairs(weight: Fp4Tensor, pattern: Pattern | str, *, name: str = "weight") -> PackedPairs:
    """Slide and compress an FP4 weight [out, in] over pairs; -0 counts as zero, and is packed as +0.

    Raises:
        PatternViolation: A group has more than ``keep`` pairs that are not zero. Nothing is ever dropped.
        InputError: The pattern is not uniform, or the scales do not line up with it.
    """
    pattern = _uniform(pattern)
    scale, codes = lift_scale(weight, pattern, name), unpack_bytes(weight.pairs)
    pairs = pack_bytes(torch.where(codes == SIGN, 0, codes)).view(torch.int8)
    try:
        packed = pack_segments(pairs, pattern, name=name)
    except PatternViolation as error:
        where = error.row, error.group, error.count, error.violations
        remedy = "prune it by pairs first (slidesparse.fp4.pair_mask)"
        raise PatternViolation(name, pattern, *where, unit="pairs that are not zero", remedy=remedy) from None
    return PackedPairs(weight.format, packed, scale, weight.tensor_scale)


def lift_scale(tensor: Fp4Tensor, pattern: Pattern | str, name: str = "weight") -> torch.Tensor:
    """Return the scale of every vector of lifted columns: [rows, vectors] in the format's type.

    Raises:
        InputError: A vector would need two scales. Nothing is rounded again to make it fit.
    """
    pattern, fp4 = _uniform(pattern), tensor.format
    if tensor.block != fp4.block:
        raise InputError(f"{name} is lifted already", needed=f"a scale for each {fp4.block} columns")
    source = _lifted_pairs(pattern, fp4, tensor.pairs)
    # Padding multiplies by zero. It takes the scale of the last column, so that it never asks for a second one.
    column = 2 * torch.where(source < 0, tensor.pairs.shape[1] - 1, source)
    bits = tensor.scale.view(torch.uint8)[:, column // tensor.block].unflatten(-1, (-1, fp4.vector // 2))
    scale = bits[..., 0]
    mixed = (bits != scale.unsqueeze(-1)).any(-1).nonzero()
    if len(mixed):
        row, vector = mixed[0].tolist()
        raise InputError(
            f"scales of {name} do not line up with {pattern} over pairs in {fp4.name}",
            got=f"several for the {fp4.vector} lifted columns of row {row}, vector {vector}",
            remedy=f"quantise with share={span(pattern, fp4).shared}",
        )
    lifted: torch.Tensor = scale.contiguous().view(fp4.scale_dtype)
    return lifted


def _uniform(pattern: Pattern | str) -> Pattern:
    """Return a pattern over pairs; a partial one moves its groups, so that no span is whole."""
    pattern = Pattern.parse(pattern)
    if not pattern.is_uniform:
        raise InputError("patterns over pairs are uniform", got=pattern, needed=f"one such as {pattern.uniform}")
    return pattern


def _lifted_pairs(pattern: Pattern, fp4: Fp4Format, pairs: torch.Tensor) -> torch.Tensor:
    """Return the column of ``pairs`` that feeds every lifted pair, -1 where none does: int64, whole vectors."""
    total = pairs.shape[1]
    groups = torch.arange(pattern.groups(total), device=pairs.device).view(-1, 1, 1) * pattern.group
    windows = torch.arange(pattern.windows, device=pairs.device).view(-1, 1) * STRIDE
    source = (groups + windows + torch.arange(WINDOW, device=pairs.device)).flatten()
    source = torch.where(source < total, source, -1)
    return F.pad(source, (0, -len(source) % (fp4.vector // 2)), value=-1)


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
    """Return ``x @ weight^T``: x [M, K], weight [out, K] -> [M, out], both as they are, or both lifted.

    Each number is an integer times a power of two, so the sum is exact in int64 while it fits. Hardware sums in
    float32, in an order of its own, and differs by roundings.

    Raises:
        InputError: The operands do not fit each other, or the sum may not fit into int64. That takes MXFP4 scales that
            differ by some 40 powers of two in all.
    """
    if x.format != weight.format or x.block != weight.block or x.columns != weight.columns:
        got, needed = (f"{t.format.name} [., {t.columns}] with a scale for {t.block} columns" for t in (x, weight))
        raise InputError("activations do not fit the weight", got=got, needed=needed)
    numbers, exponents = zip(*(_integers(tensor) for tensor in (x, weight)), strict=True)
    largest = x.columns
    for number in numbers:
        largest *= max(int(number.abs().max()), 1) if number.numel() else 1
    if largest >= 2**63:
        raise InputError("the exact sum may not fit into 63 bits", needed="scales closer to each other")
    scale = x.tensor_scale.to(torch.float64) * weight.tensor_scale.to(torch.float64)
    x_integers, w_integers = (number.to(torch.int64) for number in numbers)
    return ExactProduct(x_integers @ w_integers.T, sum(exponents), scale)


def _integers(tensor: Fp4Tensor) -> tuple[torch.Tensor, int]:
    """Return values times block scales as integers in float64 [rows, K], and the exponent of their unit.

    The unit is the largest power of two that divides all of them, so it does not depend on copies and zeros.
    """
    numbers = decode(unpack_bytes(tensor.pairs)) * by_column(tensor.block_scale(), tensor.block, tensor.columns)
    mantissa, exponent = torch.frexp(numbers[numbers != 0])
    bits = (mantissa * 2**MANTISSA_BITS).to(torch.int64)
    lowest = torch.frexp((bits & -bits).to(torch.float64)).exponent - 1 + exponent - MANTISSA_BITS
    unit = int(lowest.min()) if lowest.numel() else 0
    return numbers * 2.0**-unit, unit
