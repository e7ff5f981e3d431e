"""An orthogonal matrix that is learned: the residual stream is rotated so that what a pattern removes costs little.

What it costs is estimated as a pruning method would, weight by weight. The two cheapest weights of every group are
removed, so a sum of these costs has a gradient almost everywhere. The matrix is a start times the Cayley transform of a
skew-symmetric one, which Adam changes. Gu et al., "DenoiseRotator" (2025), learn rotations for sparsity too, by the
entropy of such costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

COSTS = ("gram", "inverse")
"""What a weight costs: with the others as they are (Wanda), or with the others changed to replace it (SparseGPT)."""

DAMPING = 0.01
"""Share of the mean of a gram matrix's diagonal that is added to it before it is inverted, as SparseGPT does."""

STEPS, RATE = 300, 0.01


class Read(NamedTuple):
    """Linears that read one input.

    Attributes:
        weight: float32 [out, in].
        gram: Of their inputs, float32 [in, in].
        from_stream: They read the residual stream; otherwise they write to it.
    """

    weight: torch.Tensor
    gram: torch.Tensor
    from_stream: bool


class Costed(NamedTuple):
    """The same, with all that does not change with the rotation.

    Attributes:
        weight: float32 [out, in].
        matrix: The gram matrix or its inverse, float32 [in, in].
        from_stream: See :class:`Read`.
        inverted: The matrix is the inverse.
        energy: Of the outputs.
    """

    weight: torch.Tensor
    matrix: torch.Tensor
    from_stream: bool
    inverted: bool
    energy: torch.Tensor

    def of_columns(self, q: torch.Tensor) -> torch.Tensor:
        """What a squared weight of each column costs after rotating by q, float32 [in]."""
        diagonal = ((self.matrix @ q) * q).sum(0) if self.from_stream else self.matrix.diagonal()
        return 1.0 / diagonal if self.inverted else diagonal


def costed(read: Read, cost: str) -> Costed:
    """Prepare linears for one of the costs."""
    matrix, inverted = read.gram, cost == "inverse"
    if inverted:
        damped = read.gram.to(torch.float64, copy=True)
        damped.diagonal().add_(DAMPING * damped.diagonal().mean())
        matrix = torch.linalg.inv(damped).to(torch.float32)
    return Costed(read.weight, matrix, read.from_stream, inverted, ((read.weight @ read.gram) * read.weight).sum())


@torch.no_grad()
def reads(model: Any, batches: list[dict[str, Any]]) -> list[Read]:
    """All linears of the layers of a Llama with folded gains, and the gram matrices of what they read."""
    sets = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        sets += [([attention.q_proj, attention.k_proj, attention.v_proj], True), ([attention.o_proj], False)]
        sets += [([mlp.gate_proj, mlp.up_proj], True), ([mlp.down_proj], False)]
    grams = [one[0].weight.new_zeros(one[0].in_features, one[0].in_features) for one, _ in sets]
    with watched([one[0] for one, _ in sets], grams):
        for batch in batches:
            model(**batch)
    return [
        Read(torch.cat([linear.weight for linear in linears]).clone(), gram, from_stream)
        for (linears, from_stream), gram in zip(sets, grams, strict=True)
    ]


@contextmanager
def watched(linears: list[Any], grams: list[torch.Tensor]) -> Iterator[None]:
    """Add up the gram matrices of what linears read meanwhile."""

    def see(gram: torch.Tensor, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2)
        gram += x.T @ x

    hooks = [one.register_forward_pre_hook(partial(see, gram)) for one, gram in zip(linears, grams, strict=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def damage(q: torch.Tensor, found: list[Costed], group: int) -> torch.Tensor:
    """What removing two weights of each group costs after rotating by q: a share of the outputs' energy, on average."""
    shares = []
    for one in found:
        weight = one.weight @ q if one.from_stream else q.T @ one.weight
        costs = F.pad(weight.square() * one.of_columns(q), (0, -weight.shape[1] % group))  # zeros are removed first
        shares.append(costs.unflatten(1, (-1, group)).topk(2, dim=-1, largest=False).values.sum() / one.energy)
    return torch.stack(shares).mean()


def learn(start: torch.Tensor, found: list[Costed], group: int) -> torch.Tensor:
    """Return an orthogonal matrix, float32 [hidden, hidden], at which the damage is nearly a local minimum."""
    free = torch.zeros_like(start, requires_grad=True)
    optimizer = torch.optim.Adam([free], RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        loss = damage(start @ cayley(free), found, group)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return start @ cayley(free).detach()


def cayley(free: torch.Tensor) -> torch.Tensor:
    """The orthogonal matrix of the skew-symmetric part of any matrix."""
    skew, one = free - free.T, torch.eye(len(free), device=free.device)
    found: torch.Tensor = torch.linalg.solve(one + skew, one - skew)
    return found
