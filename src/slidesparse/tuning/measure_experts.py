"""Measurement of a layer's experts at load: packed, and by the server's own method.

A call is a whole layer: quantisation, the order of the tokens, both products, the sum over the experts of a token.
Tokens choose experts at random, anew for every call of a pass: few tokens then read other experts in every call, as in
a model of many layers, and no cache has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from slidesparse.gemm.expert_times import GROUPED, ExpertKind
from slidesparse.gemm.speed import DENSE_FORM, lacking
from slidesparse.tuning.measure import SEED, TRANSIENT_BYTES, Measurement, TakenTimes, gaussian
from slidesparse.tuning.timing import Pass, copies_needed
from slidesparse.weights.quant import dtype_name

RunExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [M, H], weights float32 [M, k], chosen int32 [M, k], of all experts everywhere) -> [M, H]."""

TOLERANCE = 5e-2
"""Relative difference of two right layers. Both round the inner activations to 8 bits: from a difference in the last
bit, FP8 values may differ by a sixteenth."""

IMPORTANT = (64, 4096, 16, 1024, 1, 256, 16384)
"""Numbers of tokens that are measured first, so that a start without time for all has decoding steps and prompts: a
server's own kernel is compiled anew for each number."""

MOST_CHOICES = 32
"""Most calls of one pass."""


class ExpertMeasurement(Measurement):
    """The measurement of the experts of one layer: ``dense``, and ``GROUPED`` after it."""

    refusals = (Exception,)
    """Exceptions of any kind: a server's own method is called before it serves."""

    tolerance = TOLERANCE

    def __init__(self, kind: ExpertKind, forms: Mapping[str, RunExperts], *how: Any) -> None:
        super().__init__(*how)
        self.kind, self.forms = kind, forms

    def measure(self, tokens: Sequence[int], known: Sequence[int], is_over: Callable[[], bool]) -> TakenTimes:
        """Time both forms at numbers of tokens, in the order of :data:`IMPORTANT`: see :class:`LayerMeasurement`."""
        columns: dict[int, dict[str, float]] = {}
        for wanted in sorted(tokens, key=_importance):
            m = wanted
            while m > 1 and not self._fits(m, 1):
                m //= 2
            if is_over():
                break
            if m < wanted and not lacking([m], [*known, *columns]):
                continue
            try:
                passes = self._prepare(m)
            except torch.OutOfMemoryError:
                self._faults[GROUPED] = f"out of memory at {m} tokens"
                break
            if DENSE_FORM not in passes:
                break
            columns[m] = self._times(passes, m)
            if GROUPED not in passes:
                break
        kind = dtype_name(self.kind.dtype), 2 * self.kind.inner, self.kind.hidden
        return self._taken(columns, {name: name for name in self.forms}, {GROUPED} if self._wrong else (), *kind)

    def inputs(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the operands of a pass's calls: a common x, with choices of their own."""
        kind, shape = self.kind, (tokens, self.kind.top_k)
        x = gaussian(tokens, kind.hidden, dtype=self.source, device=kind.device, seed=SEED)
        made = []
        for seed in range(self._choices(tokens)):
            draw = partial(gaussian, dtype=torch.float32, device=kind.device, seed=seed)
            chosen = draw(tokens, kind.everywhere).topk(kind.top_k, 1).indices.to(torch.int32)
            made.append((x, draw(*shape).softmax(1), chosen))
        return made

    def _choices(self, tokens: int) -> int:
        """Return the number of calls that read more weights than caches hold, or all weights."""
        kind = self.kind
        weights = 3 * kind.inner * kind.hidden * kind.dtype.itemsize
        touched = weights * max(1, min(kind.experts, tokens * kind.top_k * kind.experts // kind.everywhere))
        return min(MOST_CHOICES, copies_needed(touched, self.stopwatch.l2_bytes, weights * kind.experts))

    def _fits(self, tokens: int, times: int) -> bool:
        """Return whether a call's activations fit in memory ``times`` times: a graph has its own."""
        kind, rows = self.kind, tokens * self.kind.top_k
        lifted = max(kind.hidden, kind.inner) * 2 * kind.dtype.itemsize  # less than twice as many columns
        needed = rows * (lifted + (2 * kind.inner + kind.hidden) * self.source.itemsize)
        return times * needed <= min(TRANSIENT_BYTES, self.stopwatch.free_bytes())

    def _prepare(self, tokens: int) -> dict[str, Pass]:
        inputs = self.inputs(tokens)
        self.stopwatch.begin()
        forms = {
            name: (partial(run, *inputs[-1]), lambda run=run: [partial(run, *given) for given in inputs])
            for name, run in self.forms.items()
        }
        return self._passes(forms, self._fits(tokens, 2))


def _importance(tokens: int) -> tuple[int, int]:
    return IMPORTANT.index(tokens) if tokens in IMPORTANT else len(IMPORTANT), tokens
