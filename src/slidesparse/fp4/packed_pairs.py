"""Prune, pack and lift over pairs: a pair of FP4 values is one byte, and a byte slides as a weight does.

The packed form is :class:`weights.packed.PackedWeight` with bytes for weights. Its metadata are two 2-bit positions
for each window of four pairs, which is what sparse FP4 instructions read (PTX ISA, "Sparse tcgen05.mma.sp with
.kind::mxf4 and .kind::mxf4nvf4", and "Sparse matrix storage" of ``mma.sp``). How the fragments of an instruction lie in
memory is a matter of its kernel, and is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slidesparse.errors import InputError, PatternViolation
from slidesparse.fp4.e2m1 import check_even, without_negative_zeros
from slidesparse.fp4.scales import Fp4Format, Fp4Tensor
from slidesparse.fp4.spans import lift_scale, lifted_pairs, require_unlifted, uniform, unlift_scale
from slidesparse.prune.mask import check_cost, cost_of, prune_masks
from slidesparse.weights.packed import PackedWeight, pack_segments
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.slide import gather
from slidesparse.weights.support import check_weight


def pair_mask(weight: torch.Tensor, pattern: Pattern | str, cost: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weights to keep, whole pairs: bool [out, in], at most ``keep`` pairs in every group of pairs.

    Removing a pair costs the sum of what removing its two weights costs.

    Args:
        weight: [out, in], any supported type, ``in`` even. Pairs are columns 2i and 2i + 1.
        pattern: Uniform, over pairs: 6:8 keeps 12 of 16 weights.
        cost: float32 [out, in], the cost of removing each weight; ``w^2`` (magnitude pruning) when None.

    Raises:
        InputError: Weight, pattern or cost is unusable.

    >>> w = torch.tensor([[4.0, 3, 0, 1, 5, 6, 7, 8]])
    >>> pair_mask(w, "2:4").int().tolist()
    [[0, 0, 0, 0, 1, 1, 1, 1]]
    """
    check_weight(weight)
    check_even(weight, "columns of weight")
    cost = cost_of(weight, cost)
    check_cost(cost)
    of_pairs = cost.to(torch.float64).unflatten(-1, (-1, 2)).sum(-1)
    # Two huge costs may pass what float32 holds. They tie then, and neither is cheap.
    (mask,) = prune_masks([of_pairs.clamp(max=torch.finfo(torch.float32).max)], uniform(pattern))
    return mask.repeat_interleave(2, -1)


@dataclass(frozen=True)
class PackedPairs:
    """An FP4 weight [out, in], packed.

    Attributes:
        format: NVFP4 or MXFP4.
        packed: The pairs, as int8: patterns, groups and windows of it are those of pairs.
        scale: One for each vector of lifted columns: [out, vectors] in the format's type.
        tensor_scale: float32 [].
    """

    format: Fp4Format
    packed: PackedWeight
    scale: torch.Tensor
    tensor_scale: torch.Tensor

    @property
    def pattern(self) -> Pattern:
        """The pattern over pairs."""
        return self.packed.pattern

    @property
    def n_bytes(self) -> int:
        """Bytes of values, metadata (two bits a kept pair) and scales, without the tensor's."""
        return self.packed.n_bytes + self.scale.numel()

    def unpack(self) -> Fp4Tensor:
        """Return the weight, bit for bit except for the sign of zeros: the inverse of :func:`pack_pairs`."""
        pairs = self.packed.unpack().view(torch.uint8)
        scale = unlift_scale(self.scale, self.pattern, self.format, 2 * pairs.shape[1])
        return Fp4Tensor(self.format, pairs, scale, self.tensor_scale, self.format.block)

    def metadata(self) -> torch.Tensor:
        """Return the metadata nibble of every window of four pairs: uint8 [out, windows]."""
        nibbles = self.packed.metadata()
        assert nibbles is not None  # the pattern is uniform, so there is a 2:4 segment
        return nibbles

    def operand(self) -> Fp4Tensor:
        """Return the slid weight, zeros in place, which multiplies lifted activations: [out, K']."""
        pairs = self.packed.columns().view(torch.uint8)
        pairs = torch.nn.functional.pad(pairs, (0, -pairs.shape[1] % (self.format.vector // 2)))
        return Fp4Tensor(self.format, pairs, self.scale, self.tensor_scale, self.format.vector)

    def lift(self, x: Fp4Tensor) -> Fp4Tensor:
        """Lift activations [M, in] -> [M, K']: values and scales are copied, none is computed.

        Raises:
            InputError: They have another size or format, or scales that do not line up.
        """
        require_unlifted(x, "activations")
        if x.format != self.format or x.pairs.shape[1] != self.packed.shape[1]:
            got = f"{x.format.name} [{x.pairs.shape[0]}, {x.columns}]"
            raise InputError("activations", got=got, needed=f"{self.format.name} [M, {2 * self.packed.shape[1]}]")
        scale = lift_scale(x, self.pattern, "activations")
        source = lifted_pairs(self.pattern, self.format, x.pairs.shape[1]).to(x.pairs.device)
        pairs = gather(x.pairs.view(torch.int8), source).view(torch.uint8)
        return Fp4Tensor(self.format, pairs, scale, x.tensor_scale, self.format.vector)


def pack_pairs(weight: Fp4Tensor, pattern: Pattern | str, *, name: str = "weight") -> PackedPairs:
    """Slide and compress an FP4 weight over pairs.

    Args:
        weight: [out, in], zeros in place; -0 counts as zero, and is packed as +0.
        pattern: Uniform, over pairs.
        name: The weight's name in error messages.

    Raises:
        PatternViolation: A group has more than ``keep`` pairs that are not zero. Nothing is ever dropped.
        InputError: The pattern is not uniform, or the scales do not line up with it.
    """
    pattern = uniform(pattern)
    scale = lift_scale(weight, pattern, name)
    pairs = without_negative_zeros(weight.pairs).view(torch.int8)
    try:
        packed = pack_segments(pairs, pattern, name=name)
    except PatternViolation as error:
        raise PatternViolation(
            name,
            pattern,
            error.row,
            error.group,
            error.count,
            error.violations,
            unit="pairs that are not zero",
            remedy="prune it by pairs first (slidesparse.fp4.pair_mask)",
        ) from None
    return PackedPairs(weight.format, packed, scale, weight.tensor_scale)
