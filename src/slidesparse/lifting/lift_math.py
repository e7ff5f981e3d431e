"""The arithmetic of a row, and the offsets of its output, for both quantise-and-lift kernels."""

from __future__ import annotations

import re

import triton
import triton.language as tl

from slidesparse.lifting.layout import BUNDLE_STRIDE, CHUNK_BYTES, SLAB_BYTES
from slidesparse.weights.quant import FP8_MAX, FP8_MIN_SCALE, INT8_MAX, SGLANG_MIN_ABSMAX, SMALLEST_NORMAL

_INT8_MAX = tl.constexpr(INT8_MAX)
_FP8_MAX = tl.constexpr(FP8_MAX)
_FP8_MIN_SCALE = tl.constexpr(FP8_MIN_SCALE)
_SGLANG_MIN_ABSMAX = tl.constexpr(SGLANG_MIN_ABSMAX)
_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)
_SLAB_BYTES = tl.constexpr(SLAB_BYTES)
_CHUNK_BYTES = tl.constexpr(CHUNK_BYTES)
_STRIDE = tl.constexpr(BUNDLE_STRIDE)


def ties_away(to_int8: str) -> str:
    """Return the PTX ``to_int8``, which rounds ties to even, with ties away from zero.

    Half is added with the sign of the number, and both roundings are towards zero, as in libdevice's ``round``: a sum
    to nearest would bring the number below 0.5 to 1.
    """
    away = r"copysign.f32 h, \2, 0f3F000000; add.rz.f32 h, \2, h; cvt.rzi.s32.f32 \1, h;"
    return re.sub(r"cvt\.rni\.s32\.f32 (\w), (\$\d);", away, to_int8.replace("{", "{ .reg .f32 h;", 1))


@triton.jit
def begin(P: tl.constexpr):
    """Begin a program under programmatic dependent launch (PTX ISA, "griddepcontrol").

    It waits for the end of the kernel before, and then allows the kernel after it to start, which has weights to fetch.
    In this order everything written before this kernel is visible to the kernel after it.
    """
    if P.early:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) to about 2^-22: five instructions, where Triton's exp and division take twice as many.

    Below 2^-126 the result is 0.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;"  # the constant is -log2(e)
        " add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def silu_times(gate, up):
    """Return ``silu(gate) * up``, rounded to the row's type at the end."""
    wide = gate.to(tl.float32)
    return (wide * _sigmoid(wide) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def add(x, residual):
    """Return the sum in float32."""
    return x.to(tl.float32) + residual.to(tl.float32)


@triton.jit
def normed(x, weight, rstd, P: tl.constexpr):
    """Return ``x * rstd * weight``, or with ``weight + 1``, rounded to the weight's type at the end."""
    wide = weight.to(tl.float32)
    if P.offsets:
        wide += 1.0
    return (x.to(tl.float32) * rstd * wide).to(weight.dtype)


@triton.jit
def rstd_of(squares, eps, P: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of a row, from squares that are yet to be summed."""
    mean = tl.div_rn(tl.sum(squares), P.in_features * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def row_scale(absmax, P: tl.constexpr):
    """Return the scale of a row and its inverse, as :func:`weights.quant.quantize_rows` defines them."""
    if P.activation_rounding == "sglang":  # whose divisions are Triton's own, too, which are approximate
        if P.quant == "int8":
            absmax = tl.maximum(absmax, _SGLANG_MIN_ABSMAX, propagate_nan=tl.PropagateNan.ALL)
            scale = absmax / _INT8_MAX
            inverse = _INT8_MAX / absmax
        else:
            scale = absmax / _FP8_MAX
            inverse = 1.0 / tl.maximum(scale, _SMALLEST_NORMAL, propagate_nan=tl.PropagateNan.ALL)
    elif P.quant == "int8":
        scale = tl.div_rn(absmax, _INT8_MAX)
        inverse = tl.where(absmax == 0.0, 0.0, tl.div_rn(_INT8_MAX, absmax))
    else:
        scale = tl.maximum(tl.div_rn(absmax, _FP8_MAX), _FP8_MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)
        inverse = tl.div_rn(1.0, scale)
    return scale, inverse


@triton.jit
def quotient(value, scale, inverse, P: tl.constexpr):
    """Return the float32 number to round to 8 bits: ``value * inverse``, or ``value / scale`` for vLLM's FP8."""
    wide = value.to(tl.float32)
    result = wide * inverse
    if P.quant == "fp8" and P.activation_rounding == "vllm":
        # With the inverse, one correction gives the IEEE quotient. Checked for all 2^23 significands of the
        # scale at every boundary between two e4m3 numbers. The signs are arranged so that -0 stays -0 (Triton's unary
        # minus is 0 - x, which would lose it).
        result = tl.fma(tl.fma(result, scale, wide * -1.0), -inverse, result)
    return result


@triton.jit
def largest_of(magnitudes):
    """Return the largest magnitude, NaN if one is: a float32 scalar.

    As integers, non-negative floats keep their order and NaN is the largest, so an integer reduction suffices.
    """
    return tl.max(magnitudes.to(tl.float32).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def first_pair(window, P: tl.constexpr):
    """Return the first pair of columns of windows, counted from the start of the first group."""
    if P.bundle == 1:
        pair = window // (P.half - 1) * P.half + window % (P.half - 1)
    else:
        FAR: tl.constexpr = P.bundle // _STRIDE
        slab = window // P.bundle
        group = slab // (P.half - 1) * P.bundle + window % FAR * _STRIDE + window % P.bundle // FAR
        pair = group * P.half + slab % (P.half - 1)
    return pair


@triton.jit
def offset_of_row(row, ITEM: tl.constexpr, P: tl.constexpr):
    """Return the offset of a row in the output, in items of ITEM bytes, 64 bits wide."""
    ROW_BYTES: tl.constexpr = _SLAB_BYTES if P.slabs else P.k_packed * P.itemsize
    return row * (ROW_BYTES // ITEM)


@triton.jit
def offset_in_row(start, step, row, rows, ITEM: tl.constexpr, P: tl.constexpr):
    """Return the offsets of the items ``start + step`` of a row, of ITEM bytes each, from the row's own start.

    A slab of ``rows`` rows begins at ``start``; terms of ``step`` alone are computed once for all starts.
    """
    if not P.slabs:
        at = start + step
    else:
        SLAB: tl.constexpr = _SLAB_BYTES // ITEM
        CHUNK: tl.constexpr = _CHUNK_BYTES // ITEM
        chunk = step % SLAB // CHUNK ^ (row % 8).to(tl.int32)
        pitch = rows.to(tl.int64) * SLAB
        at = step // SLAB * pitch + chunk * CHUNK + step % CHUNK
        at = tl.max_contiguous(tl.multiple_of(at, CHUNK), CHUNK)  # the exclusive or hides this
        at += start // SLAB * pitch
    return at
