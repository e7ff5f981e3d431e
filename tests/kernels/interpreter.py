"""What Triton's interpreter lacks, so that kernels run on a CPU with the numbers that a GPU gives.

As of Triton 3.6 it truncates where a GPU rounds to nearest even, has no fused multiply-add, and no inline PTX. Each is
replaced by its definition: the conversions by torch's, the fused multiply-add by one with exact products, and each
instruction that our kernels use by what the PTX ISA says of it. It also makes integers of a comparison of two numbers
that meets a block, and as of 3.9 loads and stores refuse them as a mask: comparisons stay of one bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH = {tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32}
BITS = {tl.bfloat16: np.uint16, tl.float16: np.uint16, tl.float32: np.uint32}

Array = npt.NDArray[np.generic]


def convert_float(data: Array, source: tl.dtype, target: tl.dtype, rounding: object = None) -> Array:
    """Between float types, to nearest even; bits in and bits out."""
    bits = np.ascontiguousarray(data).view(BITS[source])
    torch_view = torch.from_numpy(bits.view(bits.dtype.str.replace("u", "i")).copy()).view(TORCH[source])
    converted = torch_view.to(TORCH[target])
    signed = converted.view({2: torch.int16, 4: torch.int32}[converted.element_size()])
    return signed.numpy().view(BITS[target]).reshape(data.shape)


def fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """``x * y + z`` of float32 with one rounding: 80 bits hold every product and nearly every sum."""
    return (x.astype(np.longdouble) * y.astype(np.longdouble) + z.astype(np.longdouble)).astype(np.float32)


def to_int8(value: Array) -> Array:
    """cvt.rni.s32.f32 (to nearest even, NaN to 0, saturating), then cvt.pack.sat.s8.s32.b32."""
    rounded = np.rint(np.nan_to_num(value.astype(np.float64), nan=0.0, posinf=1e9, neginf=-1e9))
    return np.clip(rounded, -128, 127).astype(np.int8)


def to_int8_away(value: Array) -> Array:
    """copysign, add.rz.f32 and cvt.rzi.s32.f32: no integer lies between a sum and what it is rounded to, so exactly."""
    wide = np.nan_to_num(value.astype(np.float64), nan=0.0, posinf=1e9, neginf=-1e9)
    return np.clip(np.trunc(wide + np.copysign(0.5, wide)), -128, 127).astype(np.int8)


def to_fp8(value: Array) -> Array:
    """cvt.rn.satfinite.e4m3x2.f32: to nearest even, magnitudes above 448 to 448."""
    clamped = torch.from_numpy(np.ascontiguousarray(value)).clamp(-448.0, 448.0)
    return clamped.to(torch.float8_e4m3fn).view(torch.int8).numpy()


def sigmoid(value: Array) -> Array:
    """mul, ex2.approx, add, rcp.approx: each within an ulp or two of the nearest number."""
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-value))


def pairs(convert: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Two columns in 16 bits, the first in the low byte."""
    return lambda low, high: (convert(low).view(np.uint8) | convert(high).view(np.uint8).astype(np.uint16) << 8).view(
        np.int16
    )


def larger_magnitude(largest: Array, value: Array) -> Array:
    """and with 0x7FFF, then max.NaN of two 16-bit floats that are not negative: the larger bits, a NaN's above all."""
    return np.maximum(largest.view(np.uint16), value.view(np.uint16) & 0x7FFF).view(largest.dtype)


INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "add.rz.f32 h, $2, h; cvt.rzi.s32.f32 c, h;": pairs(to_int8_away),
    "add.rz.f32 h, $2, h; cvt.rzi.s32.f32 b, h;": to_int8_away,
    "cvt.rni.s32.f32 c, $2;": pairs(to_int8),
    "cvt.rn.satfinite.e4m3x2.f32 a, $3, $1": pairs(to_fp8),
    "max.NaN.bf16x2": larger_magnitude,
    "max.NaN.f16x2": larger_magnitude,
    "cvt.pack.sat.s8.s32.b32 $0, b, a, c": to_int8,
    "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1": to_fp8,
    "rcp.approx.ftz.f32 $0, e": sigmoid,
}
"""A part of inline PTX that no other has -> what it computes, of each element on its own."""


def complete() -> None:
    """Patch the interpreter."""
    builder = interpreter.InterpreterBuilder

    def inline_asm(
        self: object, asm: str, constraints: str, values: list, types: list, pure: bool, pack: int
    ) -> object:
        meaning = next(function for text, function in INSTRUCTIONS.items() if text in asm)
        result = interpreter.TensorHandle(meaning(*(value.data for value in values)), types[0].scalar)
        return _Call(result)

    class _Call:
        def __init__(self, result: object) -> None:
            self.result = result

        def get_result(self, index: int) -> object:
            return self.result

    def fma(self: object, x: object, y: object, z: object) -> object:
        return interpreter.TensorHandle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    splat = builder.create_splat

    def create_splat(self: object, block: tl.block_type, number: object) -> object:
        if number.data.dtype == np.bool_:
            return interpreter.TensorHandle(np.full(block.shape, number.data), tl.int1)
        return splat(self, block, number)

    interpreter._convert_float = convert_float
    builder.create_splat = create_splat
    builder.create_inline_asm = inline_asm
    builder.create_fma = fma
