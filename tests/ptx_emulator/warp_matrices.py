"""Instructions of one warp together: mma of fragments in registers, ldmatrix, and shuffles."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.fragments import DECODE, columns_of, expand, read_registers, rows_of
from ptx_emulator.memory import together
from ptx_emulator.operands import address_of, names_of, value_of
from ptx_emulator.program import Statement
from ptx_emulator.state import LANES, Fault, Group, Step, Warp

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

MMA = re.compile(
    r"mma\.(sp::ordered_metadata\.)?sync\.aligned\.m16n8k(\d+)\.row\.col\.(s32|f32)\.(s8|e4m3|bf16|f16)\.\4\.\3"
)


def _known(warp: Warp, names: tuple[str, ...], selector: int | None, make: Callable[[Warp], np.ndarray]) -> np.ndarray:
    """Return the matrix of these registers, decoded once as long as nobody writes them: many instructions share it."""
    registers = [warp.registers.get(name) for name in names]
    before, matrix = warp.matrices.get((names, selector), (None, None))
    if before is None or any(one is not other for one, other in zip(before, registers, strict=True)):
        matrix = make(warp)
        warp.matrices[names, selector] = registers, matrix
    return matrix


def multiply(machine: Machine, statement: Statement) -> Step:
    """mma.sync and mma.sp: 16 rows by 8 columns, 32 bytes of A a row, of a sparse one those that are kept."""
    found = MMA.fullmatch(statement.name)
    assert found, statement.name
    sparse, total, kind = bool(found[1]), found[3], found[4]
    assert (total == "s32") == (kind == "s8"), statement.name
    wide = kind in ("bf16", "f16")
    assert int(found[2]) == (16 if wide else 32) << sparse, statement.name
    result, a, b, c, *rest = statement.operands
    meta, selector = (value_of(rest[0], "u32"), int(rest[1], 0)) if sparse else (None, 0)
    assert selector in ((0, 1) if wide else (0,)), "threads whose metadata count"
    a_of, b_of = ([value_of(name, "u32") for name in names_of(operand)] for operand in (a, b))
    before = [value_of(name, total) for name in names_of(c)]
    names, c_names, right_names = (tuple(names_of(operand)) for operand in (result, c, b))
    left_names = (*names_of(a), *rest[:1])
    assert (len(names), len(a_of), len(b_of), len(before)) == (4, 4, 2 << sparse, 4), statement

    def left_of(warp: Warp) -> np.ndarray:
        rows = DECODE[kind](rows_of(read_registers(warp, a_of)))
        return rows if meta is None else expand(rows, meta(warp), selector, wide)

    def right_of(warp: Warp) -> np.ndarray:
        return DECODE[kind](columns_of(read_registers(warp, b_of))).T

    def c_of(warp: Warp) -> np.ndarray:
        return np.stack([value(warp) for value in before])

    def multiply(warp: Warp, group: Group) -> None:
        together(warp, group)
        left = _known(warp, left_names, selector, left_of)
        right = _known(warp, right_names, None, right_of)
        # A thread holds rows lane / 4 and 8 more, and columns lane % 4 * 2 and one more: [half][column % 2].
        product = (left @ right).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, LANES)
        sums = product + _known(warp, c_names, None, c_of)
        rounded = sums.astype(np.int64).astype(np.int32) if total == "s32" else sums.astype(np.float32)
        for name, values in zip(names, rounded, strict=True):
            warp.write(name, values, group.lanes)
        warp.matrices[names, None] = [warp.registers[name] for name in names], rounded

    return multiply


def load_matrix(machine: Machine, statement: Statement) -> Step:
    """ldmatrix: lanes 8i to 8i + 7 give the rows of matrix i, of eight 16-bit elements."""
    found = re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(::cta)?\.b16", statement.name)
    assert found, statement.name
    names, address, transposed = names_of(statement.operands[0]), address_of(statement.operands[1]), bool(found[2])
    count = int(found[1])
    assert len(names) == count, statement

    def load(warp: Warp, group: Group) -> None:
        together(warp, group)
        at = address(warp, group.lanes)[: 8 * count]
        if (at % 16).any():
            raise Fault(f"{statement} at an address that is no multiple of 16")
        machine.check_shared(warp.block, at, 16)
        matrices = warp.block.shared[at[:, None] + np.arange(16)].view(np.uint16).reshape(count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        # A lane gets two elements of row lane / 4: [lane / 4][lane % 4 * 2 + 0, 1].
        values = np.ascontiguousarray(matrices).reshape(count, 2 * LANES).view(np.uint32)
        for name, value in zip(names, values, strict=True):
            warp.write(name, value, group.lanes)

    return load


def shuffle(machine: Machine, statement: Statement) -> Step:
    """shfl.sync: a lane reads the register of another one in its segment, or its own where there is none."""
    mode = statement.name.split(".")[2]
    target, source, *rest = statement.operands
    name, _, inside = target.partition("|")
    read = value_of(source, "b32")
    by, limits, members = (value_of(operand, "u32") for operand in rest)

    def exchange(warp: Warp, group: Group) -> None:
        lane = np.arange(LANES)
        if (int(members(warp)[group.lanes][0]) >> lane & ~group.lanes).any():
            raise Fault(f"{warp}: lanes are apart where all must be together")
        step, limit = by(warp).astype(np.int64) & 31, limits(warp).astype(np.int64)
        segment = limit >> 8 & 31
        first = lane & segment
        last = first | limit & 31 & ~segment
        other = {"idx": first | step & ~segment, "bfly": lane ^ step, "up": lane - step, "down": lane + step}[mode]
        valid = other >= last if mode == "up" else other <= last
        other = np.where(valid, other, lane)
        if not group.lanes[other[group.lanes]].all():
            raise Fault(f"{warp}: a shuffle reads a lane that takes no part")
        warp.write(name, read(warp)[other], group.lanes)
        if inside:
            warp.write(inside, valid, group.lanes)

    return exchange
