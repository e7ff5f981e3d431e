"""The variants of ``gemm/ampere/csrc``, compiled as :mod:`slidesparse.gemm.nvrtc` says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slidesparse.gemm.nvrtc import OUTPUTS, TYPES, read_sources

if TYPE_CHECKING:
    from slidesparse.gemm.ampere.tiles import MmaTile

FOLDER = Path(__file__).with_name("csrc")


def sources() -> dict[str, str]:
    """Return name in ``#include`` -> source: first the one to compile, then all headers."""
    return read_sources(FOLDER / "gemm.cu")


def options(tile: MmaTile, dtype: torch.dtype, out_dtype: torch.dtype, value_bits: int, arch: str) -> list[str]:
    """Return the options for NVRTC, listed in ``gemm.cu``."""
    geometry = {
        "ROW_BLOCKS": tile.row_blocks,
        "TOKEN_BLOCKS": tile.token_blocks,
        "ROW_WARPS": tile.row_warps,
        "TOKEN_WARPS": tile.token_warps,
        "SPLIT": tile.split,
        "STAGES": tile.stages,
        "AHEAD": int(tile.ahead),
        "VALUE_BITS": value_bits,
        "DENSE": int(tile.dense),
    }
    defined = [f"-D{name}={value}" for name, value in geometry.items()]
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        f"-DTYPE_{TYPES[dtype]}",
        f"-DOUT_{OUTPUTS[out_dtype]}",
        *defined,
    ]
