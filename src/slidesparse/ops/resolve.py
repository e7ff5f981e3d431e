"""Find the runner of a linear, or of a chain, for a number of tokens: made once, then looked up by every call.

A model has few linears, and a server has many numbers of tokens: the first call with a new number takes some twenty
microseconds a linear here, later calls one look-up. What does not depend on the number is made once. With the logger
``slidesparse`` at DEBUG every runner is named when it is made: ``1024 tokens, 4608 outputs, int8: hopper 176x256``.

A chain of four linears keeps 13 KB of the host's memory for each number of tokens, so the chains of a server that has
met all numbers keep 52 MB; the least recently used ones are made again.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch

from slidesparse.base.log import LOG
from slidesparse.gemm.backend import ChainRunner, Runner
from slidesparse.gemm.select import get_backend
from slidesparse.gemm.spec import LinearSpec, Slots, parse_chain, parse_weight, slots_of
from slidesparse.lifting.choose import find_lift
from slidesparse.lifting.layout import LiftSpec
from slidesparse.lifting.prologue import Prologue

resolve_lift = lru_cache(maxsize=1 << 13)(find_lift)
"""Return the lift of a spec, for a number of tokens on a device, kept from call to call."""


class ResolvedLinear(NamedTuple):
    """The runner of a linear for one number of tokens.

    Attributes:
        runner: The runner.
        form: The operator's tensors that are the form of the weight that runs.
        backend: The backend's name.
    """

    runner: Runner
    form: slice
    backend: str


@lru_cache(maxsize=1 << 13)
def resolve_linear(
    weight: str, prologue: Prologue, tokens: int, source: torch.dtype, device: torch.device
) -> ResolvedLinear:
    """Return the runner of a linear for M ``tokens`` of type ``source`` on a device.

    ``weight`` is :attr:`slidesparse.gemm.spec.WeightSpec.text`; the prologue is applied first.

    Raises:
        UnsupportedError: A kernel cannot be loaded.
    """
    spec = parse_weight(weight)
    form, start = spec.pick(tokens)
    made = _made_before(weight, prologue, form.backend, source, device)
    backend = get_backend(form.backend)
    runner = backend.runner_for_tokens(made[0], tokens) if made else None
    if runner is None:
        lifting = LiftSpec(prologue, source, spec.weight_dtype, form.order, backend.layout, spec.activation_rounding)
        runner = backend.runner(resolve_lift(lifting, tokens, device), spec.out_features)
        made[:] = [runner]
    LOG.debug("%d tokens, %d outputs, %s: %r", tokens, spec.out_features, spec.dtype, runner)
    return ResolvedLinear(runner, slice(start, start + form.tensors), form.backend)


@lru_cache(maxsize=1 << 12)
def _made_before(
    weight: str, prologue: Prologue, backend: str, source: torch.dtype, device: torch.device
) -> list[Runner]:
    """Return the list that keeps the runner of a linear that was made last, for any number of tokens, or nothing."""
    return []


@lru_cache(maxsize=1 << 12)
def resolve_chain(linears: str, tokens: int, source: torch.dtype, device: torch.device) -> tuple[ChainRunner, ...]:
    """Return the runners of a ``chain_text`` for M ``tokens``: neighbouring linears on one backend share a runner.

    Raises:
        UnsupportedError: A kernel cannot be loaded.
    """
    resolved = _resolve_each(parse_chain(linears), tokens, source, device)
    runners = []
    for name, group in groupby(resolved, key=lambda each: each[0].backend):
        runners.append(get_backend(name).chain_runner([(linear.runner, slots) for linear, slots in group]))
    LOG.debug("%d tokens: %r", tokens, runners)
    return tuple(runners)


def _resolve_each(
    linears: tuple[LinearSpec, ...], tokens: int, source: torch.dtype, device: torch.device
) -> list[tuple[ResolvedLinear, Slots]]:
    found, start = [], 0
    for spec in linears:
        linear = resolve_linear(spec.weight.text, spec.prologue, tokens, source, device)
        found.append((linear, slots_of(spec, start, tokens)))
        start += spec.tensors
    return found
