"""What the arithmetic of PTX does to the 32 lanes of a warp: a function of arrays for each instruction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Lanes = np.ndarray
"""[32] of one of :data:`TYPES`."""

TYPES = {
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "pred": np.bool_,
}
COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "neu": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
WIDER = {"s32": np.int64, "u32": np.uint64}


def _truncating(a: Lanes, b: Lanes, remainder: bool) -> Lanes:
    """Division as C has it: towards zero. Lanes that take no part may hold zeros, and get anything."""
    wide_a, wide_b = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    quotient = np.sign(wide_a) * np.sign(wide_b) * (abs(wide_a) // abs(wide_b))
    return (wide_a - quotient * wide_b if remainder else quotient).astype(a.dtype)


def _shift(op: Callable[[Lanes, Lanes], Lanes], a: Lanes, by: Lanes) -> Lanes:
    """Shifts by at least the width leave zeros, or signs."""
    bits, by = 8 * a.itemsize, by.view(np.uint32)
    if op is np.right_shift and a.dtype.kind == "i":
        return a >> np.minimum(by, bits - 1).astype(a.dtype)
    return np.where(by < bits, op(a, np.minimum(by, bits - 1).astype(a.dtype)), 0).astype(a.dtype)


def _insert(a: Lanes, b: Lanes, start: Lanes, length: Lanes) -> Lanes:
    """bfi: the low bits of ``a``, in ``b`` from bit ``start`` on."""
    mask = ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)) << start.astype(np.uint64)
    shifted = a.astype(np.uint64) << start.astype(np.uint64)
    return ((b.astype(np.uint64) & ~mask) | (shifted & mask)).astype(np.uint32)


def _extract(a: Lanes, start: Lanes, length: Lanes) -> Lanes:
    """bfe: ``length`` bits of ``a`` from bit ``start`` on; of a signed type the last of them is the sign."""
    start, length = (x.view(np.uint32).astype(np.int64) & 0xFF for x in (start, length))
    wide = np.where(start < 64, a.astype(np.int64) >> np.minimum(start, 63), 0)
    unused = 64 - np.clip(length, 1, 64)
    bits = wide << unused if a.dtype.kind == "i" else (wide << unused).view(np.uint64)
    return np.where(length > 0, bits >> unused.astype(bits.dtype), 0).astype(a.dtype)


def _select_bytes(a: Lanes, b: Lanes, selectors: Lanes) -> Lanes:
    """prmt: byte i of the result is a byte of ``b`` and ``a``, or its sign in all bits, as nibble i says."""
    source = np.stack([a, b], 1).view(np.uint8)
    nibbles = selectors[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    found = np.take_along_axis(source, (nibbles & 7).astype(np.int64), 1)
    return np.where(nibbles & 8, np.where(found & 128, 255, 0), found).astype(np.uint8).view(np.uint32)[:, 0]


def _dot_bytes(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """dp4a: the products of four signed or unsigned bytes, added to ``c``."""
    kind = np.int8 if a.dtype.kind == "i" else np.uint8
    products = a[:, None].view(kind).astype(np.int64) * b[:, None].view(kind).astype(np.int64)
    return (c + products.sum(1)).astype(c.dtype)


def _funnel(high: Lanes, low: Lanes, by: Lanes, left: bool, wrap: bool) -> Lanes:
    """shf: 32 bits of two registers, shifted."""
    by = (by & np.uint32(31) if wrap else np.minimum(by, 32)).astype(np.uint64)
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    return (both << by >> np.uint64(32) if left else both >> by).astype(np.uint32)


def _logic(a: Lanes, b: Lanes, c: Lanes, table: Lanes) -> Lanes:
    """lop3: bit i of the result is the table's bit of the three bits i."""
    found = np.zeros_like(a)
    for row in range(8):
        if int(table[0]) >> row & 1:
            terms = [x if row >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            found |= terms[0] & terms[1] & terms[2]
    return found


def bf16_bits(x: Lanes) -> Lanes:
    """BF16, rounded to the nearest, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint32)


def _pair(high: Lanes, low: Lanes) -> Lanes:
    return high.astype(np.uint32) << np.uint32(16) | low.astype(np.uint32)


def _half_bits(x: Lanes) -> Lanes:
    return x.astype(np.float16).view(np.uint16)


SAME_TYPE: dict[str, Callable[..., Lanes]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "mul": np.multiply,
    "mul.rn": np.multiply,
    "mad.lo": lambda a, b, c: a * b + c,
    "neg": np.negative,
    "not": np.invert,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "div": lambda a, b: _truncating(a, b, remainder=False),
    "rem": lambda a, b: _truncating(a, b, remainder=True),
    "bfi": _insert,
    "bfe": _extract,
    "lop3": _logic,
    "prmt": _select_bytes,
    "dp4a.s32": _dot_bytes,
    "dp4a.u32": _dot_bytes,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "fma.rn": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
}
"""Instructions whose operands and result have the type at the end of their name. A float64 holds the product of two
float32 exactly, and its sum with a third is rounded twice only where that sum has more than 53 bits."""

CONVERSIONS: dict[str, Callable[..., Lanes]] = {
    "cvt.rn.bf16.f32": lambda a: bf16_bits(a).astype(np.uint16),
    "cvt.rn.f16.f32": _half_bits,
    "cvt.f32.f16": lambda a: a.view(np.float16).astype(np.float32),
    "cvt.rn.bf16x2.f32": lambda high, low: _pair(bf16_bits(high), bf16_bits(low)),
    "cvt.rn.f16x2.f32": lambda high, low: _pair(_half_bits(high), _half_bits(low)),
}


def function_of(name: str) -> tuple[tuple[str, ...] | str, Callable[..., Lanes]] | None:
    """Return the types of an instruction's operands, one for all or one each, and what it does.

    None where it is no arithmetic.
    """
    parts = name.split(".")
    base, kind = ".".join(parts[:-1]), parts[-1]
    if name in CONVERSIONS:
        return ("b16" if name.endswith("f16") else "f32"), CONVERSIONS[name]
    if parts[0] == "cvt":
        return kind, lambda a, to=TYPES[parts[-2]]: a.astype(to)
    if parts[0] in ("mov", "cvta"):
        return ("u64" if parts[0] == "cvta" else kind), lambda a: a
    if parts[0] == "shf":
        left, wrap = parts[1] == "l", parts[2] == "wrap"
        return kind, lambda low, high, by: _funnel(high, low, by, left, wrap)
    if parts[0] == "setp":
        return kind, COMPARISONS[parts[1]]
    if parts[0] == "selp":
        return (kind, kind, "pred"), lambda a, b, chosen: np.where(chosen, a, b)
    if parts[0] in ("shl", "shr"):
        op = np.left_shift if parts[0] == "shl" else np.right_shift
        return (kind, "u32"), lambda a, by: _shift(op, a, by)
    if base == "mul.wide":
        return kind, lambda a, b: a.astype(WIDER[kind]) * b.astype(WIDER[kind])
    if base == "mul.hi":
        return kind, lambda a, b: (a.astype(WIDER[kind]) * b.astype(WIDER[kind]) >> WIDER[kind](32)).astype(TYPES[kind])
    return (kind, SAME_TYPE[base]) if base in SAME_TYPE else None
