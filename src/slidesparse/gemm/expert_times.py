"""Measured times of the experts of a mixture, and the rule by which ``auto`` packs them.

Times of experts are in the files of linears (gemm/speed_files.py), as of a layer with the sizes of gate and up. All
experts of a layer run in one form for every number of tokens, since a dense copy would double most of a model. Neither
decoding steps of up to :data:`DECODING` sequences nor prompts may become slower than stock. Experts are packed where

* neither decoding steps nor prompts take longer than stock on average (the geometric mean over the measured M's,
  within a factor :data:`slidesparse.gemm.time_model.MARGIN` of noise), and
* no M takes more than :data:`SLOWER` of stock's time. Short measurements of one M differ by some percent from start
  to start, and so would a rule of "nowhere slower".

Experts with a wrong packed form on this installation stay dense. A start without time for every M goes by the measured
ones; without any decoding step, or any prompt, experts stay dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slidesparse.gemm.backend import Problem
from slidesparse.gemm.select import WRONG_HERE, find_measured, installation, wrong_among, wrong_form
from slidesparse.gemm.speed import DENSE_FORM, MEASURED_HERE, Experts, LayerSpeed, times_key
from slidesparse.gemm.speed_files import add_layers
from slidesparse.gemm.time_model import MARGIN, explain
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import dtype_name

GROUPED = "hopper"
"""The backend whose kernel multiplies by experts."""

NOT_MEASURED = "experts like them have not been measured on this GPU"

DECODING = 256
"""Most tokens of a decoding step."""

SLOWER = 1.1
"""Most time of packed experts over stock's, at any M."""


@dataclass(frozen=True)
class ExpertKind:
    """A kind of experts: layers of one kind take the same time.

    Attributes:
        dtype: Type of the weights.
        pattern: The pattern of gate and up.
        down: The pattern of down.
        hidden: Columns of gate and up.
        inner: Columns of down, on this GPU.
        experts: Experts on this GPU; ``everywhere``: on all GPUs.
        top_k: Experts of a token.
        device: The GPU.
        bits: Bits of a kept value in memory, 6 where all values fit them.
    """

    dtype: torch.dtype
    pattern: Pattern
    down: Pattern
    hidden: int
    inner: int
    experts: int
    everywhere: int
    top_k: int
    device: torch.device
    bits: int = 8

    def __str__(self) -> str:
        """Return ``int8 128 experts 1536x2048 6:8``."""
        return f"{dtype_name(self.dtype)} {self.experts} experts {2 * self.inner}x{self.hidden} {self.form}"

    @property
    def form(self) -> str:
        """Their distinct patterns as text, with the bits of their values if not eight."""
        bits = "" if self.bits == 8 else f", {self.bits} bits"
        return " and ".join(dict.fromkeys(map(str, (self.pattern, self.down)))) + bits

    @property
    def problem(self) -> Problem:
        """The problem of gate and up, with the experts: its times are those of the whole layer."""
        down = None if self.down == self.pattern else str(self.down)
        experts = Experts(self.experts, self.everywhere, self.top_k, down, self.bits)
        sizes = 2 * self.inner, self.hidden
        return Problem(self.pattern, self.dtype, *sizes, self.device, bits=self.bits, experts=experts)


@dataclass(frozen=True)
class ExpertChoice:
    """The choice of packed or dense experts, and its reason."""

    sparse: bool
    reason: str


def choose_experts(kind: ExpertKind, tokens: Sequence[int]) -> ExpertChoice:
    """Choose by the rule at the top of this file; ``tokens`` represent all numbers M of the engine."""
    if was_wrong(kind):
        return ExpertChoice(False, f"{GROUPED}: {WRONG_HERE}")
    measured = find_expert_times(kind)
    if measured is None:
        return ExpertChoice(False, NOT_MEASURED)
    reason = f"{explain(measured)}; {MEASURED_HERE}"
    missing = {_is_decoding(m) for m in tokens} - {_is_decoding(m) for m in measured.tokens}
    if missing:
        why = "no decoding step was measured" if True in missing else "no prompt was measured"
        return ExpertChoice(False, f"{reason}; {why}")
    return ExpertChoice(pays(measured), reason)


def pays(layer: LayerSpeed) -> bool:
    """Return whether packed experts are worth it, by their times and stock's; False if one is missing."""
    shares: dict[bool, list[float]] = {}
    for m, dense, packed in zip(layer.tokens, layer.us[DENSE_FORM], layer.us[GROUPED], strict=True):
        if dense is None or packed is None or packed > SLOWER * dense:
            return False
        shares.setdefault(_is_decoding(m), []).append(packed / dense)
    return all(math.exp(sum(map(math.log, phase)) / len(phase)) <= MARGIN for phase in shares.values())


def _is_decoding(tokens: int) -> bool:
    return tokens <= DECODING


def find_expert_times(kind: ExpertKind) -> LayerSpeed | None:
    """Return the times of a kind of experts here; None without any."""
    return find_measured(kind.problem, (DENSE_FORM, GROUPED))


def measured_here(kind: ExpertKind) -> tuple[int, ...]:
    """Return the M's at which these experts were measured on this installation."""
    measured = find_expert_times(kind)
    return () if measured is None else measured.tokens


def was_wrong(kind: ExpertKind) -> bool:
    """Return whether packed experts of a kind had a wrong result on this installation."""
    return bool(wrong_among([GROUPED], kind.problem))


def keep_expert_times(kind: ExpertKind, layer: LayerSpeed | None, wrong: Iterable[str] = ()) -> Path | None:
    """Store times of experts, by ``dense`` and :data:`GROUPED`, and wrong forms: see ``add_layers``."""
    problem, layers = kind.problem, []
    if layer is not None:
        us = {times_key(name, str(kind.pattern)): times for name, times in layer.us.items()}
        layers = [replace(layer, us=us, experts=problem.experts)]
    return add_layers(installation(kind.device), layers, [wrong_form(problem, name) for name in wrong])
