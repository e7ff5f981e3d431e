"""Loads, stores, barriers and asynchronous copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.operands import address_of, names_of, value_of
from ptx_emulator.program import Statement
from ptx_emulator.state import BLOCK_SHIFT, LANES, POISON, Barrier, Block, Blocked, Fault, Group, Step, Warp
from ptx_emulator.values import TYPES

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


SPACES = "param", "shared", "global"


def _space(statement: Statement) -> str:
    return next((part for part in statement.name.split(".") if part in SPACES), "generic")


def _place(machine: Machine, warp: Warp, at: np.ndarray, size: int, space: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the memory of these addresses, and the offsets in it."""
    if space == "global" or (space == "generic" and machine.memory.holds(int(at[0]))):
        return machine.memory.at(at, size)
    machine.check_shared(warp.block, at, size)
    return warp.block.shared, at


def access(machine: Machine, statement: Statement) -> Step:
    """ld and st of parameters, shared, global and generic addresses; vectors too."""
    parts = statement.name.split(".")
    kind, vector = parts[-1], next((int(part[1]) for part in parts if part in ("v2", "v4")), 1)
    dtype, space = np.dtype(TYPES[kind]), _space(statement)
    loads = parts[0] == "ld"
    registers, place = statement.operands if loads else statement.operands[::-1]
    address, names, size = address_of(place), names_of(registers), dtype.itemsize * vector
    values = None if loads else [value_of(name, kind) for name in names]

    def move(warp: Warp, group: Group) -> None:
        at = address(warp, group.lanes)
        if (at % size).any():
            raise Fault(f"{statement} at an address that is no multiple of {size}")
        if space == "param":
            array, offsets = machine.arguments, at
        else:
            array, offsets = _place(machine, warp, at, size, space)
        index = offsets[:, None] + np.arange(size)
        if values is None:
            found = array[index].view(dtype)
            for i, name in enumerate(names):
                # A load of 16 bits may go to a register of 32, and leaves zeros above them.
                value = np.zeros(LANES, np.uint32 if dtype.itemsize < 4 and not name.startswith("%rs") else dtype)
                value[group.lanes] = found[:, i]
                warp.write(name, value, group.lanes)
        else:
            rows = np.stack([value(warp)[group.lanes].astype(dtype) for value in values], 1)
            array[index] = rows.view(np.uint8).reshape(len(at), size)

    return move


def move_parts(machine: Machine, statement: Statement) -> Step:
    """mov of a register from or to its parts, the low one first."""
    whole, parts = (names_of(operand) for operand in statement.operands)
    kind = f"b{int(statement.name[-2:]) // max(len(whole), len(parts))}"
    if len(parts) > 1:
        read = [value_of(name, kind) for name in parts]
        dtype = TYPES[statement.name[4:]]
        return lambda warp, group: warp.write(
            whole[0], np.stack([value(warp) for value in read], 1).view(dtype)[:, 0], group.lanes
        )
    source = value_of(parts[0], statement.name[4:])

    def cut(warp: Warp, group: Group) -> None:
        for name, part in zip(whole, source(warp)[:, None].view(TYPES[kind]).T, strict=True):
            warp.write(name, part.copy(), group.lanes)

    return cut


def add_atomically(machine: Machine, statement: Statement) -> Step:
    """atom and red: lanes in order; atom returns what was there before."""
    name, operands = statement.name.split("."), statement.operands
    assert "add" in name, statement.name
    dtype, space = np.dtype(TYPES[name[-1]]), _space(statement)
    address, more = address_of(operands[-2]), value_of(operands[-1], name[-1])

    def add(warp: Warp, group: Group) -> None:
        machine.events += 1
        before, lanes = np.zeros(LANES, dtype), np.flatnonzero(group.lanes)
        added = more(warp)
        for lane, at in zip(lanes, address(warp, group.lanes), strict=True):
            if at % dtype.itemsize:
                raise Fault(f"{statement} at an address that is no multiple of {dtype.itemsize}")
            array, (offset,) = _place(machine, warp, at[None], dtype.itemsize, space)
            number = array[offset : offset + dtype.itemsize].view(dtype)
            before[lane] = number[0]
            number += added[lane]
        if name[0] == "atom":
            warp.write(operands[0], before, group.lanes)

    return add


def make_barrier(machine: Machine, statement: Statement) -> Step:
    address, count = address_of(statement.operands[0]), value_of(statement.operands[1], "u32")

    def make(warp: Warp, group: Group) -> None:
        _, offset = machine.shared(warp.block, int(address(warp, group.lanes)[0]), 8)
        number = int(count(warp)[group.lanes][0])
        warp.block.barriers[offset] = Barrier(number, number)

    return make


def arrive(machine: Machine, statement: Statement) -> Step:
    address = address_of(statement.operands[1])
    more = value_of(statement.operands[2], "u32") if len(statement.operands) > 2 else None

    def arrive(warp: Warp, group: Group) -> None:
        for i, at in enumerate(address(warp, group.lanes)):
            expected = 0 if more is None else int(more(warp)[group.lanes][i])
            barrier = machine.barrier(warp.block, int(at))
            barrier.bytes += expected
            machine.arrive(barrier, 1)

    return arrive


def try_wait(machine: Machine, statement: Statement) -> Step:
    done, place, parity = statement.operands
    address, phase = address_of(place), value_of(parity, "u32")

    def wait(warp: Warp, group: Group) -> None:
        found = np.zeros(LANES, bool)
        over = [machine.barrier(warp.block, int(at)).phase for at in address(warp, group.lanes)]
        found[group.lanes] = np.array(over) != (phase(warp)[group.lanes] & 1)
        if not found[group.lanes].any():
            raise Blocked
        warp.write(done, found, group.lanes)

    return wait


def named_barrier(machine: Machine, statement: Statement) -> Step:
    number = value_of(statement.operands[0], "u32")
    count = value_of(statement.operands[1], "u32") if len(statement.operands) > 1 else None

    def sync(warp: Warp, group: Group) -> None:
        together(warp, group)
        key, threads = int(number(warp)[0]), machine.threads if count is None else int(count(warp)[0])
        here = warp.block.waiting.setdefault(key, set())
        if key in warp.held:  # it has arrived before: does it still wait?
            if warp.number in here:
                raise Blocked
            warp.held.discard(key)
            return
        here.add(warp.number)
        machine.events += 1
        if len(here) * LANES == threads:
            here.clear()
            return
        warp.held.add(key)
        raise Blocked

    return sync


def together(warp: Warp, group: Group) -> None:
    """Wait until all lanes of the warp that have not left are here."""
    if len(warp.groups) > 1:
        raise Fault(f"{warp}: lanes are apart where all must be together")


def sync_warp(machine: Machine, statement: Statement) -> Step:
    # The group that is furthest back runs first, so that here all lanes have met, unless one went past it.
    return lambda warp, group: together(warp, group)


def cluster_arrive(machine: Machine, statement: Statement) -> Step:
    def arrive(warp: Warp, group: Group) -> None:
        warp.cluster_phase += 1
        machine.events += 1

    return arrive


def cluster_wait(machine: Machine, statement: Statement) -> Step:
    def wait(warp: Warp, group: Group) -> None:
        others = [other for block in machine.blocks for other in block.warps if not other.done]
        if any(other.cluster_phase < warp.cluster_phase for other in others):
            raise Blocked

    return wait


def map_address(machine: Machine, statement: Statement) -> Step:
    target, address, rank = statement.operands
    read, of = value_of(address, "u32"), value_of(rank, "u32")

    def there(warp: Warp, group: Group) -> None:
        warp.write(target, read(warp) | (of(warp) + np.uint32(1)) << np.uint32(BLOCK_SHIFT), group.lanes)

    return there


def bulk_copy(machine: Machine, statement: Statement) -> Step:
    to, source, size, bar = statement.operands[:4]  # a cache policy may follow
    to_address, from_address, bar_address, length = (
        address_of(to),
        address_of(source),
        address_of(bar),
        value_of(size, "u32"),
    )

    def copy(warp: Warp, group: Group) -> None:
        if group.lanes.sum() != 1:
            raise Fault("a bulk copy by several lanes")
        count = int(length(warp)[group.lanes][0])
        target, offset = machine.shared(warp.block, int(to_address(warp, group.lanes)[0]), count)
        start = from_address(warp, group.lanes)
        if count % 16 or offset % 16 or int(start[0]) % 16 or count <= 0:
            raise Fault(f"a bulk copy of {count} bytes from {int(start[0]):#x} to {offset}")
        array, offsets = machine.memory.at(start, count)
        barrier = machine.barrier(warp.block, int(bar_address(warp, group.lanes)[0]))
        target.shared[offset : offset + count] = POISON  # from now on the old bytes may be gone

        def end() -> None:
            target.shared[offset : offset + count] = array[int(offsets[0]) : int(offsets[0]) + count]
            machine.arrive(barrier, more_bytes=-count)

        machine.copies.append(end)

    return copy


def store_async(machine: Machine, statement: Statement) -> Step:
    place, values, bar = statement.operands
    address, bar_address = address_of(place), address_of(bar)
    read = [value_of(name, "b32") for name in names_of(values)]

    def store(warp: Warp, group: Group) -> None:
        data = np.stack([value(warp)[group.lanes] for value in read], 1)
        bars = bar_address(warp, group.lanes)
        for at, row, one in zip(address(warp, group.lanes), data, bars, strict=True):
            owner, offset = machine.shared(warp.block, int(at), row.nbytes)

            def end(owner: Block = owner, offset: int = offset, row: np.ndarray = row, one: int = int(one)) -> None:
                owner.shared[offset : offset + row.nbytes] = row.view(np.uint8)
                machine.arrive(machine.barrier(warp.block, one), more_bytes=-row.nbytes)

            machine.copies.append(end)

    return store
