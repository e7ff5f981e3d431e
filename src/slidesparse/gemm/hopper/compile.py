"""The variants of ``gemm/hopper/csrc``: for each tile and pair of types the source and the compiler's options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slidesparse.gemm.nvrtc import OUTPUTS, TYPES, machine_code, read_sources

if TYPE_CHECKING:
    from slidesparse.gemm.hopper.tiles import Tile

FOLDER = Path(__file__).with_name("csrc")
ARCH = "sm_90a"

MAINLOOPS = {
    (False, 8, False): "metadata.cu",
    (True, 8, False): "counts.cu",
    (False, 6, False): "six_bits.cu",
    (True, 6, False): "six_bit_counts.cu",
    (False, 6, True): "six_bit_dense.cu",
}
"""(weights have counts, bits of a kept value, weights are dense) -> the source to compile."""


def sources(count_bits: int = 0, value_bits: int = 8, dense: bool = False) -> dict[str, str]:
    """Return name in ``#include`` -> source of a mainloop: first the one to compile, then all headers.

    Args:
        count_bits: Bits of a count, for weights in bundles (:mod:`slidesparse.gemm.steps`); 0 for all others.
        value_bits: Bits of a kept value in memory: 6, or 8 for all others.
        dense: Whether tiles are for dense weights.
    """
    return read_sources(FOLDER / MAINLOOPS[count_bits > 0, value_bits, dense])


def options(
    tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype,
    grouped: bool = False, count_bits: int = 0, value_bits: int = 8,
) -> list[str]:  # fmt: skip
    """Return the options for NVRTC, listed in ``sparse_gemm.cuh``.

    Args:
        tile: The geometry.
        dtype: Type of weights and activations.
        out_dtype: Type of the product.
        grouped: Whether the weights are those of many experts.
        count_bits: See :func:`sources`.
        value_bits: See :func:`sources`.
    """
    registers = tile.tokens // 2
    constraint = "r" if dtype == torch.int8 else "f"
    names = ", ".join(f"%{i}" for i in range(registers))
    operands = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(registers))
    after = [f'-DOPERAND_{i}="%{registers + i}"' for i in range(8)]
    geometry = {
        "TOKENS": tile.tokens,
        "WARPGROUPS": tile.warpgroups,
        "ROW_BLOCKS": tile.row_blocks,
        "STAGES": tile.stages,
        "SPLIT": tile.split,
        "BLOCKS": tile.blocks,
        "GROUPED": int(grouped),
        "COUNT_BITS": count_bits,
        "VALUE_BITS": value_bits,
        "DENSE": int(tile.dense),
    }
    return [
        f"--gpu-architecture={ARCH}",
        "--std=c++17",
        f"-DTYPE_{TYPES[dtype]}",
        f"-DOUT_{OUTPUTS[out_dtype]}",
        *(f"-D{name}={value}" for name, value in geometry.items()),
        f'-DACC_NAMES="{names}"',
        f"-DACC(d)={operands}",
        *after,
    ]


def cubin(
    tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype,
    grouped: bool = False, count_bits: int = 0, value_bits: int = 8,
) -> bytes:  # fmt: skip
    """Return the machine code of a variant, from the cache or the compiler; see :func:`options`.

    Raises:
        UnsupportedError: There is no NVRTC, or it refuses the source.
    """
    opts = options(tile, dtype, out_dtype, grouped, count_bits, value_bits)
    return machine_code(sources(count_bits, value_bits, tile.dense), opts)
