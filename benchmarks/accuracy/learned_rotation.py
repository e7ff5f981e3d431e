"""The two costs by which a rotation of the residual stream is learned, for the linears of a Llama in memory.

``inverse`` is that of ``prune --rotate``: the other weights change to replace the one that is removed, as SparseGPT has
it. By ``gram`` they stay as they are, as Wanda has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from slidesparse.models.learn_rotation import Costed, Readers, Writer, energy, readers, writer

COSTS = ("gram", "inverse")
"""What a weight costs: with the others as they are (Wanda), or with the others changed to replace it (SparseGPT)."""

STEPS = 300


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


class ReadersAlone(Readers):
    """Linears of which no weight replaces another; the matrix is the gram matrix itself."""

    def costs(self, q: torch.Tensor) -> torch.Tensor:
        """What removing each weight costs after rotating by q, float32 [out, in]."""
        return (self.weight @ q).square() * ((self.matrix @ q) * q).sum(0)


def costed(read: Read, cost: str, group: int) -> Costed:
    """Prepare linears for one of the costs, and a pattern with groups of this many columns."""
    draw = torch.Generator().manual_seed(0)
    if cost == "inverse":
        return (
            readers(read.weight, read.gram, draw) if read.from_stream else writer(read.weight, read.gram, group, draw)
        )
    total = energy(read.weight, read.gram)
    if read.from_stream:
        return ReadersAlone(read.weight, read.gram, total)
    return Writer(read.weight, read.gram.diagonal(), total)


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
