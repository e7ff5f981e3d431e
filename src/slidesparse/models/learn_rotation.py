"""Learn an orthogonal matrix: after the residual stream is rotated by it, patterns remove weights that cost little.

The cost of a weight is estimated as SparseGPT does: the other weights of its row change to replace it. In every group
the two cheapest weights go, so a sum of these costs has a gradient almost everywhere. The matrix is a start times the
Cayley transform of a skew-symmetric one, which Adam changes. Sources: Ashkboos et al., "QuaRot" (2024), for rotations
of the stream; Liu et al., "SpinQuant" (2024), who learn them; Gu et al., "DenoiseRotator" (2025), who learn rotations
for sparsity, by the entropy of such costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

DAMPING = 0.01
"""Share of the mean of a gram matrix's diagonal that is added to it before it is inverted, as SparseGPT does."""

RATE = 0.01
"""Adam's, of a stream of :data:`RATE_WIDTH` channels. It falls with the root of the width, as a step turns the stream
by a number that grows with that root; and along a cosine."""

RATE_WIDTH = 128

MOST_ROWS = 1024
"""Rows of readers, or columns of writers, that the estimate looks at: so a large model's fit in memory."""

SETS_OF_A_STEP = 32
"""Sets of linears that a step looks at, drawn anew each time."""


@dataclass(frozen=True)
class Readers:
    """Linears that read the stream, and what their weights cost.

    Attributes:
        weight: float32 [rows, hidden].
        matrix: The inverse of the gram matrix of their inputs, float32 [hidden, hidden].
        energy: Of these rows' outputs.
    """

    weight: torch.Tensor
    matrix: torch.Tensor
    energy: float

    def costs(self, q: torch.Tensor) -> torch.Tensor:
        """Return what removing each weight costs after rotating by q, float32 [rows, hidden]."""
        return (self.weight @ q).square() / ((self.matrix @ q) * q).sum(0)

    def to(self, device: torch.device) -> Readers:
        """Return the same on a device."""
        return type(self)(self.weight.to(device), self.matrix.to(device), self.energy)


@dataclass(frozen=True)
class Writer:
    """A linear that writes to the stream, and what its weights cost.

    Attributes:
        weight: float32 [hidden, columns].
        each: What a squared weight of each column costs, float32 [columns].
        energy: Of the outputs, and of the share of the columns that are here.
    """

    weight: torch.Tensor
    each: torch.Tensor
    energy: float

    def costs(self, q: torch.Tensor) -> torch.Tensor:
        """Return what removing each weight costs after rotating by q, float32 [hidden, columns]."""
        return (q.T @ self.weight).square() * self.each

    def to(self, device: torch.device) -> Writer:
        """Return the same on a device."""
        return type(self)(self.weight.to(device), self.each.to(device), self.energy)


def readers(weight: torch.Tensor, gram: torch.Tensor, draw: torch.Generator) -> Readers:
    """Return some rows of linears that read one input, at random where there are more than :data:`MOST_ROWS`.

    Args:
        weight: Of all of them, with the norm's gain folded in, float32 [out, hidden].
        gram: Of what they read, float32 [hidden, hidden].
        draw: Draws the rows.
    """
    rows = torch.randperm(len(weight), generator=draw)[:MOST_ROWS].to(weight.device)
    some = weight if len(rows) == len(weight) else weight[rows]
    return Readers(some, damped_inverse(gram), energy(weight, gram) * len(rows) / len(weight))


def writer(weight: torch.Tensor, gram: torch.Tensor, group: int, draw: torch.Generator) -> Writer:
    """Return some groups of a linear's columns, at random where it has more columns than :data:`MOST_ROWS`.

    Args:
        weight: float32 [hidden, in].
        gram: Of what it reads, float32 [in, in].
        group: Columns of a group.
        draw: Draws the groups.
    """
    each, total, columns = damped_inverse(gram).diagonal().reciprocal(), energy(weight, gram), weight.shape[1]
    if columns <= MOST_ROWS:
        return Writer(weight, each, total)
    groups = torch.randperm(columns // group, generator=draw)[: MOST_ROWS // group]
    here = (groups[:, None] * group + torch.arange(group)).flatten().to(weight.device)
    return Writer(weight[:, here], each[here], total * len(here) / columns)


def damped_inverse(gram: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a gram matrix, float32 [in, in]."""
    damped = gram.to(torch.float64, copy=True)
    mean = float(damped.diagonal().mean())
    damped.diagonal().add_(DAMPING * mean if mean else 1.0)  # of inputs that are all zero any matrix will do
    found: torch.Tensor = torch.linalg.inv(damped).to(torch.float32)
    return found


def energy(weight: torch.Tensor, gram: torch.Tensor) -> float:
    """Return the sum of squares of a linear's outputs."""
    return float(((weight @ gram) * weight).sum())


Costed = Readers | Writer


def damage(q: torch.Tensor, one: Costed, group: int) -> torch.Tensor:
    """Return what removing two weights of each group costs after rotating by q, as a share of the outputs' energy."""
    costs = one.costs(q)
    whole = F.pad(costs, (0, -costs.shape[1] % group))  # zeros are removed first
    removed: torch.Tensor = whole.unflatten(1, (-1, group)).topk(2, dim=-1, largest=False).values.sum() / one.energy
    return removed


@torch.no_grad()
def mean_damage(q: torch.Tensor, sets: Sequence[Costed], group: int) -> float:
    """Return the damage of all sets on average."""
    return sum(float(damage(q, one.to(q.device), group)) for one in sets) / len(sets)


def learn(
    start: torch.Tensor,
    sets: Sequence[Costed],
    group: int,
    steps: int,
    *,
    seed: int = 0,
    advance: Callable[[int, str], None] = lambda amount, note: None,
) -> torch.Tensor:
    """Return an orthogonal matrix, float32 [hidden, hidden], at which the damage is nearly a local minimum.

    Args:
        start: An orthogonal matrix, float32 [hidden, hidden], on the device that computes.
        sets: On any device.
        group: Columns of a group of the pattern.
        steps: Of Adam.
        seed: Draws the sets of each step.
        advance: Is called after each step with 1 and the damage of its sets.
    """
    free = nn.Parameter(torch.zeros_like(start))
    optimizer = torch.optim.Adam([free], RATE * (RATE_WIDTH / len(start)) ** 0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        some = torch.randperm(len(sets), generator=draw)[:SETS_OF_A_STEP].tolist()
        with torch.enable_grad():
            q = start @ cayley(free)
            at = q.detach().requires_grad_()
            total = 0.0
            for number in some:  # one after the other, so that the memory of one is enough
                loss = damage(at, sets[number].to(start.device), group) / len(some)
                loss.backward()
                total += float(loss.detach())
            optimizer.zero_grad()
            q.backward(at.grad)
        optimizer.step()
        schedule.step()
        advance(1, f"removes {total:.2e}")
    exact = start.to(torch.float64) @ cayley(free.detach().to(torch.float64))
    return exact.to(torch.float32)


def cayley(free: torch.Tensor) -> torch.Tensor:
    """Return the orthogonal matrix of the skew-symmetric share of any matrix."""
    skew, one = free - free.T, torch.eye(len(free), device=free.device, dtype=free.dtype)
    found: torch.Tensor = torch.linalg.solve(one + skew, one - skew)
    return found


def random_rotation(size: int, seed: int) -> torch.Tensor:
    """Return a random orthogonal matrix, float32 [size, size]: Hadamard's where the size is a power of two."""
    draw = torch.Generator().manual_seed(seed)
    if size & (size - 1) == 0:
        signs = torch.randint(0, 2, (size,), generator=draw) * 2 - 1
        return signs[:, None] * hadamard(size)
    found: torch.Tensor = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))[0]
    return found.to(torch.float32)


def hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's orthogonal matrix with entries of one magnitude, float32 [size, size]; a power of two.

    >>> hadamard(4).sign().int().tolist()
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    found: torch.Tensor = matrix / size**0.5
    return found
