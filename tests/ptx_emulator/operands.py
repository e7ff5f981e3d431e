"""Read the operands of statements: registers, numbers, addresses."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ptx_emulator.state import DYNAMIC_START, LANES, Warp
from ptx_emulator.values import TYPES, Lanes

ADDRESS = re.compile(r"\[\s*([%$\w@]+)\s*(?:\+\s*(-?\d+))?\s*\]")


def value_of(text: str, kind: str) -> Callable[[Warp], Lanes]:
    """A register, a number, or what the machine says of a thread."""
    dtype = TYPES[kind]
    if text == "%tid.x":
        return lambda warp: (warp.number * LANES + np.arange(LANES)).astype(dtype)
    if text == "%ctaid.x":
        return lambda warp: np.full(LANES, warp.block.index, dtype)
    if text == "%nctaid.x":
        return lambda warp: np.full(LANES, warp.machine.grid, dtype)
    if text == "%cluster_ctarank":
        return lambda warp: np.full(LANES, warp.block.rank, dtype)
    if text.startswith("%") or "@" in text:
        return lambda warp: warp.read(text, kind)
    constant = _constant(text, dtype)
    return lambda warp: constant


def _constant(text: str, dtype: type) -> Lanes:
    if text == "raw":
        return np.full(LANES, DYNAMIC_START, dtype)
    if text.startswith("sparse_gemm_param"):
        return np.zeros(LANES, dtype)
    if text.startswith("0f"):
        return np.full(LANES, int(text[2:], 16), np.uint32).view(np.float32)
    bits = 8 * np.dtype(dtype).itemsize
    number = int(text, 0)
    if dtype is np.bool_:
        return np.full(LANES, bool(number))
    return np.full(LANES, number % (1 << bits), np.uint64).astype(f"u{bits // 8}").view(dtype)


def address_of(text: str) -> Callable[[Warp, Lanes], np.ndarray]:
    """The addresses of the active lanes: int64."""
    found = ADDRESS.fullmatch(text)
    assert found, text
    base, offset = found[1], int(found[2] or 0)
    if not base.startswith("%"):
        constant = int(_constant(base, np.uint64)[0]) + offset
        return lambda warp, lanes: np.full(int(lanes.sum()), constant, np.int64)
    return lambda warp, lanes: warp.registers[base][lanes].astype(np.int64) + offset


def names_of(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{} ").split(",")]
