"""Run the PTX of a kernel without a GPU: a cluster's blocks, warp by warp, with asynchronous copies.

A kernel's ring of stages, its addresses, its metadata and its epilogue run on any machine, for all tiles. It is
written from the PTX ISA and shares no code with the package. What it models:

* warps run in a random order, some statements each; lanes that branch apart run one after the other and meet again;
* a bulk copy ends at a random later time, in any order, so a consumer that does not wait reads poison;
* a copy of ``cp.async`` ends as late as it may, when its thread waits for it: until then, readers find poison;
* a matrix instruction of ``wgmma`` reads its operands when it is issued; when its group is waited for, they are
  compared with what shared memory holds by then, so a stage that was given back too early is an error;
* loads and stores outside of an allocation are errors, and so is a state in which no warp can go on.

It does not model time, caches, lanes of a warp that are apart without a branch (so it needs no ``bar.warp.sync``), nor
the order in which other threads see ordinary stores.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from random import Random

import numpy as np

from ptx_emulator import matrices, memory, thread_copies, warp_matrices
from ptx_emulator.operands import value_of
from ptx_emulator.program import Program, Statement
from ptx_emulator.state import (
    BLOCK_SHIFT,
    DYNAMIC_START,
    LANES,
    POISON,
    Barrier,
    Block,
    Fault,
    GlobalMemory,
    Group,
    Step,
    Warp,
)
from ptx_emulator.values import function_of


class Machine:
    """Runs a kernel's blocks, cluster after cluster.

    Args:
        program: The kernel.
        arguments: The bytes of its parameters.
        memory: Global memory.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
        grid: Blocks, along x, or along several axes.
        cluster: Blocks of a cluster, which run at the same time.
        seed: Of the order in which warps run and copies end.
    """

    def __init__(
        self,
        program: Program,
        arguments: bytes,
        memory: GlobalMemory,
        *,
        threads: int,
        shared_bytes: int,
        grid: int | tuple[int, ...],
        cluster: int = 1,
        seed: int = 0,
    ) -> None:
        self.program, self.memory, self.threads, self.cluster = program, memory, threads, cluster
        self.grid = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
        self.arguments = np.frombuffer(arguments, np.uint8)
        self.shared_bytes, self.random = shared_bytes, Random(seed)
        self.copies: list[Callable[[], None]] = []
        self.events = 0
        self.blocks: list[Block] = []
        self.code = [_compile(self, statement) for statement in program.statements]

    def run(self) -> None:
        """Run the whole grid."""
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, prod(self.grid), self.cluster):
                self._run_cluster(first)

    def _run_cluster(self, first: int) -> None:
        self.blocks = [self._block(rank, first + rank) for rank in range(self.cluster)]
        warps = [warp for block in self.blocks for warp in block.warps]
        while any(not warp.done for warp in warps):
            before, waiting = self.events, True
            for warp in self.random.sample(warps, len(warps)):
                waiting &= warp.done or warp.run(self.random.choice((8, 64, 2000)))
            stuck = waiting and self.events == before
            if stuck and not self.copies:
                raise Fault(f"nobody can go on: {[warp for warp in warps if not warp.done]}")
            for _ in range(self.random.randrange(stuck, len(self.copies) + 1) if self.copies else 0):
                self.copies.pop(self.random.randrange(len(self.copies)))()
        if self.copies:
            raise Fault(f"{len(self.copies)} copies are on their way at the end")

    def _block(self, rank: int, index: int) -> Block:
        block = Block(rank, index, np.full(self.program.shared_bytes + self.shared_bytes, POISON, np.uint8))
        block.warps = [Warp(self, block, number) for number in range(self.threads // LANES)]
        return block

    # -- shared memory and barriers ----------------------------------------------------------------------------------

    def shared(self, block: Block, address: int, size: int) -> tuple[Block, int]:
        """Return the block of a shared address, and the offset in it."""
        rank, offset = address >> BLOCK_SHIFT, address & ((1 << BLOCK_SHIFT) - 1)
        owner = self.blocks[rank - 1] if rank else block
        if offset < DYNAMIC_START or offset + size > len(owner.shared):
            raise Fault(f"shared access of {size} bytes at {offset}")
        return owner, offset

    def check_shared(self, block: Block, addresses: np.ndarray, size: int) -> None:
        """Refuse addresses that are not all inside of a block's own shared memory."""
        if len(addresses) and (addresses.min() < DYNAMIC_START or addresses.max() + size > len(block.shared)):
            raise Fault(f"shared access of {size} bytes at {addresses}")

    def barrier(self, block: Block, address: int) -> Barrier:
        owner, offset = self.shared(block, address, 8)
        if offset not in owner.barriers:
            raise Fault(f"no barrier at {offset}")
        return owner.barriers[offset]

    def arrive(self, barrier: Barrier, count: int = 0, more_bytes: int = 0) -> None:
        """Count arrivals and bytes; the phase ends when none of either is missing."""
        self.events += 1
        barrier.pending -= count
        barrier.bytes += more_bytes
        if barrier.pending < 0:
            raise Fault("more arrivals at a barrier than it expects")
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.pending, barrier.phase = barrier.expected, barrier.phase ^ 1


# -- from statements to functions --------------------------------------------------------------------------------------


def _compile(machine: Machine, statement: Statement) -> Step:
    action = _action(machine, statement)
    if statement.name.split(".")[0] in ("bra", "ret", "exit"):
        return action

    def step(warp: Warp, group: Group) -> None:
        if not statement.guard:
            action(warp, group)
        else:
            lanes = group.lanes & (warp.read(statement.guard, "pred") ^ statement.inverted)
            if lanes.any():
                action(warp, Group(group.at, lanes))
        group.at += 1

    return step


def _action(machine: Machine, statement: Statement) -> Step:
    name, operands = statement.name, statement.operands
    for start, make in CONTROL.items():
        if name.startswith(start):
            return make(machine, statement)
    if name.split(".")[0] in ("ld", "st"):
        return memory.access(machine, statement)
    if name.startswith("mov") and "{" in "".join(operands):
        return memory.move_parts(machine, statement)
    found = function_of(name)
    if found is None:
        raise NotImplementedError(f"{name} {operands}")
    kinds, function = found
    sources = operands[1:]
    if isinstance(kinds, str):
        kinds = (kinds,) * len(sources)
    read = [value_of(source, kind) for source, kind in zip(sources, kinds, strict=True)]
    target = operands[0]

    def calculate(warp: Warp, group: Group) -> None:
        warp.write(target, function(*(value(warp) for value in read)), group.lanes)

    return calculate


def _branch(machine: Machine, statement: Statement) -> Step:
    to = machine.program.labels[statement.operands[0]]

    def branch(warp: Warp, group: Group) -> None:
        taken = group.lanes
        if statement.guard:
            taken = taken & (warp.read(statement.guard, "pred") ^ statement.inverted)
        warp.jump(group, to, taken)

    return branch


def _leave(machine: Machine, statement: Statement) -> Step:
    def leave(warp: Warp, group: Group) -> None:
        machine.events += 1
        if warp.open or warp.committed:
            raise Fault("matrix instructions are in flight at the end")
        warp.groups.remove(group)
        if warp.done and any(warp.copies):
            raise Fault("copies are on their way at the end")

    return leave


def _nothing(machine: Machine, statement: Statement) -> Step:
    return lambda warp, group: None


CONTROL: dict[str, Callable[[Machine, Statement], Step]] = {
    "bra": _branch,
    "ret": _leave,
    "bar.sync": memory.named_barrier,
    "bar.warp.sync": memory.sync_warp,
    "barrier.cluster.arrive": memory.cluster_arrive,
    "barrier.cluster.wait": memory.cluster_wait,
    "mbarrier.init": memory.make_barrier,
    "mbarrier.arrive": memory.arrive,
    "mbarrier.try_wait": memory.try_wait,
    "cp.async.bulk": memory.bulk_copy,
    "cp.async.ca": thread_copies.start,
    "cp.async.cg": thread_copies.start,
    "cp.async.commit_group": thread_copies.commit,
    "cp.async.wait": thread_copies.wait,
    "atom.": memory.add_atomically,
    "red.": memory.add_atomically,
    "shfl.sync": warp_matrices.shuffle,
    "ldmatrix": warp_matrices.load_matrix,
    "mma.s": warp_matrices.multiply,
    "st.async": memory.store_async,
    "mapa": memory.map_address,
    "stmatrix": matrices.store_matrix,
    "wgmma.mma_async": matrices.multiply,
    "wgmma.commit_group": matrices.commit,
    "wgmma.wait_group": matrices.wait_group,
    "wgmma.fence": _nothing,
    "fence": _nothing,
    "griddepcontrol": _nothing,
    "membar": _nothing,
    "setmaxnreg": _nothing,
}
