"""Matrix instructions: wgmma of weights and activations in shared memory, and stmatrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.fragments import DECODE, expand, read_registers, rows_of
from ptx_emulator.memory import together
from ptx_emulator.operands import address_of, names_of, value_of
from ptx_emulator.program import Statement
from ptx_emulator.state import LANES, Block, Fault, Group, Step, Warp

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


def commit(machine: Machine, statement: Statement) -> Step:
    def commit(warp: Warp, group: Group) -> None:
        warp.committed.append(warp.open)
        warp.open = []

    return commit


def wait_group(machine: Machine, statement: Statement) -> Step:
    left = int(statement.operands[0])

    def wait(warp: Warp, group: Group) -> None:
        while len(warp.committed) > left:
            for check in warp.committed.pop(0):
                check()

    return wait


def store_matrix(machine: Machine, statement: Statement) -> Step:
    """stmatrix.x4.trans: lanes 8i to 8i + 7 give the rows of matrix i, of eight 16-bit elements."""
    assert statement.name == "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    address, read = address_of(statement.operands[0]), [value_of(n, "b32") for n in names_of(statement.operands[1])]

    def store(warp: Warp, group: Group) -> None:
        together(warp, group)
        at = address(warp, group.lanes)
        for i, value in enumerate(read):
            # Without .trans a lane holds two elements of row lane / 4: [lane / 4][lane % 4 * 2 + 0, 1].
            matrix = value(warp).view(np.uint16).reshape(8, 8).T
            for row in range(8):
                _, offset = machine.shared(warp.block, int(at[8 * i + row]), 16)
                warp.block.shared[offset : offset + 16] = np.ascontiguousarray(matrix[row]).view(np.uint8)

    return store


class Operand:
    """A matrix in shared memory (PTX ISA, "Matrix Descriptor Format"): rows in groups of eight, swizzled."""

    def __init__(self, machine: Machine, block: Block, descriptor: int, rows: Sequence[int], size: int) -> None:
        start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
        mode = descriptor >> 62
        assert mode in (1, 2), "128 and 64-byte swizzling"
        row_bytes, mask = (128, 7) if mode == 1 else (64, 3)
        row = np.asarray(rows)[:, None]
        at = start + row // 8 * stride + row % 8 * row_bytes + np.arange(size)
        self.at = at ^ (at >> 7 & mask) << 4
        machine.shared(block, int(self.at.min()), 1)
        machine.shared(block, int(self.at.max()), 1)
        self.block, self.data = block, block.shared[self.at]

    def check(self) -> None:
        if (self.block.shared[self.at] != self.data).any():
            raise Fault("an operand changed while a matrix instruction was in flight")


class Fragment:
    """The weights of a warp in registers."""

    def __init__(self, warp: Warp, names: Sequence[str]) -> None:
        self.read = [value_of(name, "u32") for name in names]
        self.warp, self.registers = warp, read_registers(warp, self.read)
        self.data = rows_of(self.registers)

    def check(self) -> None:
        if (read_registers(self.warp, self.read) != self.registers).any():
            raise Fault("a register changed while a matrix instruction read it")


def multiply(machine: Machine, statement: Statement) -> Step:
    """wgmma.mma_async: a warp computes 16 of the 64 rows. The weights are in shared memory or in registers."""
    shape = re.search(r"m64n(\d+)k(\d+)\.(\w+)\.(\w+)", statement.name)
    assert shape, statement.name
    tokens, total, kind = int(shape[1]), shape[3], shape[4]
    sparse, wide = ".sp." in statement.name, kind in ("bf16", "f16")
    result, a, b, *rest = statement.operands
    meta, selector, scale = (rest[0], int(rest[1]), rest[2]) if sparse else ("", 0, rest[0])
    if total == "f32":
        assert rest[3 if sparse else 1 :][:2] == ["1", "1"], "neither matrix is negated"
    names, result_type = names_of(result), "s32" if total == "s32" else "f32"
    fragment = names_of(a) if a.startswith("{") else None
    a_of = None if fragment else value_of(a, "u64")
    b_of, accumulate = value_of(b, "u64"), value_of(scale, "pred")
    k_bytes = int(shape[2]) * (2 if wide else 1)

    def multiply(warp: Warp, group: Group) -> None:
        together(warp, group)
        first = warp.number % 4 * 16
        weights: Operand | Fragment
        if a_of is None:
            weights = Fragment(warp, fragment or ())
        else:
            rows = range(first, first + 16)
            weights = Operand(machine, warp.block, int(a_of(warp)[0]), rows, k_bytes // (1 + sparse))
        activations = Operand(machine, warp.block, int(b_of(warp)[0]), range(tokens), k_bytes)
        left, right = (DECODE[kind](operand.data) for operand in (weights, activations))
        if sparse:
            left = expand(left, warp.read(meta, "u32"), selector, wide)
        # A thread holds rows lane / 4 and 8 more, of every 8 tokens those of lane % 4: [token / 8][half][token % 2].
        product = (left @ right.T).reshape(2, 8, tokens // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(-1, LANES)
        if accumulate(warp)[0]:
            product += np.stack([warp.read(name, result_type) for name in names])
        sums = product.astype(np.int64).astype(np.int32) if total == "s32" else product.astype(np.float32)
        for name, values in zip(names, sums, strict=True):
            warp.write(name, values, group.lanes)
        warp.open += [weights.check, activations.check]

    return multiply
