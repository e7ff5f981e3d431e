"""Quantise and lift activations in one launch.

For every token (row) of ``x`` [M, K]: optionally RMSNorm (with or without adding a residual) or SiLU(gate) * up first,
then the scale of the row, its 8-bit values, and those values copied into the packed column order [M, K']. The numbers
are those of :func:`slidesparse.quant.quantize_rows` and :func:`slidesparse.slide.gather`, bit for bit.

How the work is cut. One program treats one row. One lane owns a *unit* of four consecutive groups, because four groups
of 2N columns are N 16-byte vectors on the way in (16-bit types) and N - 1 on the way out, whatever N is::

    6:8, one lane   in     |0 ... 7|8 .. 15|16 . 23|24 . 31|      4 vectors: 16 bytes of bf16 each
                    pairs  01 23 45 67 89 ...                     quantised once
                    out    |0123 2345 4567 89..|.....|.....|      3 vectors: 16 bytes of int8 each

Windows start at even positions, so a window is two neighbouring *pairs* of columns: lifting repeats pairs, and costs a
register move. All of it happens inside a lane: no shared memory but for the reduction of absmax. A program treats a
*tile* of units at a time, one or a few a lane. A row that can be held in registers is read once, a longer one twice,
the second time from L1 or L2 (:mod:`slidesparse.kernels.launch` decides).

Bytes moved a row: K inputs in, K' bytes and one float32 out. Every byte of the output, padding included, is written
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.kernels.columns import SLAB_BYTES, UNIT_GROUPS, VECTOR_BYTES, Columns, Slabs
from slidesparse.kernels.launch import FP8_ARCH, Launch, configure, device_arch
from slidesparse.quant import FP8_MAX, FP8_MIN_SCALE, INT8_MAX, QUANTISED, Quantised

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PAIR_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}

UNIT = tl.constexpr(UNIT_GROUPS)
_INT8_MAX = tl.constexpr(INT8_MAX)
_FP8_MAX = tl.constexpr(FP8_MAX)
_FP8_MIN_SCALE = tl.constexpr(FP8_MIN_SCALE)
_VECTOR_BYTES = tl.constexpr(VECTOR_BYTES)
_SLAB_BYTES = tl.constexpr(SLAB_BYTES)


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for, besides the types of its arguments.

    Attributes:
        columns: Input columns K.
        half: N, half the columns of a group: its pairs.
        k_offset: Position inside its group at which input column 0 stands.
        dense_groups: Groups of the dense segment.
        slid_groups: Groups of the slid segment.
        dense_columns: Length of the dense segment, padding included.
        slid_columns: Length of the slid segment, padding included.
        gathered: The groups stand in an order of their own.
        vector: Columns that a lane loads at once.
        first: What happens to a row before it is quantised: ``none``, ``rms_norm``, ``add_rms_norm`` or ``silu_mul``.
        quant: ``none``, ``int8`` or ``fp8``.
        pair_bytes: Bytes of a pair of output columns.
        slab_rows: Tokens of a slab; 0 for row-major output.
        swizzle: See :class:`slidesparse.kernels.columns.Slabs`.
        tile: Units that a program holds at once, a power of two.
        tiles: Tiles that cover a row.
        held: All tiles stay in registers between the reduction and the quantisation; else the row is read again.
    """

    columns: int
    half: int
    k_offset: int
    dense_groups: int
    slid_groups: int
    dense_columns: int
    slid_columns: int
    gathered: bool
    vector: int
    first: str
    quant: str
    pair_bytes: int
    slab_rows: int
    swizzle: bool
    tile: int
    tiles: int
    held: bool

    @property
    def vectors(self) -> int:
        """Vectors that hold a unit's input, of one segment."""
        return UNIT_GROUPS * 2 * self.half // self.vector

    @property
    def tile_vectors(self) -> int:
        """Vectors of a tile, of both segments."""
        return self.vectors * ((self.dense_columns > 0) + (self.slid_columns > 0))

    def unit_pairs(self, slid: bool) -> int:
        """Output pairs of a unit."""
        return UNIT_GROUPS * (2 * (self.half - 1) if slid else self.half)

    def word(self, columns: int) -> tl.dtype:
        """The unsigned integer that holds ``columns`` output columns."""
        return tl.core.get_int_dtype(columns * 4 * self.pair_bytes, False)

    def source_pair(self, i: int, slid: bool) -> int:
        """The input pair of a unit behind its output pair ``i``: half ``i % 2`` of window ``i // 2`` when slid."""
        windows = self.half - 1
        return i // 2 // windows * self.half + i // 2 % windows + i % 2 if slid else i

    def store_pairs(self, slid: bool) -> int:
        """Pairs that a lane stores at once: 16 bytes, 8 where four dense groups of an odd N hold no multiple of 16."""
        pairs = VECTOR_BYTES // self.pair_bytes
        return pairs if self.unit_pairs(slid) % pairs == 0 else pairs // 2


# -- device functions ----------------------------------------------------------------------------------------------


@triton.jit
def _input_columns(group_ids, unit, v: tl.constexpr, SLID: tl.constexpr, P: tl.constexpr):
    """Input columns of vector ``v`` of every unit [TILE, vector]; outside 0 .. K-1 where there is none."""
    GROUP: tl.constexpr = 2 * P.half
    if P.gathered:
        FIRST: tl.constexpr = P.dense_groups if SLID else 0
        COUNT: tl.constexpr = P.slid_groups if SLID else P.dense_groups
        nth = unit * UNIT + v * P.vector // GROUP
        group = tl.load(group_ids + FIRST + nth, mask=nth < COUNT, other=-1)
        start = group * GROUP + v * P.vector % GROUP
    else:
        start = unit * (UNIT * GROUP) + v * P.vector
    return start[:, None] + tl.arange(0, P.vector)[None, :] - P.k_offset


@triton.jit
def _inside(column, live, P: tl.constexpr):
    """Which of these columns exist."""
    inside = column < P.columns
    if P.gathered or P.k_offset > 0:
        inside = inside & (column >= 0)
    if P.slab_rows > 0:
        inside = inside & live
    return inside


@triton.jit
def _read(x, residual, column, live, P: tl.constexpr):
    """Values of a row at these columns, in the row's type, before any normalisation; 0 where there is no column."""
    inside = _inside(column, live, P)
    value = tl.load(x + column, mask=inside, other=0.0)
    if P.first == "silu_mul":
        # vLLM's rounding: silu in float32, rounded to the type, times up, rounded again.
        up = tl.load(x + P.columns + column, mask=inside, other=0.0)
        gate = value.to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(value.dtype)
        value = (silu.to(tl.float32) * up.to(tl.float32)).to(value.dtype)
    if P.first == "add_rms_norm":
        old = tl.load(residual + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + old.to(tl.float32)).to(value.dtype)
        tl.store(residual + column, value, mask=inside)
    return value


@triton.jit
def _read_tile(x, residual, group_ids, t, live, P: tl.constexpr):
    """The vectors of tile ``t``, dense segment first: a tuple of [TILE, vector] in the row's type."""
    unit = t * P.tile + tl.arange(0, P.tile)
    vectors = ()
    if P.dense_columns > 0:
        for v in tl.static_range(tl.constexpr(P.vectors)):
            column = _input_columns(group_ids, unit, v, False, P)
            vectors = vectors + (_read(x, residual, column, live, P),)
    if P.slid_columns > 0:
        for v in tl.static_range(tl.constexpr(P.vectors)):
            column = _input_columns(group_ids, unit, v, True, P)
            vectors = vectors + (_read(x, residual, column, live, P),)
    return vectors


@triton.jit
def _rms_norm(vectors, weight, group_ids, live, eps, P: tl.constexpr):
    """``round(x * rsqrt(mean(x^2) + eps)) * weight`` of a held row, rounded as vLLM's kernels round."""
    squares = vectors[0].to(tl.float32) * vectors[0].to(tl.float32)
    for v in tl.static_range(1, len(vectors)):
        squares += vectors[v].to(tl.float32) * vectors[v].to(tl.float32)
    mean = tl.div_rn(tl.sum(squares), P.columns * 1.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normed = ()
    for v in tl.static_range(len(vectors)):
        unit = v // P.tile_vectors * P.tile + tl.arange(0, P.tile)
        slid = P.dense_columns == 0 or v % P.tile_vectors >= P.vectors
        column = _input_columns(group_ids, unit, v % P.vectors, slid, P)
        gain = tl.load(weight + column, mask=_inside(column, live, P), other=0.0)
        rounded = (vectors[v].to(tl.float32) * rstd).to(vectors[v].dtype)
        normed = normed + ((rounded.to(tl.float32) * gain.to(tl.float32)).to(rounded.dtype),)
    return normed


@triton.jit
def _largest(vectors):
    """Elementwise largest magnitude, NaN if there is one: float32 [TILE, vector]."""
    largest = tl.abs(vectors[0].to(tl.float32))
    for v in tl.static_range(1, len(vectors)):
        largest = tl.maximum(largest, tl.abs(vectors[v].to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    return largest


@triton.jit
def _absmax(largest):
    """The largest of magnitudes, NaN if there is one: a scalar."""
    # As integers, non-negative floats keep their order and NaN is the largest: one integer reduction keeps it visible.
    return tl.max(largest.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _again(vectors, absmax):
    """The same vectors, behind a zero (the sign of ``absmax``) that the compiler cannot see through.

    Else it keeps the float32 forms of 16-bit values, in twice the registers, from the reduction to the quantisation.
    """
    zero = (absmax.to(tl.int32, bitcast=True) >> 31).to(tl.int16)
    same = ()
    for v in tl.static_range(len(vectors)):
        if vectors[v].dtype.primitive_bitwidth == 16 and vectors[v].shape[1] > 1:
            same = same + (
                tl.inline_asm_elementwise(
                    "xor.b32 $0, $1, $2;",
                    "=r,r,r",
                    [vectors[v], tl.broadcast_to(zero, vectors[v].shape)],
                    dtype=vectors[v].dtype,
                    is_pure=True,
                    pack=2,
                ),
            )
        else:
            same = same + (vectors[v],)
    return same


@triton.jit
def _scale(absmax, P: tl.constexpr):
    """The scale of a row and its (IEEE) inverse: what :func:`slidesparse.quant.quantize_rows` says."""
    if P.quant == "int8":
        scale = tl.div_rn(absmax, _INT8_MAX)
        inverse = tl.where(absmax == 0.0, 0.0, tl.div_rn(_INT8_MAX, absmax))
    else:
        scale = tl.maximum(tl.div_rn(absmax, _FP8_MAX), _FP8_MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)
        inverse = tl.div_rn(1.0, scale)
    return scale, inverse


@triton.jit
def _quotient(vector, scale, inverse, P: tl.constexpr):
    """What the conversion to 8 bits rounds; the bits themselves where nothing is quantised."""
    if P.quant == "none":
        result = vector.to(P.word(1), bitcast=True)
    else:
        value = vector.to(tl.float32)
        result = value * inverse
        if P.quant == "fp8":
            # value / scale: with the inverse at hand one correction gives the IEEE quotient. Checked for all 2^23
            # significands of the scale at every boundary between two e4m3 numbers. The signs are arranged so that -0
            # stays -0 (Triton's unary minus is 0 - x, which would lose it).
            result = tl.fma(tl.fma(result, scale, value * -1.0), -inverse, result)
    return result


@triton.jit
def _pair(low, high, P: tl.constexpr):
    """Convert two neighbours and put them into one integer."""
    if P.quant == "int8":
        # To nearest even, NaN to 0, saturated: the conversion of vLLM's kernel, two values at a time.
        pair = tl.inline_asm_elementwise(
            "{ .reg .s32 lo, hi; cvt.rni.s32.f32 lo, $1; cvt.rni.s32.f32 hi, $2;"
            " cvt.pack.sat.s8.s32.b32 $0, hi, lo, 0; }",
            "=r,f,f",
            [low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        ).to(tl.int16)
    elif P.quant == "fp8":
        # Through a 32-bit register: with a 16-bit result ptxas 13.0 wrote wrong bytes where a pair is stored twice.
        pair = tl.inline_asm_elementwise(
            "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, $2, $1; cvt.u32.u16 $0, pair; }",
            "=r,f,f",
            [low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        ).to(tl.int16)
    else:
        pair = low.to(P.word(2)) | (high.to(P.word(2)) << (4 * P.pair_bytes))
    return pair


@triton.jit
def _apart(vector):
    """Cut a [TILE, n] vector, n a power of two up to 4, into its columns: a tuple of [TILE, 1]."""
    columns = (vector,)
    for _ in tl.static_range(2):
        if columns[0].shape[1] > 1:
            even = ()
            odd = ()
            for i in tl.static_range(len(columns)):
                e, o = tl.split(tl.reshape(columns[i], (columns[i].shape[0], columns[i].shape[1] // 2, 2)))
                even = even + (e,)
                odd = odd + (o,)
            columns = even + odd
    return columns


@triton.jit
def _together(columns):
    """The inverse of :func:`_apart` for one vector: a tuple of n [TILE, 1] -> [TILE, n], n up to 8."""
    parts = columns
    for _ in tl.static_range(3):
        if len(parts) > 1:
            merged = ()
            for i in tl.static_range(len(parts) // 2):
                merged = merged + (tl.interleave(parts[i], parts[i + len(parts) // 2]),)
            parts = merged
    return parts[0]


@triton.jit
def _place(vector, row, START: tl.constexpr, STORE: tl.constexpr, P: tl.constexpr):
    """Where the output's pairs from ``START`` on stand, ``STORE`` at a time, from the row's own start on."""
    if P.slab_rows == 0:
        pair = START + vector * STORE
    else:
        # In whole vectors until the end, which tells the compiler that they are aligned.
        SLAB: tl.constexpr = _SLAB_BYTES // P.pair_bytes // STORE
        CHUNK: tl.constexpr = _VECTOR_BYTES // P.pair_bytes // STORE
        vector += START // STORE
        inside = vector % SLAB
        if P.swizzle:
            inside = inside ^ ((row % 8).to(tl.int32) * CHUNK)
        pair = (vector // SLAB * (SLAB * P.slab_rows) + inside) * STORE
    return pair


@triton.jit
def _row_start(row, P: tl.constexpr):
    """Offset of a row in the output, in pairs, 64 bits wide."""
    WIDTH: tl.constexpr = (P.dense_columns + P.slid_columns) // 2
    if P.slab_rows == 0:
        start = row * WIDTH
    else:
        start = row // P.slab_rows * (P.slab_rows * WIDTH) + row % P.slab_rows * (_SLAB_BYTES // P.pair_bytes)
    return start


@triton.jit
def _store_segment(out, pairs, t, row, SLID: tl.constexpr, P: tl.constexpr):
    """Write a tile of one segment: a unit's pairs in packed order, 16 bytes at a time."""
    STORE: tl.constexpr = P.store_pairs(SLID)
    UNIT_PAIRS: tl.constexpr = P.unit_pairs(SLID)
    START: tl.constexpr = P.dense_columns // 2 if SLID else 0
    LENGTH: tl.constexpr = (P.slid_columns if SLID else P.dense_columns) // 2
    unit = t * P.tile + tl.arange(0, P.tile)
    for s in tl.static_range(UNIT_PAIRS // STORE):
        chosen = ()
        for i in tl.static_range(s * STORE, (s + 1) * STORE):
            chosen = chosen + (pairs[P.source_pair(i, SLID)],)
        vector = (unit * (UNIT_PAIRS // STORE) + s)[:, None]
        pair = _place(vector, row, START, STORE, P) + tl.arange(0, STORE)[None, :]
        tl.store(out + pair, _together(chosen), mask=vector * STORE + tl.arange(0, STORE)[None, :] < LENGTH)


@triton.jit
def _store_tile(out, vectors, t, row, scale, inverse, P: tl.constexpr):
    """Quantise, lift and write the vectors of tile ``t``."""
    quotients = ()
    for v in tl.static_range(len(vectors)):
        quotients = quotients + (_quotient(vectors[v], scale, inverse, P),)
    pairs = ()
    if P.vector == 1:
        for i in tl.static_range(len(vectors) // 2):
            pairs = pairs + (_pair(quotients[2 * i], quotients[2 * i + 1], P),)
    else:
        for v in tl.static_range(len(vectors)):
            low, high = tl.split(tl.reshape(quotients[v], (P.tile, P.vector // 2, 2)))
            pairs = pairs + _apart(_pair(low, high, P))
    if P.dense_columns > 0:
        _store_segment(out, pairs, t, row, False, P)
    if P.slid_columns > 0:
        SKIP: tl.constexpr = UNIT * P.half if P.dense_columns > 0 else 0
        _store_segment(out, pairs[SKIP:], t, row, True, P)


@triton.jit
def quantize_lift_kernel(
    x, residual, weight, group_ids, out, scales, tokens, x_stride, residual_stride, eps, P: tl.constexpr
):
    """One row a program; see the top of this file."""
    row = tl.program_id(0).to(tl.int64)
    live = row < tokens
    x += row * x_stride
    if P.first == "add_rms_norm":
        residual += row * residual_stride
    out += _row_start(row, P)
    scale = 1.0
    inverse = 1.0
    TILES: tl.constexpr = P.tiles
    if P.held:
        vectors = ()
        for t in tl.static_range(TILES):
            vectors = vectors + _read_tile(x, residual, group_ids, t, live, P)
        if P.first == "rms_norm" or P.first == "add_rms_norm":
            vectors = _rms_norm(vectors, weight, group_ids, live, eps, P)
        if P.quant != "none":
            absmax = _absmax(_largest(vectors))
            scale, inverse = _scale(absmax, P)
            vectors = _again(vectors, absmax)
        for t in tl.static_range(TILES):
            tile = vectors[t * P.tile_vectors : (t + 1) * P.tile_vectors]
            _store_tile(out, tile, t, row, scale, inverse, P)
    else:
        if P.quant != "none":
            largest = tl.full((P.tile, P.vector), 0.0, tl.float32)
            for t in range(TILES):
                found = _largest(_read_tile(x, residual, group_ids, t, live, P))
                largest = tl.maximum(largest, found, propagate_nan=tl.PropagateNan.ALL)
            scale, inverse = _scale(_absmax(largest), P)
        for t in range(TILES):
            _store_tile(out, _read_tile(x, residual, group_ids, t, live, P), t, row, scale, inverse, P)
    if P.quant != "none":
        tl.store(scales + row, scale, mask=live)


# -- host functions ------------------------------------------------------------------------------------------------


def quantize_lift(x: torch.Tensor, columns: Columns, dtype: torch.dtype, *, slabs: Slabs | None = None) -> Quantised:
    """Quantise every token with its own scale and lift it.

    Args:
        x: [M, K], bfloat16, float16 or float32, any row stride, columns contiguous.
        columns: The packed column order.
        dtype: torch.int8 or torch.float8_e4m3fn.
        slabs: A tile-contiguous layout; row-major when None.

    Returns:
        Values [M, K'] in ``dtype`` (or ``slabs.shape``), and scale float32 [M, 1]. A row that holds NaN or Inf gets a
        scale that is NaN or Inf; its values mean nothing.

    Raises:
        InputError: When shapes, types or strides do not fit.
        UnsupportedError: FP8 on a GPU without FP8 conversions.
    """
    return _run(x, columns, dtype, "none", slabs=slabs)


def lift(x: torch.Tensor, columns: Columns, *, slabs: Slabs | None = None) -> torch.Tensor:
    """Lift without quantising: x [M, K] -> [M, K'] of the same float type, bit for bit."""
    return _run(x, columns, x.dtype, "none", slabs=slabs).values


def rms_norm_quantize_lift(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    columns: Columns,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    slabs: Slabs | None = None,
) -> Quantised:
    """RMSNorm, then :func:`quantize_lift`, with the roundings of vLLM's ``rms_norm`` and ``fused_add_rms_norm``.

    Args:
        x: [M, K].
        weight: [K], gain of the norm, in x's type.
        eps: Added to the mean square.
        columns: The packed column order.
        dtype: torch.int8 or torch.float8_e4m3fn.
        residual: [M, K] in x's type. ``x + residual`` replaces it, in place, and is what is normalised.
        slabs: A tile-contiguous layout; row-major when None.
    """
    if weight.shape != (columns.columns,) or weight.dtype != x.dtype or not weight.is_contiguous():
        raise InputError(
            "weight of RMSNorm", got=f"{list(weight.shape)} {weight.dtype}", needed=f"[{columns.columns}] {x.dtype}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(-1) != 1):
        raise InputError(
            "residual", got=f"{list(residual.shape)} {residual.dtype}", needed=f"{list(x.shape)} {x.dtype}, rows dense"
        )
    first = "rms_norm" if residual is None else "add_rms_norm"
    return _run(x, columns, dtype, first, weight=weight, residual=residual, eps=eps, slabs=slabs)


def silu_mul_quantize_lift(
    x: torch.Tensor, columns: Columns, dtype: torch.dtype, *, slabs: Slabs | None = None
) -> Quantised:
    """``silu(gate) * up``, then :func:`quantize_lift`, with the roundings of vLLM's ``silu_and_mul``.

    Args:
        x: [M, 2K], gate then up.
        columns: The packed column order of K columns.
        dtype: torch.int8 or torch.float8_e4m3fn.
        slabs: A tile-contiguous layout; row-major when None.
    """
    return _run(x, columns, dtype, "silu_mul", slabs=slabs)


def _run(
    x: torch.Tensor,
    columns: Columns,
    dtype: torch.dtype,
    first: str,
    *,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 0.0,
    slabs: Slabs | None = None,
) -> Quantised:
    needed = columns.columns * (2 if first == "silu_mul" else 1)
    if x.dim() != 2 or x.shape[1] != needed or x.dtype not in FLOATS or x.stride(1) != 1:
        raise InputError(
            "activations to lift",
            got=f"{list(x.shape)} {x.dtype}, strides {x.stride()}",
            needed=f"[M, {needed}] bf16, fp16 or fp32, columns contiguous",
        )
    arch = device_arch(x.device)
    if dtype == torch.float8_e4m3fn and arch < FP8_ARCH:
        raise UnsupportedError("FP8 on this GPU", got=f"sm_{arch}", needed=f"sm_{FP8_ARCH} or newer", remedy="use int8")
    tokens = x.shape[0]
    # Triton compiles for 16-byte alignment of pointers and strides when all of these hold, else for none.
    aligned = all(t is None or (t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0) for t in (x, residual))
    launch = configure(arch, tokens, columns, x.dtype.itemsize, aligned, first)
    plan = make_plan(columns, x.dtype, dtype, first, slabs, aligned, launch)
    shape = (tokens, columns.width) if slabs is None else slabs.shape(tokens, columns.width, dtype.itemsize)
    values = torch.empty(shape, dtype=dtype, device=x.device)
    scale = torch.empty(tokens if plan.quant != "none" else 0, 1, dtype=torch.float32, device=x.device)
    rows = tokens if slabs is None else shape[0] * slabs.rows
    if rows and columns.width:
        quantize_lift_kernel[(rows,)](
            x,
            residual,
            weight,
            columns.groups,
            values.view(PAIR_TYPES[plan.pair_bytes]),
            scale,
            tokens,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            plan,
            num_warps=launch.num_warps,
        )
    return Quantised(values, scale)


@lru_cache(maxsize=4096)
def make_plan(
    columns: Columns,
    source: torch.dtype,
    target: torch.dtype,
    first: str,
    slabs: Slabs | None,
    aligned: bool,
    launch: Launch,
) -> Plan:
    """The plan of a launch.

    Args:
        columns: The packed column order.
        source: Type of the input.
        target: Type of the output; the input's own type to lift only.
        first: See :class:`Plan`.
        slabs: Layout of the output.
        aligned: Rows of the input start at multiples of 16 bytes.
        launch: Tile and warps.
    """
    if target not in QUANTISED and target != source:
        raise InputError("type to lift to", got=target, needed="torch.int8, torch.float8_e4m3fn or the input's type")
    plan = Plan(
        columns=columns.columns,
        half=columns.group // 2,
        k_offset=columns.k_offset,
        dense_groups=columns.dense_groups,
        slid_groups=columns.slid_groups,
        dense_columns=columns.dense_columns,
        slid_columns=columns.slid_columns,
        gathered=columns.groups is not None,
        vector=columns.vector(source.itemsize, aligned),
        first=first,
        quant={torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(target, "none"),
        pair_bytes=2 * target.itemsize,
        slab_rows=0 if slabs is None else slabs.rows,
        swizzle=slabs is not None and slabs.swizzle,
        tile=launch.tile,
        tiles=-(-columns.units // launch.tile),
        held=launch.held,
    )
    if slabs is not None and plan.dense_columns * target.itemsize % SLAB_BYTES:
        raise InputError("a segment in slabs", got=plan.dense_columns, needed=f"a multiple of {SLAB_BYTES} bytes")
    if "norm" in first and not plan.held:
        raise UnsupportedError("RMSNorm of rows that do not stay in registers", got=f"K = {columns.columns}")
    return plan
