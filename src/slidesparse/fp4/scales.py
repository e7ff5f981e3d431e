"""NVFP4 and MXFP4: E2M1 values in blocks along K, each with a scale of 8 bits; quantised and read back.

- **NVFP4**: blocks of 16, an E4M3 scale each, and one float32 scale a tensor. Source: NVIDIA, "Pretraining Large
  Language Models with NVFP4", and vLLM's ``ref_nvfp4_quant``, which multiplies by reciprocals where this divides:
  ``tensor_scale = absmax(tensor) / (6 * 448)`` and ``scale = e4m3(absmax(block) / (6 * tensor_scale))``.
  ``tensor_scale`` multiplies, as ModelOpt's ``weight_scale_2`` does; compressed-tensors stores its inverse.
- **MXFP4**: blocks of 32, an E8M0 scale each, a power of two. Source: OCP MX 1.0, section 6.3:
  ``scale = 2^(floor(log2(absmax(block))) - 2)``, 2 being the exponent of 4, E2M1's largest power of two. So the
  largest value of a block, up to 8 scales, may saturate at 6.

Values are ``e2m1(x / (scale * tensor_scale))`` in both, rounded once. A product of the three factors has at most 30
significant bits, so float64 holds it, and :meth:`Fp4Tensor.dequantize` is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slidesparse.base.arguments import require_integer, shown
from slidesparse.errors import InputError
from slidesparse.fp4.e2m1 import MAGNITUDES, check_even, decode, encode, pack_bytes, unpack_bytes
from slidesparse.weights.quant import FP8_MAX
from slidesparse.weights.support import check_weight, require_dense

E8M0_BIAS = 127
E8M0_NAN = 255
LARGEST_EXPONENT = 2
"""Of E2M1: 4 is its largest power of two."""


@dataclass(frozen=True)
class Fp4Format:
    """How FP4 values share scales.

    Attributes:
        name: ``nvfp4`` or ``mxfp4``.
        block: Consecutive columns that share a scale in an ordinary tensor.
        vector: Consecutive *lifted* columns that share a scale in a sparse instruction, for either operand. It is
            twice the block, since a sparse instruction covers twice the columns with as many scales (CUTLASS,
            ``blackwell_functionality.md``, "SF Vector Size (Sparse)").
        scale_dtype: Type of the block scales; E8M0 is kept as its bits, in uint8.
    """

    name: str
    block: int
    vector: int
    scale_dtype: torch.dtype


NVFP4 = Fp4Format("nvfp4", 16, 32, torch.float8_e4m3fn)
MXFP4 = Fp4Format("mxfp4", 32, 64, torch.uint8)


@dataclass(frozen=True)
class Fp4Tensor:
    """A matrix [rows, K] of FP4 values, or one that was lifted.

    Attributes:
        format: NVFP4 or MXFP4.
        pairs: Two values to a byte, the earlier one in the low bits: uint8 [rows, K / 2].
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
        what = f"a tensor in {self.format.name}"
        for tensor, name in ((self.pairs, "pairs"), (self.scale, "scales"), (self.tensor_scale, "tensor scale")):
            require_dense(tensor, f"{name} of {what}")
        if self.pairs.dim() != 2 or self.pairs.dtype != torch.uint8 or not self.pairs.shape[1]:
            raise InputError(f"pairs of {what}", got=_form(self.pairs), needed="uint8 [rows, K / 2], K > 0")
        blocks = -(-self.columns // self.block)
        if self.scale.shape != (self.pairs.shape[0], blocks) or self.scale.dtype != self.format.scale_dtype:
            needed = f"{self.format.scale_dtype} [{self.pairs.shape[0]}, {blocks}]"
            raise InputError(f"scales of {what}", got=_form(self.scale), needed=needed)
        if self.tensor_scale.dtype != torch.float32 or self.tensor_scale.dim():
            raise InputError(f"tensor scale of {what}", got=_form(self.tensor_scale), needed="float32 []")
        exact = self.exact_scale()
        if not bool((exact >= 0).all()) or not bool(torch.isfinite(exact).all()):
            raise InputError(f"scales of {what}", got="a negative one, NaN or Inf", needed="finite scales >= 0")

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
        powers = [2.0 ** (bits - E8M0_BIAS) for bits in range(E8M0_NAN)] + [float("nan")]
        return torch.tensor(powers, dtype=torch.float64, device=self.scale.device)[self.scale.long()]

    def dequantize(self) -> torch.Tensor:
        """Return the numbers, exactly: float64 [rows, K]."""
        return decode(unpack_bytes(self.pairs)) * by_column(self.exact_scale(), self.block, self.columns)


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
    if not x.is_floating_point() or x.element_size() == 1:
        raise InputError(f"{name} is quantised already", got=x.dtype, needed="bf16, fp16 or fp32")
    check_even(x, f"columns of {name}")
    share = fp4.block if share is None else share
    require_integer(share, "columns that share a scale")
    if share < 1 or share % fp4.block:
        raise InputError(
            "columns that share a scale", got=shown(share), needed=f"a multiple of {fp4.name}'s block, {fp4.block}"
        )
    wide = x.to(torch.float32)
    size = F.pad(wide.abs(), (0, -x.shape[1] % share)).unflatten(-1, (-1, share)).amax(-1)
    tensor_scale, scale = _mxfp4_scales(size) if fp4.scale_dtype == torch.uint8 else _nvfp4_scales(size)
    blocks = -(-x.shape[1] // fp4.block)
    bits = scale.view(torch.uint8).repeat_interleave(share // fp4.block, -1)[:, :blocks].contiguous()
    empty = torch.zeros(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
    scaled = Fp4Tensor(fp4, empty, bits.view(fp4.scale_dtype), tensor_scale, fp4.block)
    codes = encode(wide, by_column(scaled.exact_scale(), fp4.block, x.shape[1]))
    return Fp4Tensor(fp4, pack_bytes(codes), scaled.scale, tensor_scale, fp4.block)


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
    exponent = torch.frexp(size.to(torch.float64)).exponent - 1 - LARGEST_EXPONENT
    bits = (exponent + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    return size.new_ones(()), torch.where(size == 0, 0, bits).to(torch.uint8)


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
