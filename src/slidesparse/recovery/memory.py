"""How much memory a run takes on each GPU, and what is done about it before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slidesparse.base.readable_size import readable_size
from slidesparse.errors import UnsupportedError
from slidesparse.models.causal import vocabulary_of
from slidesparse.models.parts import text_config
from slidesparse.recovery.loss import CHUNK
from slidesparse.recovery.options import RecoverOptions

STATE, FROZEN, DENSE = 16, 4, 2
"""Bytes of a trained parameter: the float32 weight, its gradient, and two moments of Adam; of one that is not trained;
and of the dense model's."""

FEW = 8
"""Windows at a time below which a GPU waits for its host: then computing activations again costs less."""

SPARE = 0.92
"""The share of the free memory that a run may fill; the rest is for what splits it, and for the libraries."""

LOGITS = 6 * 4 * CHUNK
"""Bytes of a chunk of logits, of both models, and of what is computed from them."""


@dataclass(frozen=True)
class Fit:
    """How a run fits a GPU: ``micro`` windows at a time, with activations computed again in the backward pass or not.

    ``sync_each``: gradients are divided among processes after each micro-batch, not once a step, which takes less
    memory.
    """

    micro: int
    recompute: bool
    sync_each: bool = False

    @classmethod
    def of_all(cls, fits: Sequence[Sequence[int]]) -> Fit:
        """Return the one that fits each process, of those that they found (as lists of their fields)."""
        return cls(min(one[0] for one in fits), any(one[1] for one in fits), any(one[2] for one in fits))


def activation_bytes(config: Any, tokens: int, recompute: bool) -> int:
    """Return about how much transformers' layers keep for the backward pass, in BF16 with norms in float32.

    A token keeps some 24 hidden states and 8 inner states of the MLP in each layer (measured on layers of Llama's
    form); computed again, one hidden state in each and all of it in one layer.
    """
    config = text_config(config)
    width, layers = int(config.hidden_size), int(config.num_hidden_layers)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    layer = 2 * (24 * width + 8 * inner)
    return tokens * (2 * width * layers + layer if recompute else layers * layer)


@dataclass(frozen=True)
class Size:
    """A model's config, and how many parameters it has and trains."""

    parameters: int
    trained: int
    config: Any


def needed_bytes(size: Size, options: RecoverOptions, world: int, fit: Fit) -> int:
    """Return about how much memory each of ``world`` GPUs needs, among which the model is divided."""
    frozen = size.parameters - size.trained
    state = (STATE * size.trained + FROZEN * frozen + DENSE * size.parameters) / world
    whole = 2 * size.parameters if world == 1 else 4 * size.trained * (not fit.sync_each)  # BF16; gradients
    tokens = fit.micro * options.window
    logits = min(LOGITS, 24 * vocabulary_of(size.config) * tokens)
    return int(state + whole + logits + activation_bytes(size.config, tokens, fit.recompute))


def fit_memory(size: Size, options: RecoverOptions, world: int, device: torch.device) -> Fit:
    """Choose how a run fits the memory, as fast as it can, or raise an UnsupportedError that says how much it needs."""
    recompute = {"auto": (False, True), "on": (True,), "off": (False,)}[options.recompute]
    micro = min(options.micro, max(1, options.windows // world))
    if device.type != "cuda":
        return Fit(micro, recompute[0], world == 1)
    free = SPARE * torch.cuda.mem_get_info(device)[0]
    halves = [micro >> times for times in range(micro.bit_length())]  # 32, 16, ... 1
    fits = [
        Fit(few, again, sync)
        for sync in ((False, True) if world > 1 else (True,))
        for again in recompute
        for few in halves
        if few >= FEW or again
    ]
    fits += [Fit(few, recompute[-1], True) for few in halves]
    for fit in fits:
        if needed_bytes(size, options, world, fit) <= free:
            return fit
    least = needed_bytes(size, options, world, fits[-1])
    what = f"the memory of {device} is too small to train {size.parameters / 1e9:.2g} G parameters on {world} of them"
    told = {"got": f"{readable_size(free)} free", "needed": f"about {readable_size(least)}"}
    raise UnsupportedError(what, **told, remedy="use more GPUs (torchrun --nproc-per-node), or a shorter --window")
