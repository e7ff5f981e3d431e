"""Copies of cp.async, which a thread starts, commits in groups, and waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.memory import together
from ptx_emulator.operands import address_of, value_of
from ptx_emulator.program import Statement
from ptx_emulator.state import LANES, POISON, Fault, Group, Step, Warp

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


def start(machine: Machine, statement: Statement) -> Step:
    """cp.async.ca and .cg: copy 4, 8 or 16 bytes, or as many as a source size says, and zeros up to these."""
    to, source, size, *rest = statement.operands
    rest = rest[: len(rest) - (".L2::cache_hint" in statement.name)]
    count = int(size)
    assert count in ((16,) if ".cg." in statement.name else (4, 8, 16)), statement
    to_address, from_address = address_of(to), address_of(source)
    length = value_of(rest[0], "u32") if rest else lambda warp: np.full(LANES, count)

    def copy(warp: Warp, group: Group) -> None:
        at, origin, read = (
            to_address(warp, group.lanes),
            from_address(warp, group.lanes),
            length(warp)[group.lanes].astype(np.int64),
        )
        if (at % count).any() or (origin % count).any() or (read > count).any():
            raise Fault(f"{statement}: addresses are no multiples of {count}, or more than that is read")
        machine.check_shared(warp.block, at, count)
        places, shared = at[:, None] + np.arange(count), warp.block.shared
        sources = [
            (read == some, int(some), *machine.memory.at(origin[read == some], int(some)))
            for some in np.unique(read[read > 0])
        ]
        shared[places] = POISON  # from now on the old bytes may be gone

        def end() -> None:
            data = np.zeros(places.shape, np.uint8)
            for lanes, some, array, offsets in sources:
                data[lanes, :some] = array[offsets[:, None] + np.arange(some)]
            shared[places] = data

        warp.copies[-1].append(end)

    return copy


def commit(machine: Machine, statement: Statement) -> Step:
    def commit(warp: Warp, group: Group) -> None:
        together(warp, group)
        warp.copies.append([])

    return commit


def wait(machine: Machine, statement: Statement) -> Step:
    """Wait until no more than so many of the last groups are on their way; wait_all waits for open ones, too."""
    left = -1 if statement.name == "cp.async.wait_all" else int(statement.operands[0])

    def wait(warp: Warp, group: Group) -> None:
        together(warp, group)
        while len(warp.copies) > left + 1:
            for end in warp.copies.pop(0):
                end()
        warp.copies = warp.copies or [[]]

    return wait
