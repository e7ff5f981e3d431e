"""The kernel for rows that stay in registers: it reads every input once, and quantises every column once.

A program keeps one row in chunks, of which a lane has 8 neighbouring columns. When the scale is known, the columns are
rounded to 8 bits, two in 16 bits, and go through shared memory, where lifting is a gather of such pairs::

    6:8     row     |01 23 45 67|                   a lane rounds eight columns to four pairs
            packed  |01 23|23 45|45 67|             a window is two pairs; a lane gathers eight and stores 16 bytes

It issues 14 instructions a column where the other kernel (:mod:`slidesparse.lifting.walking`) needs 30. It needs pairs
that stay pairs (an even ``k_offset``) and a row that fits (:attr:`slidesparse.lifting.variant.LiftVariant.resident`).
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

_LARGER_BF16 = tl.constexpr("{ .reg .b32 m; and.b32 m, $2, 0x7FFF7FFF; max.NaN.bf16x2 $0, $1, m; }")
_LARGER_F16 = tl.constexpr("{ .reg .b32 m; and.b32 m, $2, 0x7FFF7FFF; max.NaN.f16x2 $0, $1, m; }")

# To nearest even, NaN to 0, saturated: the conversion of vLLM's kernel; and that of SGLang's.
_TO_INT8 = tl.constexpr(
    "{ .reg .s32 a, b, c, d; cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $3; cvt.rni.s32.f32 c, $2;"
    " cvt.rni.s32.f32 d, $4; cvt.pack.sat.s8.s32.b32 c, d, c, 0; cvt.pack.sat.s8.s32.b32 $0, b, a, c; }"
)
_TO_INT8_AWAY = tl.constexpr(ties_away(_TO_INT8.value))
_TO_E4M3 = tl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $2;"
    " mov.b32 $0, {a, b}; }"
)


@triton.jit
def _load(x_ptr, chunk, P: tl.constexpr):
    """Load the columns of a chunk [READ], 0 past the end of the row."""
    column = chunk * P.read + tl.arange(0, P.read)
    if (chunk + 1) * P.read > P.in_features:
        value = tl.load(x_ptr + column, mask=column < P.in_features, other=0.0)
    else:
        value = tl.load(x_ptr + column)
    return value


@triton.jit
def _hold(x_ptr, residual_ptr, residual_out_ptr, norm_weight_ptr, eps, P: tl.constexpr):
    """Load a row and apply the prologue: a tuple of chunks [READ] in the row's type."""
    row = ()
    squares = tl.full((P.read,), 0.0, tl.float32)
    CHUNKS: tl.constexpr = P.chunks
    for chunk in tl.static_range(0, CHUNKS):
        value = _load(x_ptr, chunk, P)
        if P.prologue == "silu_mul":
            value = silu_times(value, _load(x_ptr + P.in_features, chunk, P))
        if P.adds:
            value = add(value, _load(residual_ptr, chunk, P))
            column = chunk * P.read + tl.arange(0, P.read)
            tl.store(
                residual_out_ptr + column, value.to(residual_out_ptr.dtype.element_ty), mask=column < P.in_features
            )
        if P.norms:
            squares += value.to(tl.float32) * value.to(tl.float32)
        row = row + (value,)
    if P.norms:
        rstd = rstd_of(squares, eps, P)
        held = row
        row = ()
        for chunk in tl.static_range(0, CHUNKS):
            row = row + (normed(held[chunk], _load(norm_weight_ptr, chunk, P), rstd, P),)
    return row


@triton.jit
def _larger(largest, value):
    """Return the larger of ``largest`` (not negative) and the magnitude of ``value``; NaN if one of them is NaN."""
    if value.dtype == tl.bfloat16:
        largest = tl.inline_asm_elementwise(
            _LARGER_BF16, "=r,r,r", [largest, value], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif value.dtype == tl.float16:
        largest = tl.inline_asm_elementwise(
            _LARGER_F16, "=r,r,r", [largest, value], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        largest = tl.maximum(largest, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
    return largest


@triton.jit
def _absmax(row, P: tl.constexpr):
    """Return the largest magnitude of a row, NaN if it has one: a float32 scalar."""
    largest = tl.full((P.read,), 0.0, row[0].dtype)
    for chunk in tl.static_range(0, len(row)):
        largest = _larger(largest, row[chunk])
    return largest_of(largest)


@triton.jit
def _round(wide, P: tl.constexpr):
    """Round to 8 bits: float32 [READ] -> pairs of columns, the first one in the low byte, int16 [READ / 2]."""
    low, high = tl.split(tl.reshape(wide, (P.read // 2, 2)))
    TO_INT8: tl.constexpr = _TO_INT8_AWAY if P.activation_rounding == "sglang" else _TO_INT8
    TO_BYTES: tl.constexpr = TO_INT8 if P.quant == "int8" else _TO_E4M3
    return tl.inline_asm_elementwise(TO_BYTES, "=r,f,f,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def _quantise(row, scale, inverse, P: tl.constexpr):
    """Round all columns of a row, as pairs: a tuple of chunks, int16 [READ / 2]."""
    pairs = ()
    for chunk in tl.static_range(0, len(row)):
        pairs = pairs + (_round(quotient(row[chunk], scale, inverse, P), P),)
    return pairs


@triton.jit
def _in_order(pairs, FROM: tl.constexpr, COUNT: tl.constexpr, NEAR: tl.constexpr, P: tl.constexpr):
    """Join COUNT chunks of a row in order, padded to SLOTS, a power of two: int16 [SLOTS * READ / 2]."""
    HALF: tl.constexpr = P.read // 2
    SLOTS: tl.constexpr = COUNT if COUNT <= 2 else 4 if COUNT <= 4 else 8
    EMPTY: tl.constexpr = SLOTS - COUNT
    for _ in tl.static_range(0, EMPTY):
        pairs = pairs + (tl.full((HALF,), 0, tl.int16),)
    if SLOTS == 1:
        whole = pairs[FROM]
    elif SLOTS == 2:
        whole = tl.join(pairs[FROM], pairs[FROM + 1])
    elif SLOTS == 4:
        even = tl.join(pairs[FROM], pairs[FROM + 2])
        whole = tl.join(even, tl.join(pairs[FROM + 1], pairs[FROM + 3]))
    else:
        even = tl.join(tl.join(pairs[FROM], pairs[FROM + 4]), tl.join(pairs[FROM + 2], pairs[FROM + 6]))
        odd = tl.join(tl.join(pairs[FROM + 1], pairs[FROM + 5]), tl.join(pairs[FROM + 3], pairs[FROM + 7]))
        whole = tl.join(even, odd)
    # Joining makes the number of a chunk the fastest index; it must be the slowest.
    return _neighbours_first(tl.trans(tl.reshape(whole, (HALF, SLOTS))), HALF * SLOTS, NEAR)


@triton.jit
def _neighbours_first(pairs, LENGTH: tl.constexpr, NEAR: tl.constexpr):
    """Return the pairs [LENGTH] unchanged, a lane's NEAR neighbours (4 or 2) in successive registers.

    A gather stores its source to shared memory register by register. Triton 3.8 writes each of these stores as PTX, two
    bytes wide, and ptxas joins them only where they follow each other. Four times as many stores made wide rows 1.6
    times as slow on an H200.
    """
    even, odd = tl.split(tl.reshape(pairs, (LENGTH // NEAR, NEAR // 2, 2)))
    if NEAR == 4:
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        even = tl.join(first, third)
        odd = tl.join(second, fourth)
    return tl.reshape(tl.join(even, odd), (LENGTH,))


@triton.jit
def _source(start, P: tl.constexpr):
    """Return the input pairs of a step, int32 [WRITE / 2]; outside the row for padding."""
    window = start // 4 + tl.arange(0, P.write // 4)
    leading = first_pair(window, P) - P.k_offset // 2
    return tl.reshape(leading[:, None] + tl.arange(0, 2)[None, :], (P.write // 2,))


@triton.jit
def _put(out_ptr, row, to_ptr, rows, start: tl.constexpr, step, value, mask, COPIES: tl.constexpr, P: tl.constexpr):
    """Store a step of a row at ``out_ptr``; with COPIES in each row of ``to_ptr``."""
    if COPIES == 0:
        tl.store(out_ptr + offset_in_row(start, step, row, rows, 2, P), value, mask=mask)
    for copy in tl.static_range(0, COPIES):
        to = tl.load(to_ptr + copy)
        if to >= 0:
            at = offset_of_row(to, 2, P) + offset_in_row(start, step, to, rows, 2, P)
            tl.store(out_ptr + at, value, mask=mask)


@triton.jit
def _step(
    pairs, out_ptr, row, to_ptr, rows, start: tl.constexpr, NEAR: tl.constexpr, COPIES: tl.constexpr, P: tl.constexpr
):
    """Write one step of a row, the WRITE positions from ``start`` on; ``out_ptr`` is int16."""
    COLUMNS: tl.constexpr = P.bundle * 4 * (P.half - 1)
    PAIRS: tl.constexpr = P.bundle * P.half
    # The columns of positions between these two exist.
    BEGIN: tl.constexpr = COLUMNS if P.k_offset > 0 else 0
    END: tl.constexpr = (P.groups - (1 if P.cut else 0)) // P.bundle * COLUMNS
    # A gather stores all of its source to shared memory, so a step gets no more than the chunks that hold its groups.
    HALF: tl.constexpr = P.read // 2
    LEADING: tl.constexpr = start // COLUMNS * PAIRS - P.k_offset // 2
    TRAILING: tl.constexpr = ((start + P.write - 1) // COLUMNS + 1) * PAIRS - P.k_offset // 2 - 1
    TO: tl.constexpr = P.chunks - 1 if P.chunks <= TRAILING // HALF else TRAILING // HALF
    FROM: tl.constexpr = 0 if LEADING < 0 else TO if LEADING // HALF > TO else LEADING // HALF
    part = _in_order(pairs, FROM, TO - FROM + 1, NEAR, P)
    source = _source(start, P)
    if start < BEGIN or start + P.write > END:
        exists = (source >= 0) & (2 * source < P.in_features)
        value = tl.where(exists, tl.gather(part, tl.where(exists, source - FROM * HALF, 0), 0), 0)
    else:
        value = tl.gather(part, source - FROM * HALF, 0)
    step = tl.arange(0, P.write // 2)
    _put(out_ptr, row, to_ptr, rows, start // 2, step, value, start // 2 + step < P.k_packed // 2, COPIES, P)


@triton.jit
def _copy(pairs, out_ptr, row, to_ptr, rows, COPIES: tl.constexpr, P: tl.constexpr):
    """Write a row whose columns do not move; ``out_ptr`` is int16."""
    K_PACKED: tl.constexpr = P.k_packed
    HALF: tl.constexpr = P.read // 2
    for chunk in tl.static_range(0, (K_PACKED + P.read - 1) // P.read):
        step = tl.arange(0, HALF)
        value = tl.full((HALF,), 0, tl.int16)
        if chunk < P.chunks:
            value = pairs[chunk]
        _put(out_ptr, row, to_ptr, rows, chunk * HALF, step, value, chunk * HALF + step < K_PACKED // 2, COPIES, P)


@triton.jit(do_not_specialize=["tokens"])
def resident_kernel(
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

    Where slabs are padded, programs past the last row repeat it. ``out_ptr`` is int16, a pair of columns each.
    """
    begin(P)
    row = tl.program_id(0).to(tl.int64)
    token = tl.minimum(row, tokens - 1)
    x_ptr += token * x_stride
    if P.adds:
        residual_ptr += token * residual_stride
        residual_out_ptr += token * P.in_features
    out_ptr += offset_of_row(row, 2, P)
    pairs, _ = quantised(x_ptr, residual_ptr, residual_out_ptr, norm_weight_ptr, scales_ptr + token, eps, P)
    write(x_ptr, pairs, out_ptr, row, None, tl.num_programs(0), 0, P)


@triton.jit
def quantised(x_ptr, residual_ptr, residual_out_ptr, norm_weight_ptr, scale_ptr, eps, P: tl.constexpr):
    """Return a row as pairs of 8-bit values, and its scale, which is stored unless ``scale_ptr`` is None."""
    held = _hold(x_ptr, residual_ptr, residual_out_ptr, norm_weight_ptr, eps, P)
    scale, inverse = row_scale(_absmax(held, P), P)
    if scale_ptr is not None:
        tl.store(scale_ptr, scale)
    return _quantise(held, scale, inverse, P), scale


@triton.jit
def write(x_ptr, pairs, out_ptr, row, to_ptr, rows, COPIES: tl.constexpr, P: tl.constexpr):
    """Lift the pairs of a row into the output, whose slabs have ``rows`` rows; see :func:`_put`."""
    if P.in_place:
        _copy(pairs, out_ptr, row, to_ptr, rows, COPIES, P)
    else:
        NEAR: tl.constexpr = 64 // x_ptr.dtype.element_ty.primitive_bitwidth  # pairs in a load of 16 bytes
        K_PACKED: tl.constexpr = P.k_packed
        STEP: tl.constexpr = P.write
        for start in tl.static_range(0, K_PACKED, STEP):
            _step(pairs, out_ptr, row, to_ptr, rows, start, NEAR, COPIES, P)
