"""The state of a running kernel: memory, barriers, blocks and warps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ptx_emulator.values import TYPES, Lanes

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

LANES = 32
ALL = np.ones(LANES, bool)
BLOCK_SHIFT = 24
"""An address in another block of the cluster has its rank plus one above this bit."""

DYNAMIC_START = 1040
"""Where dynamic shared memory starts: on purpose no multiple of 1024, which the kernel must not count on."""

POISON = 0xA5


class Fault(AssertionError):
    """The kernel did what it must not do."""


class Blocked(Exception):
    """A warp cannot go on until another one has done something."""


class GlobalMemory:
    """Tensors in the memory of this process, at the addresses that they have."""

    def __init__(self) -> None:
        self.arrays: dict[int, np.ndarray] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Let a kernel read and write a tensor, and return its address; 0 for an empty one."""
        if not tensor.numel():
            return 0
        assert tensor.is_contiguous()
        self.arrays[tensor.data_ptr()] = tensor.reshape(-1).view(torch.uint8).numpy()
        return tensor.data_ptr()

    def holds(self, address: int) -> bool:
        """Return whether an address is global. Most are above 4 GiB; some builds of Python keep tensors below."""
        return address >= 1 << 32 or any(True for _ in self._around(address))

    def _around(self, address: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the start and the bytes of every tensor that has a byte at this address."""
        return ((start, array) for start, array in self.arrays.items() if start <= address < start + len(array))

    def at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the array of these addresses and the offsets in it, all ``size`` bytes inside."""
        for start, array in self._around(int(addresses[0])):
            offsets = addresses - start
            if offsets.min() >= 0 and offsets.max() + size <= len(array):
                return array, offsets
        raise Fault(f"global access of {size} bytes at {[hex(int(a)) for a in addresses[:4]]}")


@dataclass
class Barrier:
    """An mbarrier."""

    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0


@dataclass(eq=False)
class Group:
    """Lanes of a warp that are at the same statement."""

    at: int
    lanes: Lanes


@dataclass(eq=False)
class Block:
    """A thread block: shared memory, its barriers and its warps."""

    rank: int
    index: int
    shared: np.ndarray
    barriers: dict[int, Barrier] = field(default_factory=dict)
    waiting: dict[int, set[int]] = field(default_factory=dict)  # named barrier -> warps that have arrived
    warps: list[Warp] = field(default_factory=list)


class Warp:
    """32 threads: their registers, where they are, and the matrix instructions in flight."""

    def __init__(self, machine: Machine, block: Block, number: int) -> None:
        self.machine, self.block, self.number = machine, block, number
        self.registers: dict[str, Lanes] = {}
        self.groups = [Group(0, ALL)]
        self.open: list[Callable[[], None]] = []
        self.committed: list[list[Callable[[], None]]] = []
        self.copies: list[list[Callable[[], None]]] = [[]]  # of cp.async: groups in order, the last one still open
        self.matrices: dict[Hashable, tuple[list[Lanes | None], np.ndarray]] = {}  # what registers hold for mma
        self.held: set[int] = set()  # named barriers at which it waits
        self.cluster_phase = 0

    @property
    def done(self) -> bool:
        return not self.groups

    def run(self, most: int) -> bool:
        """Run up to this many statements; returns whether it ended before, because it must wait."""
        statements = self.machine.code
        for _ in range(most):
            if self.done:
                return False
            group = self.groups[0]
            if len(self.groups) > 1:
                group = min(self.groups, key=lambda group: group.at)
                for other in [g for g in self.groups if g is not group and g.at == group.at]:
                    group.lanes = group.lanes | other.lanes
                    self.groups.remove(other)
                if group.lanes.all():
                    group.lanes = ALL
            try:
                statements[group.at](self, group)
            except Blocked:
                return True
        return False

    def jump(self, group: Group, to: int, taken: Lanes) -> None:
        """Let some lanes of a group go to another statement, and the others to the next."""
        rest = group.lanes & ~taken
        if not rest.any():
            group.at = to
        else:
            group.at, group.lanes = group.at + 1, rest
            if taken.any():
                self.groups.append(Group(to, taken))

    def read(self, name: str, kind: str) -> Lanes:
        value, dtype = self.registers.get(name), np.dtype(TYPES[kind])
        if (
            value is None
        ):  # nothing has a value before it is written; a compiler may let it be read, if it does not count
            return (
                np.full(LANES, 1, bool) if kind == "pred" else np.full(8 * LANES, POISON, np.uint8).view(dtype)[:LANES]
            )
        return value.view(dtype) if value.itemsize == dtype.itemsize else value.astype(dtype)

    def write(self, name: str, value: Lanes, lanes: Lanes) -> None:
        if lanes is not ALL and name in self.registers:  # what runs most is told apart without a look at the lanes
            old = self.registers[name]
            value = np.where(lanes, value, old if old.dtype == value.dtype else old.view(value.dtype))
        self.registers[name] = value

    def __repr__(self) -> str:
        where = [self.machine.program.statements[group.at].name for group in self.groups]
        return f"block {self.block.rank} warp {self.number} at {where}"


Step = Callable[[Warp, Group], None]
"""What a statement does to the lanes of a warp that are at it."""
