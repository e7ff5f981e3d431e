"""Fragments: what the registers of a warp hold of a matrix (PTX ISA, "Matrix Fragments for"), and its elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ptx_emulator.state import Fault, Warp
from ptx_emulator.values import Lanes

LEGAL_METADATA = np.isin(np.arange(16), (0x4, 0x8, 0x9, 0xC, 0xD, 0xE))


def _e4m3() -> np.ndarray:
    """The values of all 256 bytes."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size = np.where((exponent == 15) & (mantissa == 7), np.nan, size)
    return np.where(byte & 128, -size, size)


E4M3 = _e4m3()
DECODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "s8": lambda data: data.view(np.int8).astype(np.float64),
    "e4m3": lambda data: E4M3[data],
    "bf16": lambda data: (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64),
    "f16": lambda data: data.view(np.float16).astype(np.float64),
}


def read_registers(warp: Warp, read: Sequence[Callable[[Warp], Lanes]]) -> np.ndarray:
    """Return the registers of every lane: uint32 [32, registers]."""
    return np.stack([value(warp) for value in read], 1)


def rows_of(registers: np.ndarray) -> np.ndarray:
    """Return matrix A, of a sparse one its kept values alone, from four registers: uint8 [16 rows, 32 bytes].

    Register r has row lane / 4 + r % 2 * 8, from byte lane % 4 * 4 + r / 2 * 16 on.
    """
    # [lane / 4][lane % 4][r / 2][r % 2][byte] to [r % 2][lane / 4][r / 2][lane % 4][byte]
    return registers.view(np.uint8).reshape(8, 4, 2, 2, 4).transpose(3, 0, 2, 1, 4).reshape(16, 32)


def columns_of(registers: np.ndarray) -> np.ndarray:
    """Return the columns of matrix B from n registers, each with column lane / 4: uint8 [8 columns, 16 n bytes]."""
    return registers.view(np.uint8).reshape(8, 4, -1, 4).transpose(0, 2, 1, 3).reshape(8, -1)


def expand(kept: np.ndarray, registers: Lanes, selector: int, wide: bool) -> np.ndarray:
    """Put the kept values of a warp's 16 rows where the metadata say: [16, 2 * kept] elements."""
    rows, count = kept.shape
    row, window = np.arange(rows)[:, None], np.arange(count // 2)
    lane = row % 8 * 4
    if wide:  # 16-bit types: the selector picks two of four lanes; rows + 8 are in the upper half
        lane, shift = lane + window // 4 + selector * 2, window % 4 * 4 + row // 8 * 16
    else:
        lane, shift = lane + row // 8 + window // 8 * 2, window % 8 * 4
    nibbles = registers[lane].astype(np.int64) >> shift & 15
    if not LEGAL_METADATA[nibbles].all():
        raise Fault(f"metadata {nibbles[~LEGAL_METADATA[nibbles]][0]:#x}")
    dense = np.zeros((rows, 2 * count))
    dense[row, 4 * window + (nibbles & 3)] = kept[:, ::2]
    dense[row, 4 * window + (nibbles >> 2)] = kept[:, 1::2]
    return dense
