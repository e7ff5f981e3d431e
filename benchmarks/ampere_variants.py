"""Registers, spills, shared memory and occupancy of every variant of the kernel for ``mma.sync``, without a card.

    python benchmarks/ampere_variants.py [--forms "int8 2:4" ...] [--cards sm_80 ...]

Prints a Markdown table for docs/log/ampere-kernel.md. The compiler is NVRTC's, which makes the code that users run;
nothing is run, so occupancy is what registers and shared memory leave room for. Limits of a multiprocessor are those of
the CUDA programming guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from slidesparse.gemm.ampere.compile import options, sources
from slidesparse.gemm.ampere.tiles import TILES, MmaTile
from slidesparse.gemm.nvrtc import compile_sources

REGISTERS, WARP_REGISTERS, BLOCK_BYTES = 64 << 10, 256, 1 << 10
"""Of a multiprocessor; the unit in which a warp gets them; and shared memory that the driver takes for a block."""


class Card(NamedTuple):
    """Limits of a multiprocessor.

    Attributes:
        warps: Resident warps.
        blocks: Resident blocks.
        shared: Bytes of shared memory; a block can have all but BLOCK_BYTES.
    """

    warps: int
    blocks: int
    shared: int


CARDS = {
    "sm_80": Card(64, 32, 164 << 10),
    "sm_86": Card(48, 16, 100 << 10),
    "sm_89": Card(48, 24, 100 << 10),
    "sm_120": Card(48, 24, 100 << 10),
}


class Form(NamedTuple):
    """Operands of a variant: their type, bits of a weight, and whether it is dense."""

    dtype: torch.dtype
    value_bits: int = 8
    dense: bool = False


FORMS = {
    "int8 2:4": Form(torch.int8),
    "int8 2:4, six bits": Form(torch.int8, 6),
    "int8 dense": Form(torch.int8, dense=True),
    "int8 dense, six bits": Form(torch.int8, 6, True),
    "fp8 2:4": Form(torch.float8_e4m3fn),
    "fp8 dense": Form(torch.float8_e4m3fn, dense=True),
    "bf16 2:4": Form(torch.bfloat16),
    "bf16 dense": Form(torch.bfloat16, dense=True),
}


class Found(NamedTuple):
    """A variant on a card: registers of a thread, spilled bytes, stages, shared memory, resident blocks."""

    registers: int
    spilled: int
    stages: int
    shared: int
    blocks: int


def find(tile: MmaTile, form: Form, arch: str) -> Found | None:
    """Compile a variant as a card would get it; None where it has no such instructions, or too little memory."""
    card, itemsize = CARDS[arch], form.dtype.itemsize
    if form.dtype == torch.float8_e4m3fn and arch in ("sm_80", "sm_86"):
        return None
    room = card.shared - BLOCK_BYTES
    fitted = replace(tile, dense=form.dense).fitted(room, itemsize, form.value_bits)
    if fitted is None:
        return None
    opts = [*options(fitted, form.dtype, torch.bfloat16, form.value_bits, arch), "--ptxas-options=-v"]
    _, log = compile_sources(sources(), opts)
    (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    shared, warps = fitted.shared_bytes(itemsize, 0, form.value_bits), fitted.threads // 32
    of_warp = -(-registers * 32 // WARP_REGISTERS) * WARP_REGISTERS
    # A warp's registers are those of one of four partitions.
    by_registers = REGISTERS // 4 // of_warp * 4 // warps
    blocks = min(card.blocks, card.warps // warps, by_registers, card.shared // (shared + BLOCK_BYTES))
    return Found(registers, spilled, fitted.stages, shared, blocks)


def rows(forms: list[str], archs: list[str]) -> Iterator[list[str]]:
    """Compile everything, and yield the cells of each row that some card has room for."""
    with ThreadPoolExecutor(2) as pool:
        for name, tile in product(forms, TILES):
            found = list(pool.map(partial(find, tile, FORMS[name]), archs))
            if not any(found):
                continue
            cells = (cell(one, tile, arch) for one, arch in zip(found, archs, strict=True))
            yield [name, str(tile), str(tile.threads), *cells]


def cell(found: Found | None, tile: MmaTile, arch: str) -> str:
    """Registers, spilled bytes if any, stages, shared memory, blocks, and the share of warps that are there."""
    if found is None:
        return "-"
    spills = f", **{found.spilled} B spilled**" if found.spilled else ""
    share = found.blocks * tile.threads / 32 / CARDS[arch].warps
    return f"{found.registers}{spills}, {found.stages} of {found.shared / 1024:.0f} kB, {found.blocks} ({share:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    arguments = parser.parse_args()
    print("| weights | tile | threads |", " | ".join(arguments.cards), "|")
    print("|---|---|---|" + "---|" * len(arguments.cards))
    for row in rows(arguments.forms, arguments.cards):
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
