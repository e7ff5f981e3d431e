"""Measurement of one kind of layer: dense and each packed form of a weight, quantisation and scales included.

The loaded weight is measured. Activations are Gaussian: zeros would draw less power. Every form has a stretch of its
own at each number of tokens (:func:`slidesparse.tuning.timing.time_stretches`): a short one where the GPU stays below
its power limit, else one long enough for the clock to settle. Calls are captured in CUDA graphs, as in vLLM up to some
512 tokens; where memory is short they are launched one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from slidesparse import ops
from slidesparse.errors import SlideSparseError, first_line
from slidesparse.gemm.select import get_backend
from slidesparse.gemm.spec import Route, WeightSpec
from slidesparse.gemm.speed import DENSE_FORM, LayerSpeed, lacking, times_key
from slidesparse.layer.weight_form import WeightForm
from slidesparse.tuning.checking import TOLERANCE, WrongResult, ends, relative_error, require_right
from slidesparse.tuning.timing import Pass, Stopwatch, copies_needed, copies_of, noise_of, time_stretches
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.quant import dtype_name

RunOnce = Callable[[], torch.Tensor]
"""A single run of a form."""

TimedCalls = Callable[[], Sequence[Callable[[], Any]]]
"""Makes the calls of a form's timed pass, which may need memory."""

SIZES = (16, 64, 256, 512, 1024, 2048, 4096, 16384)
"""Numbers of tokens to measure, up to an engine's largest batch."""

SHORT_S, LONG_S = 0.02, 0.15
"""Seconds of a form at one number of tokens. Shorter bursts miss the power limit and rank large M wrongly. The clock
settles within 70 ms, and the later half counts (docs/log/layers.md)."""

LONG_FROM = 512
"""Fewest tokens timed for :data:`LONG_S`."""

TRANSIENT_BYTES = 2 << 30
"""Most memory of a measurement: forms of the weight, copies, activations, products. It ends where they need
more, or more than half of the free memory. Gate and up of a 7B model need so much at 16384 tokens; vLLM takes as much
later, when it profiles such a batch."""

SEED = 7_654_321
"""Seed of the activations, and of no weight: where their rows are equal, products have one sign, and FP8 Tensor Cores
lose a few percent of such a sum, so that a right kernel looks wrong."""


def sizes_up_to(most: int) -> list[int]:
    """Return the numbers of tokens to measure for an engine whose largest batch has ``most``.

    >>> sizes_up_to(16384) == list(SIZES), sizes_up_to(8192)[-3:], sizes_up_to(1100)[-2:]
    (True, [2048, 4096, 8192], [512, 1024])
    """
    sizes = [m for m in SIZES if m <= most]
    more = most < SIZES[-1] and 2 * most >= 3 * (sizes[-1] if sizes else 0)
    return [*sizes, most] if more else sizes


def gaussian(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Draw the same normally distributed numbers on every call."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


@dataclass(frozen=True)
class TakenTimes:
    """The measured times of one kind of layer.

    Attributes:
        layer: The times; None without any.
        noise: Relative difference of dense timed twice at one M, the median over all short ones; 0 without any.
        faults: Backend -> the reason for a missing time.
        wrong: Packed forms with a wrong result at some M. They have no times, and are never chosen.
    """

    layer: LayerSpeed | None
    noise: float
    faults: dict[str, str]
    wrong: frozenset[str] = frozenset()


def time_forms(passes: Mapping[str, Pass], tokens: int) -> tuple[dict[str, float], float | None]:
    """Return the microseconds of each form, dense first, and the relative difference of dense timed twice.

    The difference is None where dense is timed once, to save time.
    """
    all_forms, noise = list(passes.values()), None
    if tokens >= LONG_FROM:
        samples = time_stretches(all_forms, LONG_S)
    else:  # dense before all others, while the clock rises, and after them, for the noise
        _, *samples, again = time_stretches([all_forms[0], *all_forms, all_forms[0]], SHORT_S)
        noise = noise_of(samples[0], again)
    return {name: round(median(taken), 2) for name, taken in zip(passes, samples, strict=True)}, noise


class Measurement:
    """A measurement of one kind of layer's forms, dense first; ``source``: the activations' type."""

    refusals: tuple[type[Exception], ...] = (RuntimeError, ValueError)
    """Exceptions of forms that cannot run some tokens, besides errors of ours."""

    tolerance = TOLERANCE
    """Relative difference of two right results."""

    def __init__(self, source: torch.dtype, stopwatch: Stopwatch) -> None:
        self.source, self.stopwatch = source, stopwatch
        self._faults: dict[str, str] = {}
        self._noises: list[float] = []
        self._wrong: set[str] = set()

    def _passes(self, forms: Mapping[str, tuple[RunOnce, TimedCalls]], capture: bool) -> dict[str, Pass]:
        """Check the result of each form, and return the passes of the right ones; none if dense fails."""
        passes: dict[str, Pass] = {}
        reference: torch.Tensor | None = None
        for name, (run_once, calls) in forms.items():
            try:
                result = ends(run_once()).clone()
                reference = result if reference is None else reference
                check = partial(_require_alike, reference=reference, tolerance=self.tolerance)
                check(result)
                passes[name] = self.stopwatch.prepare(calls(), capture, check)
            except torch.OutOfMemoryError:
                raise
            except SlideSparseError as error:
                self._faults[name] = str(error)
                self._wrong |= {name} if isinstance(error, WrongResult) else set()
            except self.refusals as error:
                self.stopwatch.wait()  # raises when the device failed: no result after that would be right
                self._faults[name] = first_line(error)
            if name == DENSE_FORM and DENSE_FORM not in passes:
                return {}  # nothing to compare with
        return passes

    def _times(self, passes: Mapping[str, Pass], tokens: int) -> dict[str, float]:
        times, noise = time_forms(passes, tokens)
        self._noises += [] if noise is None else [noise]
        return times

    def _taken(
        self,
        columns: Mapping[int, Mapping[str, float]],
        keys: Mapping[str, str],
        wrong: Container[str],
        dtype: str,
        out: int,
        k: int,
    ) -> TakenTimes:
        """Return the times of ``columns`` (M -> form -> time), named by ``keys`` of a table; wrong forms have none.

        If dense disagrees with itself, no packed form is to blame.
        """
        self.stopwatch.begin()  # frees the memory of the last graphs
        tokens = sorted(columns)
        us = {key: tuple(None if name in wrong else columns[m].get(name) for m in tokens) for name, key in keys.items()}
        layer = LayerSpeed(dtype, out, k, tuple(tokens), us) if tokens else None
        noise = median(self._noises) if self._noises else 0.0
        return TakenTimes(layer, noise, self._faults, frozenset(self._wrong) - {DENSE_FORM})


@dataclass
class _Form:
    """A weight on one backend."""

    backend: str
    packed: PackedWeight
    module: WeightForm
    spec: str

    @classmethod
    def of(cls, packed: PackedWeight, backend: str) -> _Form:
        module = WeightForm(packed, backend)
        routes = (Route(0, backend),)
        spec = WeightSpec(packed.shape[0], dtype_name(packed.dtype), (module.spec(),), routes)
        return cls(backend, packed, module, spec.text)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.module.tensors)

    def run(self, module: WeightForm, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ops.linear(x, module.tensors, self.packed.scale, None, self.spec)
        return y

    def bytes_for(self, tokens: int, source: torch.dtype) -> int:
        """Return the bytes of a call: lifted activations, their scales, sums, the product."""
        dtype, device = self.packed.dtype, self.packed.device
        accumulators = get_backend(self.backend).accumulator_bytes(dtype, source, tokens, device)
        lifted = len(self.module.column_map) * dtype.itemsize + 4
        return tokens * (lifted + self.packed.shape[0] * (source.itemsize + accumulators))


class LayerMeasurement(Measurement):
    """The measurement of one weight, on its device, on some backends, dense first."""

    def __init__(self, packed: PackedWeight, backends: Sequence[str], *how: Any) -> None:
        super().__init__(*how)
        self.packed, self.backends = packed, backends

    def measure(self, tokens: Sequence[int], known: Sequence[int], is_over: Callable[[], bool]) -> TakenTimes:
        """Time every form at some numbers of tokens.

        Args:
            tokens: The numbers, ascending.
            known: Numbers with known times: where memory is short for one of ``tokens``, a smaller one is measured
                unless it is near one of these.
            is_over: Returns whether the budget is spent; called before every number of tokens.
        """
        columns: dict[int, dict[str, float]] = {}
        forms = self._make_forms()
        for wanted in tokens if DENSE_FORM not in self._faults else ():
            m = self._fitting(wanted, forms)
            done = m < wanted and not lacking([m], [*known, *columns])
            if m == 0 or done or is_over():
                break
            right = [form for form in forms if form.backend not in self._wrong]
            times = self._time(right, m)
            if times:
                columns[m] = times
            if m < wanted or not times:
                break
        keys = {name: times_key(name, str(self.packed.pattern)) for name in self.backends}
        return self._taken(columns, keys, self._wrong, dtype_name(self.packed.dtype), *self.packed.shape)

    def _make_forms(self) -> list[_Form]:
        forms = []
        for name in self.backends:
            try:  # all kernels at once, in parallel: one by one they would be compiled while the budget runs
                form = _Form.of(self.packed, name)
                get_backend(name).warm_up(self.packed.dtype, self.source, self.packed.device, not self.packed.slid)
                forms.append(form)
            except SlideSparseError as error:
                self._faults[name] = str(error)
        return forms

    def _fitting(self, tokens: int, forms: Sequence[_Form]) -> int:
        """Return ``tokens``, or the largest power of two below that fits in memory; 0 for none."""
        most = next((1 << k for k in range(tokens.bit_length() - 1, -1, -1) if self._fits(1 << k, forms, 1)), 0)
        return tokens if self._fits(tokens, forms, 1) else most

    def _fits(self, tokens: int, forms: Sequence[_Form], times: int) -> bool:
        return self._spare(tokens, forms, times) >= 0

    def _spare(self, tokens: int, forms: Sequence[_Form], times: int) -> int:
        """Return the bytes left for copies if calls allocate theirs ``times`` times: a graph has its own."""
        kept = sum(form.n_bytes for form in forms)
        most = min(TRANSIENT_BYTES - kept, self.stopwatch.free_bytes())
        x = tokens * self.packed.shape[1] * self.source.itemsize
        return most - x - times * max((form.bytes_for(tokens, self.source) for form in forms), default=0)

    def _time(self, forms: Sequence[_Form], tokens: int) -> dict[str, float]:
        """Return the microseconds of each form that can run so many tokens; none if memory ends."""
        self.stopwatch.begin()
        try:
            x = gaussian(tokens, self.packed.shape[1], dtype=self.source, device=self.packed.device, seed=SEED)
            capture = self._fits(tokens, forms, 2)
            spare = self._spare(tokens, forms, 2 if capture else 1) // len(forms)
            known = {
                form.backend: (partial(form.run, form.module, x), partial(self._calls, form, x, spare))
                for form in forms
            }
            passes = self._passes(known, capture)
        except torch.OutOfMemoryError:
            self._faults[DENSE_FORM] = f"out of memory at {tokens} tokens"
            return {}
        return self._times(passes, tokens) if passes else {}

    def _calls(self, form: _Form, x: torch.Tensor, spare: int) -> list[Callable[[], Any]]:
        n_bytes = form.n_bytes + x.nbytes
        count = copies_needed(n_bytes, self.stopwatch.l2_bytes, n_bytes + max(0, spare))
        return [partial(form.run, *operands) for operands in copies_of((form.module, x), count)]


def _require_alike(result: torch.Tensor, reference: torch.Tensor, tolerance: float) -> None:
    require_right(relative_error(ends(result), reference), tolerance)
