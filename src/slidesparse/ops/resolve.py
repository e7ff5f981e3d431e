"""Runners of linears and chains for a number of tokens: made once, then looked up by every call.

A server has few linears and many numbers of tokens: the first call with a new number takes some twenty microseconds a
linear here, later calls one look-up. With the logger ``slidesparse`` at DEBUG every new runner is logged: ``1024
tokens, 4608 outputs, int8: hopper 176x256``.

A chain of four linears takes 13 KB of the host's memory for each number of tokens, so chains for all numbers take
52 MB; the least recently used ones are made again.
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
"""Return the cached lift of a spec for a number of tokens on a device."""


class ResolvedLinear(NamedTuple):
    """The runner of a linear for one number of tokens.

    Attributes:
        runner: The runner.
        form: Slice of the operator's tensors: the weight's form.
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

    ``weight`` is a :attr:`slidesparse.gemm.spec.WeightSpec.text`.

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
    """Return the list of a linear's last runner, for any number of tokens; empty at first."""
    return []


@lru_cache(maxsize=1 << 12)
def resolve_chain(linears: str, tokens: int, source: torch.dtype, device: torch.device) -> tuple[ChainRunner, ...]:
    """Return the runners of a ``chain_text`` for M ``tokens``, one for neighbouring linears on one backend.

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
    resolved, start = [], 0
    for spec in linears:
        linear = resolve_linear(spec.weight.text, spec.prologue, tokens, source, device)
        resolved.append((linear, slots_of(spec, start, tokens)))
        start += spec.tensors
    return resolved
