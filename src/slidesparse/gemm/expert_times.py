"""Measured times of the experts of a mixture, and the rule by which ``auto`` packs them.

Times of experts lie in the files of linears (gemm/speed_files.py), as those of a layer with the sizes of gate and up.
All experts of a layer run in one form for every number of tokens: a
dense copy would double most of a model. So one choice weighs decoding steps of up to :data:`DECODING` sequences and
prompts; a user who notices one of them slower than stock has lost, whatever the other gains. Experts are packed where

* neither the decoding steps nor the prompts take longer than stock on average (the geometric mean over the M's
  measured, a factor :data:`slidesparse.gemm.time_model.MARGIN` aside, which noise could make), and
* no M takes more than :data:`SLOWER` of stock's time. Short measurements of one M differ by some percent from start
  to start, so a rule of "nowhere slower" would differ from start to start too.

Experts whose packed form was wrong when it was measured here stay dense, whatever any times say. A start that had no
time for every M goes by those that it measured; where a whole one of the two ways was not measured, experts stay dense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slidesparse.gemm.select import WRONG_HERE, can_be_timed, installation
from slidesparse.gemm.speed import (
    DENSE_FORM,
    Experts,
    LayerSpeed,
    MeasuredLayer,
    WrongForm,
    find_nearest,
    is_wrong,
    times_key,
)
from slidesparse.gemm.speed_files import add_layers, tables_for
from slidesparse.gemm.time_model import MARGIN, explain
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import dtype_name

GROUPED = "hopper"
"""The backend whose kernel multiplies by experts."""

NOT_MEASURED = "experts like them have not been measured on this GPU"

DECODING = 256
"""The most tokens of what counts as a decoding step."""

SLOWER = 1.1
"""The most of stock's time that packed experts may take at any M."""


@dataclass(frozen=True)
class ExpertKind:
    """A kind of experts, whose layers take the same time.

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
    def measured(self) -> Experts:
        """The experts of a layer that has their times."""
        down = None if self.down == self.pattern else str(self.down)
        return Experts(self.experts, self.everywhere, self.top_k, down, self.bits)

    def wrong_form(self, form: str) -> WrongForm:
        """Return by what a file names a form that was wrong."""
        name = times_key(form, str(self.pattern))
        return WrongForm(dtype_name(self.dtype), 2 * self.inner, self.hidden, name, self.measured)


@dataclass(frozen=True)
class ExpertChoice:
    """Whether experts run packed, and why."""

    sparse: bool
    reason: str


def choose_experts(kind: ExpertKind, tokens: Sequence[int]) -> ExpertChoice:
    """Choose by the rule at the top of this file; ``tokens`` represent all numbers M that the engine may run."""
    if was_wrong(kind):
        return ExpertChoice(False, f"{GROUPED}: {WRONG_HERE}")
    measured = find_expert_times(kind)
    if measured is None:
        return ExpertChoice(False, NOT_MEASURED)
    reason = f"{explain(measured.layer)}; {measured.describe()}"
    missing = {_is_decoding(m) for m in tokens} - {_is_decoding(m) for m in measured.layer.tokens}
    if missing:
        why = "no decoding step was measured" if True in missing else "no prompt was measured"
        return ExpertChoice(False, f"{reason}; {why}")
    return ExpertChoice(pays(measured.layer), reason)


def pays(layer: LayerSpeed) -> bool:
    """Return whether packed experts are worth it, by their times and stock's; False where one of them is missing."""
    shares: dict[bool, list[float]] = {}
    for m, dense, packed in zip(layer.tokens, layer.us[DENSE_FORM], layer.us[GROUPED], strict=True):
        if dense is None or packed is None or packed > SLOWER * dense:
            return False
        shares.setdefault(_is_decoding(m), []).append(packed / dense)
    return all(math.exp(sum(map(math.log, phase)) / len(phase)) <= MARGIN for phase in shares.values())


def _is_decoding(tokens: int) -> bool:
    return tokens <= DECODING


def find_expert_times(kind: ExpertKind) -> MeasuredLayer | None:
    """Return the times of experts that are nearest to a kind: measured here, else a prior; None without any.

    Times of eight bits are a prior for six, which take fewer bytes.
    """
    if not can_be_timed(kind.device):
        return None
    here = installation(kind.device)
    compared = replace(here, libraries={name: here.libraries[name] for name in (DENSE_FORM, GROUPED)})
    layer = dtype_name(kind.dtype), str(kind.pattern), 2 * kind.inner, kind.hidden, kind.measured
    found = find_nearest(tables_for(here), compared, *layer)
    if found is not None or kind.bits == 8:
        return found
    wider = find_expert_times(replace(kind, bits=8))
    return None if wider is None else replace(wider, here=(), others=(*wider.others, ("8 bits", f"{kind.bits} bits")))


def measured_here(kind: ExpertKind) -> tuple[int, ...]:
    """Return the M's at which these experts were measured on this very installation."""
    measured = find_expert_times(kind)
    return () if measured is None else measured.here


def was_wrong(kind: ExpertKind) -> bool:
    """Return whether packed experts of a kind gave a wrong result when they were measured on this very installation."""
    if not can_be_timed(kind.device):
        return False
    here = installation(kind.device)
    return is_wrong(tables_for(here), here, GROUPED, kind.wrong_form(GROUPED))


def keep_expert_times(kind: ExpertKind, layer: LayerSpeed | None, wrong: Iterable[str] = ()) -> Path | None:
    """Keep times of experts, by ``dense`` and :data:`GROUPED`, and the forms that were wrong: see ``add_layers``."""
    layers = []
    if layer is not None:
        us = {times_key(name, str(kind.pattern)): times for name, times in layer.us.items()}
        layers = [replace(layer, us=us, experts=kind.measured)]
    return add_layers(installation(kind.device), layers, map(kind.wrong_form, wrong))
