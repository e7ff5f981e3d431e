"""The geometry of the tiles of the kernel for ``mma.sync``, and the choice between them by counts.

A multiprocessor is as fast as the slowest of its tensor cores, its shared memory (128 bytes a cycle, read and written)
and what it gets from L2. The counts of a step follow from the geometry alone, so one rule serves cards that nobody has
timed; ``csrc/gemm.cu`` says what a team, a step and a stage are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from slidesparse.gemm.ampere.compile import options, sources
from slidesparse.gemm.kernel import BLOCK_BYTES
from slidesparse.gemm.launch import SECOND_LAUNCH, TOKEN_STEP, Band
from slidesparse.gemm.nvrtc import machine_code
from slidesparse.gemm.steps import TILE_ROWS, StepForm, step_bytes
from slidesparse.lifting.layout import SLAB_BYTES

FEWEST_STAGES, MOST_STAGES = 3, 8
TILE_CYCLES = 3000
"""Cycles of a tile besides its steps."""

STEP_CYCLES = 200
"""Cycles of a step in which a team waits, for threads and first operands; other teams multiply meanwhile."""


@dataclass(frozen=True)
class MmaTile:
    """The geometry of a variant.

    Attributes:
        row_blocks: Blocks of 16 channels of a warp.
        token_blocks: Blocks of 8 tokens of a warp; even.
        row_warps: Warps of a team along the channels.
        token_warps: Warps of a team along the tokens.
        split: Teams, each with a part of the steps: a power of two.
        ahead: Whether a warp holds the weights of its next instructions, too.
        stages: Stages of a team's ring; 0: as many as fit.
        dense: Whether weights are dense.
    """

    row_blocks: int
    token_blocks: int
    row_warps: int = 1
    token_warps: int = 1
    split: int = 1
    ahead: bool = True
    stages: int = 0
    dense: bool = False

    early, cluster, blocks = False, 1, 1
    """These cards have neither launches that begin before the kernel before them has ended, nor clusters; and a
    multiprocessor has one block."""

    def __str__(self) -> str:
        """Return tokens x channels, and teams: ``16x64/8``."""
        return f"{self.tokens}x{self.channels}" + (f"/{self.split}" if self.split > 1 else "")

    @property
    def channels(self) -> int:
        """Channels of a tile."""
        return 16 * self.row_blocks * self.row_warps

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return 8 * self.token_blocks * self.token_warps

    @property
    def team(self) -> int:
        """Threads of a team."""
        return 32 * self.row_warps * self.token_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.team * self.split

    def count(self, tokens: int, channels: int) -> int:
        """Return the number of tiles of a product [tokens, channels]."""
        return -(-tokens // self.tokens) * -(-channels // self.channels)

    def stage_bytes(self, itemsize: int, value_bits: int) -> int:
        """Return the bytes of a stage: activations and weights of a step."""
        return self.tokens * SLAB_BYTES + self.channels * step_bytes(itemsize, value_bits, self.dense) // 64

    def shared_bytes(self, itemsize: int, count_bits: int = 0, value_bits: int = 8) -> int:
        """Return the bytes of a block's shared memory, as in the source; none has counts."""
        ring = self.split * self.stages * self.stage_bytes(itemsize, value_bits)
        sums = self.split // 2 * self.channels * self.tokens * 4
        factors = (self.tokens + 2 * self.channels) * 4
        return 128 + ring + sums + factors

    def fitted(self, room: int, itemsize: int, value_bits: int) -> MmaTile | None:
        """Return the tile with as many stages as fit into ``room`` bytes; None without enough."""
        for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1):
            tile = replace(self, stages=stages)
            if tile.shared_bytes(itemsize, 0, value_bits) <= room:
                return tile
        return None

    def cycles(self, tokens: int, channels: int, form: StepForm, itemsize: int, card: Card) -> float:
        """Return the estimated clock cycles of a product."""
        instructions = (4 if self.dense else 2) * self.channels // 16 * self.tokens // 8
        weights = self.channels * step_bytes(itemsize, form.value_bits, self.dense) // 64
        loaded = self.tokens * SLAB_BYTES + weights
        read = self.token_warps * weights + self.row_warps * self.tokens * SLAB_BYTES
        step = max(instructions * card.instruction_cycles, (loaded + read) / 128, loaded / card.l2_bytes)
        step += STEP_CYCLES / self.split
        waves = -(-self.count(tokens, channels) // card.multiprocessors)
        return waves * (form.slabs * step + TILE_CYCLES)

    def compile(
        self, dtype: torch.dtype, out_dtype: torch.dtype, device: int, grouped: bool, count_bits: int, value_bits: int
    ) -> bytes:
        """Return the machine code for a device; see :meth:`slidesparse.gemm.hopper.tiles.Tile.compile`."""
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        return machine_code(sources(), options(self, dtype, out_dtype, value_bits, arch))


class Card(NamedTuple):
    """What decides on tiles.

    Attributes:
        multiprocessors: Its multiprocessors.
        shared_bytes: Shared memory of one of them for a block.
        instruction_cycles: Cycles of a multiprocessor for an instruction.
    """

    multiprocessors: int
    shared_bytes: int
    instruction_cycles: int

    @property
    def l2_bytes(self) -> int:
        """Bytes of a multiprocessor from L2 in a cycle, about: A100 35, H200 37, Ada 15 (docs/log/ampere-kernel.md)."""
        return 36 if self.instruction_cycles == 2 else 15

    @classmethod
    @lru_cache
    def of(cls, device: int) -> Card:
        """Return those of a CUDA device."""
        about = torch.cuda.get_device_properties(device)
        whole_rate = (about.major, about.minor) in ((8, 0), (9, 0), (10, 0), (10, 3))
        shared = about.shared_memory_per_multiprocessor - BLOCK_BYTES
        return cls(about.multi_processor_count, shared, 2 if whole_rate else 4)


TILES = (  # those of few tokens split K among warps that need not wait for each other
    MmaTile(4, 12, 4, 2, ahead=False),
    MmaTile(4, 10, 4, 2, ahead=False),
    MmaTile(4, 8, 4, 2),
    MmaTile(4, 6, 4, 2),  # the one with the fewest bytes from L2 for 2:4 in eight bits in 99 KiB of shared memory
    MmaTile(4, 4, 2, 4),
    MmaTile(2, 4, 4, 2),
    MmaTile(4, 4, 2, 2, split=2),
    MmaTile(4, 4, 1, 2, split=4),
    MmaTile(4, 4, 1, 2, split=2),
    MmaTile(4, 4, split=4),
    MmaTile(2, 4, split=4),
    MmaTile(4, 2, split=4),
    MmaTile(2, 2, split=8),
    MmaTile(2, 2, split=4),
)


def choose(tokens: int, channels: int, form: StepForm, itemsize: int, device: int) -> tuple[Band, ...]:
    """Return the launches of a product: see :data:`slidesparse.gemm.launch.Choose`."""
    rounded = -(-tokens // TOKEN_STEP) * TOKEN_STEP  # a choice takes a fifth of a millisecond, a server has any number
    return choose_bands(rounded, channels, form, itemsize, Card.of(device))


@lru_cache(maxsize=1 << 13)
def choose_bands(tokens: int, channels: int, form: StepForm, itemsize: int, card: Card) -> tuple[Band, ...]:
    """Return the cheapest tile; or its full waves, and the channels of its last one in smaller tiles."""
    tile = cheapest(tokens, channels, form, itemsize, card)
    waves = tile.count(tokens, channels) // card.multiprocessors
    own = waves * card.multiprocessors // tile.count(tokens, 1) * tile.channels // TILE_ROWS * TILE_ROWS
    if 0 < own < channels:
        rest = cheapest(tokens, channels - own, form, itemsize, card)
        both = ((tile, own), (rest, channels - own))
        cycles = sum(each.cycles(tokens, part, form, itemsize, card) for each, part in both)
        if cycles + SECOND_LAUNCH < tile.cycles(tokens, channels, form, itemsize, card):
            return tuple(Band(*each) for each in both)
    return (Band(tile, channels),)


@lru_cache(maxsize=64)
def fitting(form: StepForm, itemsize: int, card: Card) -> tuple[MmaTile, ...]:
    """Return the tiles for a form of weight that a card has room for."""
    of_form = (replace(tile, dense=form.dense) for tile in TILES)
    found = (tile.fitted(card.shared_bytes, itemsize, form.value_bits) for tile in of_form)
    return tuple(tile for tile in found if tile is not None)


def cheapest(tokens: int, channels: int, form: StepForm, itemsize: int, card: Card) -> MmaTile:
    """Return the tile with the fewest estimated cycles."""
    return min(fitting(form, itemsize, card), key=lambda tile: tile.cycles(tokens, channels, form, itemsize, card))
