"""Read the operands of statements: registers, numbers, addresses."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ptx_emulator.state import LANES, Warp
from ptx_emulator.values import TYPES, Lanes

ADDRESS = re.compile(r"\[\s*([%$\w@]+)\s*(?:\+\s*(-?\d+))?\s*\]")


SPECIAL: dict[str, Callable[[Warp], int]] = {
    "%ctaid.x": lambda warp: warp.block.index % warp.machine.grid[0],
    "%ctaid.y": lambda warp: warp.block.index // warp.machine.grid[0] % warp.machine.grid[1],
    "%ctaid.z": lambda warp: warp.block.index // warp.machine.grid[0] // warp.machine.grid[1],
    "%nctaid.x": lambda warp: warp.machine.grid[0],
    "%nctaid.y": lambda warp: warp.machine.grid[1],
    "%nctaid.z": lambda warp: warp.machine.grid[2],
    "%ntid.x": lambda warp: warp.machine.threads,
    "%cluster_ctarank": lambda warp: warp.block.rank,
}
"""What all threads of a warp have in common."""


def value_of(text: str, kind: str) -> Callable[[Warp], Lanes]:
    """A register, a number, the place of an array, or what the machine says of a thread."""
    dtype = TYPES[kind]
    if text == "%tid.x":
        return lambda warp: (warp.number * LANES + np.arange(LANES)).astype(dtype)
    if text == "%laneid":
        return lambda warp: np.arange(LANES).astype(dtype)
    if text in SPECIAL:
        return lambda warp: np.full(LANES, SPECIAL[text](warp), dtype)
    if text.startswith("%") or "@" in text:
        return lambda warp: warp.read(text, kind)
    if not text[0].isdigit() and text[0] != "-":
        return lambda warp: np.full(LANES, warp.machine.program.symbols[text], dtype)
    constant = _constant(text, dtype)
    return lambda warp: constant


def _constant(text: str, dtype: type) -> Lanes:
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
    if not base.startswith("%") and "@" not in base:
        return lambda warp, lanes: np.full(int(lanes.sum()), warp.machine.program.symbols[base] + offset, np.int64)
    return lambda warp, lanes: warp.registers[base][lanes].astype(np.int64) + offset


def names_of(text: str) -> list[str]:
    return [part.strip() for part in text.strip("{} ").split(",")]
