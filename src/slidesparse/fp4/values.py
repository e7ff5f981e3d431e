"""NVFP4 and MXFP4: E2M1 codes, two to a byte, in blocks along K that share a scale of 8 bits.

- **E2M1** (OCP Microscaling Formats 1.0, section 5.3.3): code ``c`` of 0 to 7 is the ``c``-th of :data:`MAGNITUDES`,
  bit 3 is the sign. There is no Inf and no NaN. Code 8 is -0: it is read, and never written.
- **NVFP4**: blocks of 16 with an E4M3 scale each, and one float32 scale a tensor. Source: NVIDIA, "Pretraining Large
  Language Models with NVFP4": ``tensor_scale = absmax(tensor) / (6 * 448)`` and
  ``scale = e4m3(absmax(block) / (6 * tensor_scale))``. It multiplies, as ModelOpt's ``weight_scale_2`` does.
- **MXFP4**: blocks of 32 with an E8M0 scale each, a power of two. Source: OCP MX 1.0, section 6.3:
  ``scale = 2^(floor(log2(absmax(block))) - 2)``, so the largest value of a block may saturate at 6.

Values are ``e2m1(x / (scale * tensor_scale))`` in both, rounded once. A product of the three factors has at most 30
significant bits, so float64 holds it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slidesparse.base.arguments import require_integer
from slidesparse.errors import InputError
from slidesparse.weights.quant import FLOATS, FP8_MAX
from slidesparse.weights.support import check_weight, require_dense

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between code ``i`` and code ``i + 1``."""

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
        pairs: Two codes to a byte, the earlier column in the low bits, as in ``torch.float4_e2m1fn_x2``: uint8
            [rows, K / 2].
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
    """Return the codes nearest to ``x / scale``, uint8 like ``x``; ties go to the even code, what is too large to 6.

    ``|x|`` is compared with ``midpoint * scale``, which float64 holds exactly, so each code is rounded once. What
    rounds to zero becomes +0, and so does everything under a scale of 0.

    Args:
        x: float [...], finite.
        scale: float64 >= 0, of a shape that broadcasts to that of ``x``.

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
        name: The matrix's name in error messages.

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
    codes = encode(wide, by_column(scaled.exact_scale(), fp4.block, columns))
    return Fp4Tensor(fp4, pack_bytes(codes), scale, tensor_scale, fp4.block)


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
