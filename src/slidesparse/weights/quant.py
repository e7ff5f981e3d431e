"""Symmetric 8-bit quantisation: weights per output channel, activations per token.

Activations follow the expressions of vLLM's kernels, or of SGLang's inside of SGLang: a sparse layer must give the
numbers of the dense layer that it replaces. With ``absmax`` over the row, all in float32:

- int8: stores ``absmax / 127``, quantises to ``rint(x * (127 / absmax))``; kernel ``dynamic_scaled_int8_quant`` in
  ``csrc/quantization/w8a8/int8/scaled_quant.cu``. SGLang's absmax is at least 1e-10, and its ties go away from zero;
  kernel ``_per_token_quant_int8`` in ``sglang/kernels/ops/quantization/int8_kernel.py``.
- float8_e4m3fn: stores ``scale = max(absmax / 448, 1 / (448 * 512))``, quantises to ``e4m3(clamp(x / scale, +-448))``;
  kernel ``dynamic_per_token_scaled_fp8_quant`` in ``csrc/quantization/w8a8/fp8/common.cu``. SGLang's scale has no
  least value, and it takes ``x * (1 / scale)``; ``per_token_quant_fp8``, in ``sglang/kernels`` or its ``sgl-kernel``.

All else is rounded to nearest, ties to even. A zero row gives zeros. Weights use vLLM's expressions on their rows.

On a GPU SGLang's divisions are approximate, two units in the last place off at most. Our kernels for it divide by the
same instruction in INT8, where they give its bits; here they are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch

from slidesparse.base.arguments import shown
from slidesparse.errors import InputError
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.support import check_weight

INT8_MAX = 127.0
FP8_MAX = 448.0
FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
SGLANG_MIN_ABSMAX = 1e-10
SMALLEST_NORMAL = 2.0**-126
TERNARY_MIN_SCALE = 1e-5
SIX_BIT_MAX = 31.0

ROWS_AT_ONCE = 1024
"""Rows of a weight that are quantised together, which limits the float32 copies."""

QuantName = Literal["int8", "fp8"]
QUANT_NAMES: tuple[QuantName, ...] = ("int8", "fp8")
"""Names of the types with scales."""

DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
"""Name in options -> storage type."""

QUANTISED = frozenset({torch.int8, torch.float8_e4m3fn})
"""Storage types with scales."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Types of weights and activations that are not quantised."""

ActivationRounding = Literal["vllm", "sglang"]
"""The server whose rounding of activations to 8 bits is reproduced."""

Rounding = Literal["absmax", "6bit"]
"""Rounding of weights, one scale a channel: to all values of their type, or INT8 to values of six bits."""


class Quantised(NamedTuple):
    """8-bit values and float32 scales [rows, 1]; ``values * scale`` are the numbers."""

    values: torch.Tensor
    scale: torch.Tensor


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the torch.dtype of ``"int8"``, ``"fp8"``, ``"bf16"``, ``"fp16"`` or ``"fp32"``; a torch.dtype passes.

    Raises:
        InputError: For any other name or type.
    """
    dtype = DTYPES.get(name) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        raise InputError(
            "unknown weight type",
            got=repr(name) if isinstance(name, torch.dtype) else shown(name),
            needed=f"one of {', '.join(DTYPES)}",
        )
    return dtype


def rounded_bits(rounding: Rounding, dtype: torch.dtype) -> int:
    """Return the bits that values of a type need after a rounding."""
    return 6 if rounding == "6bit" else 8 * dtype.itemsize


def rounding_of(rounding: Rounding, pattern: Pattern, common: Pattern) -> Rounding:
    """Return the rounding of a weight: a dense exception to its model's common pattern keeps all bits of its type."""
    return "absmax" if pattern == DENSE != common else rounding


def check_rounding(rounding: object, dtype: torch.dtype) -> None:
    """Raise an InputError for an unknown :data:`Rounding`, or one that a type does not have."""
    if not isinstance(rounding, str) or rounding not in get_args(Rounding):
        raise InputError("unknown rounding", got=shown(rounding), needed=" or ".join(get_args(Rounding)))
    if rounding == "6bit" and dtype != torch.int8:
        raise InputError("the 6bit rounding ends in INT8 storage", got=dtype_name(dtype), needed="int8")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type: the inverse of :func:`parse_dtype`."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype, activation_rounding: ActivationRounding = "vllm") -> Quantised:
    """Quantise every row with its own scale.

    Args:
        x: [..., K], float32, bfloat16 or float16. A row with NaN or Inf gets a scale that is NaN or Inf, so the fault
            stays visible.
        dtype: torch.int8 or torch.float8_e4m3fn.
        activation_rounding: The server whose expressions are used.

    Returns:
        values like ``x`` in ``dtype`` and scale float32 [..., 1].
    """
    wide = x.to(torch.float32)
    absmax = wide.abs().amax(-1, keepdim=True)
    # Both operands of a division are tensors: torch computes 127 / t as 127 * (1 / t), and t / 127 on a GPU as
    # t * (1 / 127). That rounds twice, and values at half of absmax would round to the other neighbour.
    if dtype == torch.int8 and activation_rounding == "sglang":
        values, scale = _to_integers(wide, absmax.clamp(min=SGLANG_MIN_ABSMAX), INT8_MAX, _ties_away)
        return Quantised(values.to(torch.int8), scale)
    if dtype == torch.int8:
        values, scale = _to_integers(wide, absmax, INT8_MAX)
        return Quantised(values.to(torch.int8), scale)
    if dtype == torch.float8_e4m3fn:
        scale = absmax / torch.full_like(absmax, FP8_MAX)
        if (
            activation_rounding == "sglang"
        ):  # of rows below 2^-117, which it may flush to zero, the inverse must stay finite
            units = wide * (torch.ones_like(scale) / scale.clamp(min=SMALLEST_NORMAL))
        else:
            scale = scale.clamp(min=FP8_MIN_SCALE)
            units = wide / scale
        return Quantised(units.clamp(-FP8_MAX, FP8_MAX).to(dtype), scale)
    raise InputError("cannot quantise to this type", got=dtype, needed="torch.int8 or torch.float8_e4m3fn")


def _to_integers(
    wide: torch.Tensor, absmax: torch.Tensor, most: float, rounded: Callable[[torch.Tensor], torch.Tensor] = torch.round
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers of float32 rows, ``-most - 1`` to ``most``, as floats, and the scales of the rows."""
    limit = torch.full_like(absmax, most)
    inverse = torch.where(absmax == 0, 0.0, limit / absmax)
    # 127 / absmax overflows for absmax < 3.8e-37: 0 * inf must stay 0, and inf saturates, as in the GPU's cvt.sat.
    return rounded(torch.nan_to_num(wide * inverse, nan=0.0)).clamp(-most - 1, most), absmax / limit


def _ties_away(x: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers to nearest, ties away from zero; every step is exact."""
    whole = x.trunc()
    return whole + (2 * (x - whole)).trunc()


def quantize_rows_to_six_bits(x: torch.Tensor) -> Quantised:
    """Quantise every row with its own scale to integers of six bits, stored as INT8 multiples of 4.

    Stores ``absmax / 31 / 4`` as float32 and ``4 * rint(x * (31 / absmax))``, which any program for INT8 weights reads.
    Multiples of 4 can be stored in six bits (:func:`slidesparse.weights.support.value_bits`).

    Args:
        x: [..., K], as for :func:`quantize_rows`.
    """
    wide = x.to(torch.float32)
    absmax = wide.abs().amax(-1, keepdim=True)
    values, scale = _to_integers(wide, absmax, SIX_BIT_MAX)
    return Quantised((4 * values).to(torch.int8), scale / 4)


def quantize_weight(
    weight: torch.Tensor, dtype: torch.dtype, *, name: str = "weight", rounding: Rounding = "absmax"
) -> Quantised:
    """Quantise a weight per output channel; zeros stay zeros.

    Args:
        weight: [out, in], bfloat16, float16 or float32.
        dtype: torch.int8 or torch.float8_e4m3fn.
        name: The weight's name in error messages.
        rounding: ``6bit`` rounds INT8 weights to six bits: :func:`quantize_rows_to_six_bits`.

    Raises:
        InputError: The weight is no float matrix, or holds NaN or Inf; the type has no such rounding.
    """
    check_rounding(rounding, dtype)
    check_weight(weight, name)
    if weight.dtype in QUANTISED:
        raise InputError(f"{name} is quantised already", got=weight.dtype, needed="bf16, fp16 or fp32")
    weight = weight.detach()  # a parameter's scales would join its graph, and keep a layer from being copied
    blocks = weight.split(ROWS_AT_ONCE)
    parts = [quantize_rows_to_six_bits(rows) if rounding == "6bit" else quantize_rows(rows, dtype) for rows in blocks]
    return Quantised(torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts]))


def loadable(weight: Quantised) -> Quantised:
    """Return a weight with zeros in rows whose scale underflows to 0."""
    lost = weight.scale == 0
    return Quantised(weight.values.masked_fill(lost, 0), weight.scale) if bool(lost.any()) else weight


def requantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a float32 weight [out, in] by a given scale, [out, 1] or [out], positive where rows are not zero.

    The exact inverse of :func:`dequantize`; to torch.int8 or torch.float8_e4m3fn.
    """
    scale = scale.reshape(-1, 1).to(torch.float32)
    units = torch.where(scale == 0, 0.0, weight / scale)
    if dtype == torch.int8:
        return units.round().clamp(-INT8_MAX - 1, INT8_MAX).to(dtype)
    return units.clamp(-FP8_MAX, FP8_MAX).to(dtype)


def ternary_scale(weight: torch.Tensor) -> torch.Tensor:
    """Return the absmean of a BitNet b1.58 master weight, ``max(mean |w|, 1e-5)``: float32 scalar."""
    return weight.to(torch.float32).abs().mean().clamp(min=TERNARY_MIN_SCALE)


def ternary_weight(
    weight: torch.Tensor, absmean: torch.Tensor, dtype: torch.dtype = torch.int8, *, name: str = "weight"
) -> Quantised:
    """Round a weight [out, in] to {-1, 0, 1} times one scale (BitNet b1.58, "absmean"), stored as INT8 {-4, 0, 4}.

    ``q = clamp(rint(w / absmean), -1, 1)``, the formula of transformers' ``BitLinear``. Products are those of q and
    absmean, bit for bit: ``4 q`` and ``absmean / 4`` are stored, since such values fit in six bits
    (:func:`slidesparse.weights.support.value_bits`). The scale, a float32 scalar, is that of the *trained* weight
    (:func:`ternary_scale`), since pruning shifts the mean.
    """
    check_weight(weight, name)
    if dtype != torch.int8:
        raise InputError("the ternary rounding ends in INT8 storage", got=dtype, needed="int8")
    values = 4 * (weight.to(torch.float32) / absmean).round().clamp(-1, 1).to(torch.int8)
    return Quantised(values, (absmean.to(torch.float32) / 4).expand(weight.shape[0], 1).contiguous())


def dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``values * scale`` in float32: values [rows, K], scale [rows, 1] or [rows] -> float32 [rows, K]."""
    return values.to(torch.float32) * scale.reshape(-1, 1).to(torch.float32)
