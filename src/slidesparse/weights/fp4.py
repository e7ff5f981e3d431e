"""FP4 as arithmetic: values of NVFP4 and MXFP4, patterns over pairs of them, their packing, and an exact product.

- **E2M1** (OCP Microscaling Formats 1.0, section 5.3.3): code ``c`` of 0 to 7 is the ``c``-th of :data:`MAGNITUDES`,
  bit 3 is the sign. There is no Inf and no NaN. Code 8 is -0: it is read, and never written.
- **NVFP4**: blocks of 16 with an E4M3 scale each, and one float32 scale a tensor. Source: NVIDIA, "Pretraining Large
  Language Models with NVFP4": ``tensor_scale = absmax(tensor) / (6 * 448)`` and
  ``scale = e4m3(absmax(block) / (6 * tensor_scale))``. It multiplies, as ModelOpt's ``weight_scale_2`` does.
- **MXFP4**: blocks of 32 with an E8M0 scale each, a power of two. Source: OCP MX 1.0, section 6.3:
  ``scale = 2^(floor(log2(absmax(block))) - 2)``, so the largest value of a block may saturate at 6.

Values are ``e2m1(x / (scale * tensor_scale))`` in both, rounded once. A product of the three factors has at most 30
significant bits, so float64 holds it exactly.

The sparse FP4 instructions of Blackwell keep two of four *pairs* (PTX ISA, "Sparse tcgen05.mma.sp with .kind::mxf4 and
.kind::mxf4nvf4": 4:8 pair-wise). A pair is one byte, and a byte slides as a weight does: the packed form is
:class:`weights.packed.PackedWeight` with bytes for weights, and its metadata are what the instructions read. Only the
scales are new. Nothing here runs on a GPU: ``docs/fp4.md`` says why, and draws which columns must share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm, prod
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from slidesparse.base.arguments import require_integer
from slidesparse.errors import InputError, PatternViolation
from slidesparse.weights.packed import PackedWeight, pack_segments
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import FLOATS, FP8_MAX
from slidesparse.weights.slide import gather, lift
from slidesparse.weights.support import check_weight, require_dense

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between code ``i`` and code ``i + 1``."""

MANTISSA_BITS = 8
"""Enough for an E2M1 value times an E4M3 scale, which has six."""

SIGN = 8
E8M0_BIAS, E8M0_NAN = 127, 255


class Fp4Format(NamedTuple):
    """How FP4 values share scales: one for each ``block`` of columns, of the type ``scale_dtype``; E8M0 as uint8 bits.

    A sparse instruction reads one for each ``vector`` of *lifted* columns, twice the block (CUTLASS,
    ``blackwell_functionality.md``, "SF Vector Size (Sparse)").
    """

    name: str
    block: int
    vector: int
    scale_dtype: torch.dtype


NVFP4 = Fp4Format("nvfp4", 16, 32, torch.float8_e4m3fn)
MXFP4 = Fp4Format("mxfp4", 32, 64, torch.uint8)


@dataclass(frozen=True)
class Fp4Tensor:
    """A matrix [rows, K] of FP4 values, ordinary or lifted.

    Attributes:
        format: NVFP4 or MXFP4.
        pairs: uint8 [rows, K / 2], two codes to a byte, the earlier column low, as in ``torch.float4_e2m1fn_x2``.
        scale: One for each block of a row: [rows, ceil(K / block)] in ``format.scale_dtype``.
        tensor_scale: Multiplies everything: float32 []. 1 for MXFP4.
        block: Columns that share a scale: ``format.block``, or ``format.vector`` after lifting.

    Raises:
        InputError: Shapes or types do not fit, or a scale is negative or NaN.
    """

    format: Fp4Format
    pairs: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor
    block: int

    def __post_init__(self) -> None:
        shapes = self.pairs.shape, (self.pairs.shape[0], -(-self.columns // self.block)), ()
        dtypes = torch.uint8, self.format.scale_dtype, torch.float32
        for part, shape, dtype in zip(("pairs", "scale", "tensor_scale"), shapes, dtypes, strict=True):
            tensor, name = getattr(self, part), f"{part} of a tensor in {self.format.name}"
            require_dense(tensor, name)
            if tensor.shape != shape or tensor.dtype != dtype:
                got = f"{tensor.dtype} {list(tensor.shape)}"
                raise InputError(name, got=got, needed=f"{dtype} {list(shape)}")
        exact = self.exact_scale()
        if not bool(((exact >= 0) & torch.isfinite(exact)).all()):
            raise InputError(f"scale of a tensor in {self.format.name}", needed="finite scales >= 0")

    @property
    def columns(self) -> int:
        """K."""
        return 2 * self.pairs.shape[1]

    def exact_scale(self) -> torch.Tensor:
        """Return ``scale * tensor_scale`` of every block, exactly: float64 like ``scale``."""
        return self.block_scale() * self.tensor_scale.to(torch.float64)

    def block_scale(self) -> torch.Tensor:
        """Return the scales of the blocks as numbers, without the tensor's: float64 like ``scale``."""
        if self.format.scale_dtype != torch.uint8:
            return self.scale.to(torch.float64)
        powers = torch.ldexp(torch.ones_like(self.scale, dtype=torch.float64), self.scale.to(torch.int64) - E8M0_BIAS)
        return torch.where(self.scale == E8M0_NAN, torch.nan, powers)

    def dequantize(self) -> torch.Tensor:
        """Return the numbers, exactly: float64 [rows, K]."""
        return decode(unpack_bytes(self.pairs)) * by_column(self.exact_scale(), self.block, self.columns)


def encode(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the codes nearest to ``x / scale``: finite x [...], scale >= 0 that broadcasts to it -> uint8 [...].

    Ties go to the even code, what is too large to 6. ``|x|`` is compared with ``midpoint * scale``, which float64 holds
    exactly, so each code is rounded once. What rounds to zero becomes +0, and so does everything under a scale of 0.

    >>> encode(torch.tensor([0.25, 0.75, -1.0, -0.1, 100.0]), torch.tensor(1.0)).tolist()
    [0, 2, 10, 0, 7]
    """
    unit, size = scale.to(torch.float64), x.to(torch.float64).abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for lower, midpoint in enumerate(MIDPOINTS):
        code += size > midpoint * unit if lower % 2 == 0 else size >= midpoint * unit
    code = torch.where(unit > 0, code, 0)
    return torch.where((x < 0) & (code != 0), code | SIGN, code)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes: uint8 [...], each 0 to 15 -> float64 like them; code 8 gives -0.0."""
    table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.float64, device=codes.device)
    return table[codes.long()]


def pack_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Return pairs of codes as bytes, the earlier column low: uint8 [..., K], K even -> uint8 [..., K / 2]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_bytes(pairs: torch.Tensor) -> torch.Tensor:
    """Return the codes of pairs: uint8 [..., n] -> uint8 [..., 2n]; the inverse of :func:`pack_bytes`."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


def quantize_fp4(x: torch.Tensor, fp4: Fp4Format, *, share: int | None = None, name: str = "weight") -> Fp4Tensor:
    """Quantise a matrix; zeros stay zeros.

    A block of NVFP4 whose absmax is at most ``2^-10 / 448`` of the whole tensor's gets the scale 0, and becomes zeros.

    Args:
        x: [rows, K], float32, bfloat16 or float16; K even. The last block of a row may be shorter.
        fp4: NVFP4 or MXFP4.
        share: Consecutive columns that get one scale, a multiple of the block; the block when None. Sliding needs
            ``span(pattern, fp4).shared``. The result is an ordinary tensor of the format: its scales repeat.
        name: The matrix's name in errors.

    Raises:
        InputError: The matrix or ``share`` is unusable.

    >>> quantize_fp4(torch.tensor([[1.0, -6.0, 0.0, 2.6]]), MXFP4).dequantize().tolist()
    [[1.0, -6.0, 0.0, 3.0]]
    """
    check_weight(x, name)
    if x.dtype not in FLOATS:
        raise InputError(f"{name} is quantised already", got=x.dtype, needed="bf16, fp16 or fp32")
    check_even(x, name)
    share = fp4.block if share is None else share
    require_integer(share, "columns that share a scale")
    if share < 1 or share % fp4.block:
        raise InputError("columns that share a scale", got=share, needed=f"a multiple of the block, {fp4.block}")
    wide, columns = x.to(torch.float32), x.shape[1]
    largest = F.pad(wide.abs(), (0, -columns % share)).unflatten(-1, (-1, share)).amax(-1)
    tensor_scale, scale = _mxfp4_scales(largest) if fp4.scale_dtype == torch.uint8 else _nvfp4_scales(largest)
    bits = scale.view(torch.uint8).repeat_interleave(share // fp4.block, -1)[:, : -(-columns // fp4.block)]
    scale = bits.contiguous().view(fp4.scale_dtype)
    empty = torch.zeros(len(x), columns // 2, dtype=torch.uint8, device=x.device)
    scaled = Fp4Tensor(fp4, empty, scale, tensor_scale, fp4.block)
    return replace(scaled, pairs=pack_bytes(encode(wide, by_column(scaled.exact_scale(), fp4.block, columns))))


def check_even(matrix: torch.Tensor, name: str) -> None:
    """Refuse a matrix whose columns do not come in pairs."""
    if matrix.shape[-1] % 2:
        raise InputError(f"columns of {name} do not come in pairs", got=matrix.shape[-1], needed="an even number")


def by_column(scale: torch.Tensor, block: int, columns: int) -> torch.Tensor:
    """Repeat the scale of every block for its columns: [rows, ceil(columns / block)] -> [rows, columns]."""
    return scale.repeat_interleave(block, -1)[:, :columns]


def _nvfp4_scales(size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor's scale, float32 [], and those of blocks of a given absmax, e4m3."""
    largest = size.max() if size.numel() else size.new_zeros(())
    # Not below the normal numbers, where the quotient would lose its bits, or be 0.
    tensor_scale = (largest / (MAGNITUDES[-1] * FP8_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = size.to(torch.float64) / (MAGNITUDES[-1] * tensor_scale.to(torch.float64))
    # The largest is 448, give or take a rounding of tensor_scale, and e4m3 rounds up to 464 to that.
    return tensor_scale, scale.to(torch.float32).to(torch.float8_e4m3fn)


def _mxfp4_scales(size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1 and the E8M0 bits of blocks of a given absmax; a block of zeros gets the smallest scale."""
    exponent = torch.frexp(size.to(torch.float64)).exponent - 1 - 2  # 2: E2M1's largest power of two is 4
    bits = (exponent + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    return size.new_ones(()), torch.where(size == 0, 0, bits).to(torch.uint8)


# -- patterns over pairs ----------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """The columns that sliding ties to one scale.

    Overlapping windows join the vectors of scales up to where a group and a vector end together. A block that crosses
    from one span into the next joins the two. ``columns`` are those of as many groups as lift to whole vectors;
    throughout ``shared`` the scales of an ordinary tensor must be equal: whole spans and whole blocks.
    """

    columns: int
    shared: int


def span(pattern: Pattern | str, fp4: Fp4Format) -> Span:
    """Return the span of a uniform pattern over pairs in a format.

    >>> from slidesparse.weights.fp4 import NVFP4
    >>> span("6:8", NVFP4)
    Span(columns=64, shared=64)
    """
    pattern = uniform(pattern)
    columns = lcm(2 * pattern.slid_group, fp4.vector) // pattern.slid_group * pattern.group
    return Span(columns, lcm(columns, fp4.block))


@dataclass(frozen=True)
class PackedPairs:
    """An FP4 weight [out, in], packed.

    ``packed`` has the pairs as int8: patterns, groups and windows are those of pairs. ``scale`` has one for each vector
    of lifted columns, [out, vectors] in the format's type; ``tensor_scale`` is float32 [].
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
        bits = self.scale.view(torch.uint8)[:, copies.int().argmax(1) // (self.format.vector // 2)].contiguous()
        scale = bits.view(self.format.scale_dtype)
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
    pattern = uniform(pattern)
    scale, codes = lift_scale(weight, pattern, name), unpack_bytes(weight.pairs)
    pairs = pack_bytes(torch.where(codes == SIGN, 0, codes)).view(torch.int8)
    try:
        packed = pack_segments(pairs, pattern, name=name)
    except PatternViolation as error:
        where = error.row, error.group, error.count, error.violations
        remedy = "prune it by pairs first (slidesparse.prune.mask.pair_mask)"
        raise PatternViolation(name, pattern, *where, unit="pairs that are not zero", remedy=remedy) from None
    return PackedPairs(weight.format, packed, scale, weight.tensor_scale)


def lift_scale(tensor: Fp4Tensor, pattern: Pattern | str, name: str = "weight") -> torch.Tensor:
    """Return the scale of every vector of lifted columns: [rows, vectors] in the format's type.

    Raises:
        InputError: A vector would need two scales. Nothing is rounded again to make it fit.
    """
    pattern, fp4 = uniform(pattern), tensor.format
    if tensor.block != fp4.block:
        raise InputError(f"{name} is lifted already", needed=f"a scale for each {fp4.block} columns")
    source = _lifted_pairs(pattern, fp4, tensor.pairs)
    # Padding multiplies by zero. It takes the scale of the last column, so that it never asks for a second one.
    column = 2 * torch.where(source < 0, tensor.pairs.shape[1] - 1, source)
    bits = tensor.scale.view(torch.uint8)[:, column // tensor.block].unflatten(-1, (-1, fp4.vector // 2))
    mixed = (bits != bits[..., :1]).any(-1).nonzero()
    if len(mixed):
        row, vector = mixed[0].tolist()
        raise InputError(
            f"scales of {name} do not line up with {pattern} over pairs in {fp4.name}",
            got=f"several for the {fp4.vector} lifted columns of row {row}, vector {vector}",
            remedy=f"quantise with share={span(pattern, fp4).shared}",
        )
    lifted: torch.Tensor = bits[..., 0].contiguous().view(fp4.scale_dtype)
    return lifted


def uniform(pattern: Pattern | str) -> Pattern:
    """Return a pattern over pairs; a partial one moves its groups, so that no span is whole."""
    pattern = Pattern.parse(pattern)
    if not pattern.is_uniform:
        raise InputError("patterns over pairs are uniform", got=pattern, needed=f"one such as {pattern.uniform}")
    return pattern


def _lifted_pairs(pattern: Pattern, fp4: Fp4Format, pairs: torch.Tensor) -> torch.Tensor:
    """Return the column of ``pairs`` that feeds every lifted pair, -1 where none does: int64, whole vectors."""
    numbers = torch.arange(1, pairs.shape[1] + 1, dtype=torch.float32, device=pairs.device)  # exact up to 2^24
    source = lift(numbers, pattern).to(torch.int64) - 1
    return F.pad(source, (0, -len(source) % (fp4.vector // 2)), value=-1)


class ExactProduct(NamedTuple):
    """``total * 2^exponent * tensor_scale``, exact: int64 [M, out], an exponent, and both tensor scales, float64 []."""

    total: torch.Tensor
    exponent: int
    tensor_scale: torch.Tensor


def product(x: Fp4Tensor, weight: Fp4Tensor) -> ExactProduct:
    """Return ``x @ weight^T``: x [M, K], weight [out, K] -> [M, out], both as they are, or both lifted.

    Each number is an integer times a power of two, so the sum is exact in int64 while it fits. Hardware sums in
    float32, in an order of its own, and differs by roundings.

    Raises:
        InputError: The operands do not fit each other, or the sum may not fit into int64, as where MXFP4 scales differ
            by some 40 powers of two in all.
    """
    if x.format != weight.format or x.block != weight.block or x.columns != weight.columns:
        got, needed = (f"{t.format.name} [., {t.columns}] with a scale for {t.block} columns" for t in (x, weight))
        raise InputError("activations do not fit the weight", got=got, needed=needed)
    (left, unit), (right, other_unit) = _integers(x), _integers(weight)
    largest = x.columns * prod(max(int(one.abs().max()), 1) if one.numel() else 1 for one in (left, right))
    if largest >= 2**63:
        raise InputError("the exact sum may not fit into 63 bits", needed="scales closer to each other")
    scale = x.tensor_scale.to(torch.float64) * weight.tensor_scale.to(torch.float64)
    return ExactProduct(left.to(torch.int64) @ right.to(torch.int64).T, unit + other_unit, scale)


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
