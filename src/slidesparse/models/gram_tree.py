"""Gram matrices of parts of a text, summed in the same order whichever process computed them.

The batches of a calibration text are split into :data:`SHARES` shares. A share is summed batch by batch, and shares
are summed as a binary tree. So the sum has the same bits whether one process has all shares or each has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slidesparse.base.rank_tensors import RankTensors

SHARES = 8
"""Shares of a text, a power of two. More would let more processes run batches, and cost a process one more matrix for
each doubling."""

BATCH_TOKENS = 8192
"""Tokens that go through a layer at a time."""

LEAST_TOKENS = 1024
"""Fewest tokens that are worth a batch of their own for another process."""


def windows_of_a_batch(windows: torch.Tensor) -> int:
    """Return the number of text windows in a batch: few enough that each share of a long text has some."""
    samples, length = windows.shape
    return max(min(BATCH_TOKENS // length, max(-(-samples // SHARES), LEAST_TOKENS // length)), 1)


@dataclass(frozen=True)
class Shares:
    """Assignment of the ``n_batches`` batches of a text to ``world`` processes."""

    n_batches: int
    world: int

    def batches(self, share: int) -> range:
        """Return the batches of a share; a share has none where there are fewer batches than shares."""
        return range(self.n_batches * share // SHARES, self.n_batches * (share + 1) // SHARES)

    def rank(self, share: int) -> int:
        """Return the process that runs a share."""
        return share * self.world // SHARES

    def of(self, rank: int) -> list[int]:
        """Return the shares of a process, which are consecutive."""
        return [share for share in range(SHARES) if self.rank(share) == rank]

    def are_empty(self, begin: int, end: int) -> bool:
        """Whether shares have no batches."""
        return self.batches(begin).start == self.batches(end - 1).stop

    def holder(self, begin: int, end: int) -> int | None:
        """Return the one process that runs all these shares, or None."""
        rank = self.rank(begin)
        return rank if rank == self.rank(end - 1) else None


Grams = Mapping[str, torch.Tensor]
"""Name -> gram matrix, float32 [in, in]."""


@dataclass
class GramTree:
    """The partial sums of one process over its own shares.

    Attributes:
        shares: The assignment of batches.
        nodes: (first share, share after the last) -> gram matrices by linear.
    """

    shares: Shares
    nodes: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)

    def add(self, share: int, grams: Grams) -> None:
        """Add the matrices of a share, and sum complete pairs; shares come in order, empty ones without matrices."""
        begin, end = share, share + 1
        here = dict(grams)
        while True:
            size = end - begin
            left = (begin - size, begin)
            if begin % (2 * size) == 0 or left not in self.nodes:
                break
            here = _sum(self.nodes.pop(left), here)
            begin -= size
        self.nodes[begin, end] = here

    def total(self, name: str, columns: int, to: int, tensors: RankTensors) -> torch.Tensor | None:
        """Return the sum over all shares at one process, and None at the others; all call this together."""
        return _Transfer(self, name, columns, tensors).bring(0, SHARES, to)


@dataclass(frozen=True)
class _Transfer:
    """Sums one linear's matrices over processes; every process walks through all of it."""

    tree: GramTree
    name: str
    columns: int
    tensors: RankTensors

    def bring(self, begin: int, end: int, to: int) -> torch.Tensor | None:
        """Return the sum of some shares at process ``to``; None elsewhere, and where the shares have no batches."""
        shares = self.tree.shares
        if shares.are_empty(begin, end):
            return None
        holder = shares.holder(begin, end)
        if holder is not None:
            own = self.tree.nodes[begin, end].pop(self.name) if holder == self._rank else None
            return self._move(own, holder, to)
        middle = (begin + end) // 2
        # Two halves are added at the first one's process, so that pairs of processes add at the same time.
        at = to if (begin, end) == (0, SHARES) else shares.rank(begin)
        left, right = self.bring(begin, middle, at), self.bring(middle, end, at)
        return self._move(_plus(left, right) if self._rank == at else None, at, to)

    def _move(self, tensor: torch.Tensor | None, source: int, to: int) -> torch.Tensor | None:
        if source == to:
            return tensor
        if self._rank == source:
            assert tensor is not None
            self.tensors.send(tensor, to)
        elif self._rank == to:
            return self.tensors.receive((self.columns, self.columns), torch.float32, source)
        return None

    @property
    def _rank(self) -> int:
        return self.tensors.ranks.rank


def _sum(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = dict.fromkeys([*left, *right])
    sums: dict[str, Any] = {name: _plus(left.get(name), right.pop(name, None)) for name in names}
    return sums


def _plus(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return a sum in the place of its first term; a term that is missing is zero."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
