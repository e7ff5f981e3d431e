"""The kernel that walks along rows of any length: lifts without quantisation, and rows too long for registers.

One pass sums squares for a norm, one finds the largest magnitude, and one writes. The first reads from memory, the
others find the row in L1 or L2 (:mod:`slidesparse.lifting.launch` sees to it). The last pass walks along the *output*:
a column that two windows share is read and quantised twice, and nothing moves between lanes::

    6:8     in    |0 1 2 3 4 5 6 7|                 loads of 4 bytes (16-bit types): a window starts at an even column
            out   |0 1 2 3|2 3 4 5|4 5 6 7|         stores of 16 bytes, neighbouring lanes at neighbouring places

The compiler derives the width of an access from these indices, so odd sizes and unaligned rows need no code of their
own: they are only slower. Every byte of the output, padding included, is written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slidesparse.lifting.lift_math import (
    add,
    begin,
    first_pair,
    largest_of,
    normed,
    offset_in_row,
    offset_of_row,
    quotient,
    row_scale,
    rstd_of,
    silu_times,
    ties_away,
)

# To nearest even, NaN to 0, saturated: the conversion of vLLM's kernel; and that of SGLang's.
_TO_INT8 = tl.constexpr(
    "{ .reg .s32 a, b, c, d; cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $2; cvt.rni.s32.f32 c, $3;"
    " cvt.rni.s32.f32 d, $4; cvt.pack.sat.s8.s32.b32 c, d, c, 0; cvt.pack.sat.s8.s32.b32 $0, b, a, c; }"
)
_TO_INT8_AWAY = tl.constexpr(ties_away(_TO_INT8.value))
# Lifting stores a pair twice: in the high half of one word and in the low half of the next. Where both halves convert a
# pair the same way, ptxas computes it once and, on an H200, wrote wrong bytes into the high half (it merges the halves
# inside F2FP). So the high half converts its pair in the other order, and a byte permutation puts it right: nothing is
# left to share. test_every_pattern_on_the_gpu would notice.
_TO_E4M3 = tl.constexpr(
    "{ .reg .b16 low, high; .reg .b32 l, h; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 high, $3, $4; cvt.u32.u16 l, low; cvt.u32.u16 h, high;"
    " prmt.b32 $0, l, h, 0x4510; }"
)


@triton.jit
def _source(start, P: tl.constexpr):
    """Return the input columns of a step [WRITE]; outside 0 .. K-1 for padding."""
    window = start // 4 + tl.arange(0, P.write // 4)
    leading = first_pair(window, P) * 2 - P.k_offset
    column = tl.reshape(leading[:, None] + tl.arange(0, 4)[None, :], (P.write,))
    # The compiler does not follow indices through a reshape: pairs of columns are pairs of the input as well.
    PAIR: tl.constexpr = 2 - P.k_offset % 2
    return tl.max_contiguous(tl.multiple_of(column, PAIR), PAIR)


@triton.jit
def _inside(column, P: tl.constexpr):
    """Return a mask of the columns that exist."""
    inside = column < P.in_features
    if P.k_offset > 0:
        inside = inside & (column >= 0)
    return inside


@triton.jit
def _value(x_ptr, residual_ptr, norm_weight_ptr, column, inside, rstd, P: tl.constexpr):
    """Load columns and apply the prologue: values in the row's type, 0 past its ends."""
    value = tl.load(x_ptr + column, mask=inside, other=0.0)
    if P.adds:
        value = add(value, tl.load(residual_ptr + column, mask=inside, other=0.0))
    if P.prologue == "silu_mul":
        value = silu_times(value, tl.load(x_ptr + P.in_features + column, mask=inside, other=0.0))
    if P.norms:
        value = normed(value, tl.load(norm_weight_ptr + column, mask=inside, other=0.0), rstd, P)
    return value


@triton.jit
def _rstd(x_ptr, residual_ptr, residual_out_ptr, eps, P: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of a row, or of its sum with the residual, which is written."""
    squares = tl.full((P.read,), 0.0, tl.float32)
    for start in range(0, P.in_features, P.read):
        column = start + tl.arange(0, P.read)
        inside = column < P.in_features
        value = tl.load(x_ptr + column, mask=inside, other=0.0)
        if P.adds:
            value = add(value, tl.load(residual_ptr + column, mask=inside, other=0.0))
            tl.store(residual_out_ptr + column, value.to(residual_out_ptr.dtype.element_ty), mask=inside)
        squares += value.to(tl.float32) * value.to(tl.float32)
    return rstd_of(squares, eps, P)


@triton.jit
def _absmax(x_ptr, residual_ptr, norm_weight_ptr, rstd, P: tl.constexpr):
    """Return the largest magnitude of a row, NaN if it has one: a scalar."""
    largest = tl.full((P.read,), 0.0, tl.float32)
    for start in range(0, P.in_features, P.read):
        column = start + tl.arange(0, P.read)
        value = _value(x_ptr, residual_ptr, norm_weight_ptr, column, column < P.in_features, rstd, P)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    return largest_of(largest)


@triton.jit
def _quantise(value, scale, inverse, P: tl.constexpr):
    """Round to 8 bits, four columns to a 32-bit register."""
    wide = quotient(value, scale, inverse, P)
    TO_INT8: tl.constexpr = _TO_INT8_AWAY if P.activation_rounding == "sglang" else _TO_INT8
    TO_BYTES: tl.constexpr = TO_INT8 if P.quant == "int8" else _TO_E4M3
    return tl.inline_asm_elementwise(TO_BYTES, "=r,f,f,f,f", [wide], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _write(x_ptr, residual_ptr, norm_weight_ptr, out_ptr, row, rstd, scale, inverse, P: tl.constexpr):
    """Quantise, lift and write a row."""
    for start in range(0, P.k_packed, P.write):
        step = tl.arange(0, P.write)
        column = _source(start, P)
        value = _value(x_ptr, residual_ptr, norm_weight_ptr, column, _inside(column, P), rstd, P)
        if P.quant != "none":
            value = _quantise(value, scale, inverse, P)
        at = offset_in_row(start, step, row, tl.num_programs(0), P.itemsize, P)
        tl.store(out_ptr + at, value, mask=start + step < P.k_packed)


@triton.jit(do_not_specialize=["tokens"])
def walking_kernel(
    x_ptr,
    residual_ptr,
    residual_out_ptr,
    norm_weight_ptr,
    out_ptr,
    scales_ptr,
    tokens,
    x_stride,
    residual_stride,
    eps,
    P: tl.constexpr,
):
    """Quantise and lift one row a program; see the top of this file.

    Where slabs are padded, programs past the last row repeat it.
    """
    begin(P)
    row = tl.program_id(0).to(tl.int64)
    token = tl.minimum(row, tokens - 1)
    x_ptr += token * x_stride
    if P.adds:
        residual_ptr += token * residual_stride
        residual_out_ptr += token * P.in_features
    out_ptr += offset_of_row(row, P.itemsize, P)
    rstd = 1.0
    scale = 1.0
    inverse = 1.0
    if P.norms:
        rstd = _rstd(x_ptr, residual_ptr, residual_out_ptr, eps, P)
    if P.quant != "none":
        scale, inverse = row_scale(_absmax(x_ptr, residual_ptr, norm_weight_ptr, rstd, P), P)
        tl.store(scales_ptr + token, scale)
    _write(x_ptr, residual_ptr, norm_weight_ptr, out_ptr, row, rstd, scale, inverse, P)
