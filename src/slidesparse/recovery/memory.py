"""Memory of a run on each GPU, and the settings that make it fit."""

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
"""Bytes of a trained parameter (float32 weight, gradient and two moments of Adam), of a frozen one, and of one of the
dense model."""

FEW = 8
"""Micro-batch below which a GPU waits for its host: then gradient checkpointing costs less."""

SPARE = 0.92
"""Share of the free memory that a run may fill; the rest is for fragmentation and for the libraries."""

LOGITS = 6 * 4 * CHUNK
"""Bytes of a chunk of logits of both models, and of the values computed from them."""


@dataclass(frozen=True)
class Fit:
    """Settings with which a run fits a GPU.

    ``micro_batch`` is in windows. ``sync_each`` divides gradients among processes after each micro-batch instead of
    once a step, which takes less memory.
    """

    micro_batch: int
    gradient_checkpointing: bool
    sync_each: bool = False

    @classmethod
    def of_all(cls, fits: Sequence[Sequence[int]]) -> Fit:
        """Return the settings that fit every process, of those that each of them chose (as lists of the fields)."""
        return cls(min(one[0] for one in fits), any(one[1] for one in fits), any(one[2] for one in fits))


def activation_bytes(config: Any, tokens: int, gradient_checkpointing: bool) -> int:
    """Return roughly the bytes that transformers' layers keep for the backward pass, in BF16 with norms in float32.

    A token keeps some 24 hidden states and 8 inner states of the MLP in each layer (measured on layers of Llama's
    form); with gradient checkpointing one hidden state in each layer, and all of them in one.
    """
    config = text_config(config)
    width, layers = int(config.hidden_size), int(config.num_hidden_layers)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    layer = 2 * (24 * width + 8 * inner)
    return tokens * (2 * width * layers + layer if gradient_checkpointing else layers * layer)


@dataclass(frozen=True)
class Size:
    """Size of a model: all its parameters, and the trained ones."""

    parameters: int
    trained: int
    config: Any


def needed_bytes(size: Size, options: RecoverOptions, world: int, fit: Fit) -> int:
    """Return roughly the bytes that each of ``world`` GPUs needs, among which the model is divided."""
    frozen = size.parameters - size.trained
    state = (STATE * size.trained + FROZEN * frozen + DENSE * size.parameters) / world
    whole = 2 * size.parameters if world == 1 else 4 * size.trained * (not fit.sync_each)  # BF16; gradients
    tokens = fit.micro_batch * options.window
    logits = min(LOGITS, 24 * vocabulary_of(size.config) * tokens)
    return int(state + whole + logits + activation_bytes(size.config, tokens, fit.gradient_checkpointing))


def fit_memory(size: Size, options: RecoverOptions, world: int, device: torch.device) -> Fit:
    """Return the fastest settings that fit the memory, or raise an UnsupportedError that says how much is needed."""
    checkpointing = {"auto": (False, True), "on": (True,), "off": (False,)}[options.gradient_checkpointing]
    most = min(options.micro_batch, max(1, options.windows // world))
    if device.type != "cuda":
        return Fit(most, checkpointing[0], world == 1)
    free = SPARE * torch.cuda.mem_get_info(device)[0]
    halves = [most >> times for times in range(most.bit_length())]  # 32, 16, ... 1
    fits = [
        Fit(micro_batch, on, sync)
        for sync in ((False, True) if world > 1 else (True,))
        for on in checkpointing
        for micro_batch in halves
        if micro_batch >= FEW or on
    ]
    fits += [Fit(micro_batch, checkpointing[-1], True) for micro_batch in halves]
    for fit in fits:
        if needed_bytes(size, options, world, fit) <= free:
            return fit
    least = needed_bytes(size, options, world, fits[-1])
    what = f"the memory of {device} is too small to train {size.parameters / 1e9:.2g} G parameters on {world} of them"
    remedy = "use more GPUs (torchrun --nproc-per-node), or a shorter --window"
    got, needed = f"{readable_size(free)} free", f"about {readable_size(least)}"
    raise UnsupportedError(what, got=got, needed=needed, remedy=remedy)
