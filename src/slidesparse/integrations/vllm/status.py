"""Collect the outcome of every layer of one model, and log all outcomes when the last layer has been loaded.

vLLM loads layer after layer and has no call at the end, so :class:`ModelStatus` counts: it waits for the layers that
were built, less those that were loaded, thrown away again (an output embedding that turns out to be tied), or left
without memory (the tower of a model that is to take no images).
"""

from __future__ import annotations

import json
import logging
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from slidesparse.errors import UnsupportedError
from slidesparse.gemm.speed import MEASURED_HERE
from slidesparse.integrations import NAME
from slidesparse.integrations.gain import LoadedLinear, describe_gain
from slidesparse.models.layer_kinds import kind_of

NONE_SPARSE = "slidesparse: none of the %d layers that could run sparse does (%s): %s is served at dense speed%s"
NO_PATTERN_HERE = (
    "slidesparse: none of the %d layers in this stage of the pipeline satisfies any pattern: it runs dense"
)
FORCE = "--additional-config '%s' runs them sparse whatever was measured"
MEASURE = 'slidesparse tune measures this GPU, as a start without "tune": "off" does; '
MEASURE_EXPERTS = 'A start without "tune": "off" measures them; '
PRUNE_MORE = "Dense was measured to be faster: a sparser pattern gains more; "
CANNOT_BE_MEASURED = "they cannot be measured"
"""In a reason for which measuring is no remedy."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of loading one layer.

    Attributes:
        sparse: It runs on packed weights.
        qualified: Its weight satisfies a pattern, or should, or was not examined, being dense for another reason.
        text: Pattern and backend, or why it stays dense.
        eligible: It has groups that could run sparse, and the user did not ask for dense.
        experts: It is the experts of a mixture, for which users have another option.
        kept_bytes: Bytes of its weight as kept, 0 where not counted; ``dense_bytes``: as vLLM loaded it.
        linear: The times of a linear whose backends were chosen, sparse or dense.
        sparse_by: Of a linear that stays dense, the backend that could run it here; None without one.
    """

    sparse: bool
    qualified: bool
    text: str
    eligible: bool = False
    experts: bool = False
    kept_bytes: int = field(default=0, compare=False)
    dense_bytes: int = field(default=0, compare=False)
    linear: LoadedLinear | None = field(default=None, compare=False)
    sparse_by: str | None = field(default=None, compare=False)


@dataclass
class ModelStatus:
    """The outcomes of one model's layers.

    Attributes:
        waiting: Name -> the layer, until it is loaded.
        outcomes: Name -> the layer's outcome.
        part: Other processes hold other layers of the model (pipeline parallelism).
    """

    waiting: dict[str, weakref.ref[object]] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    part: bool = False

    def expect_layer(self, name: str, layer: object) -> None:
        """Wait for a layer that was built and will be loaded."""
        self.waiting[name] = weakref.ref(layer)

    def note_outcome(self, name: str, outcome: Outcome, log: logging.Logger) -> None:
        """Note the outcome of a loaded layer; after the last one, log all outcomes.

        A whole model of which no weight satisfies any pattern is an UnsupportedError.
        """
        self.outcomes[name] = outcome
        self.waiting.pop(name, None)
        self.waiting = {other: layer for other, layer in self.waiting.items() if _is_to_come(layer())}
        if self.waiting:
            return
        if not any(outcome.qualified for outcome in self.outcomes.values()):
            self._tell_no_pattern(log)
        for line in self.describe():
            log.info(line)
        eligible = [outcome for outcome in self.outcomes.values() if outcome.eligible]
        if eligible and not any(outcome.sparse for outcome in eligible):
            ((most, _),) = Counter(eligible).most_common(1)
            served = "this stage of the pipeline" if self.part else "the pruned model"
            log.warning(NONE_SPARSE, len(eligible), most.text, served, _remedies(most, eligible))

    def _tell_no_pattern(self, log: logging.Logger) -> None:
        """Refuse a model without any pattern; of a part of one only warn, since others may hold the pruned layers."""
        if self.part:
            log.warning(NO_PATTERN_HERE, len(self.outcomes))
            return
        raise UnsupportedError(
            "--quantization slidesparse: no layer of this checkpoint satisfies any pattern",
            got=f"{len(self.outcomes)} layers, none with two zeros in every group of 32 columns or less",
            remedy="prune it with slidesparse prune, or serve it without --quantization slidesparse",
        )

    def describe(self) -> list[str]:
        """Return a line of totals, one of what is gained, and one line for every kind of layer and outcome."""
        kinds: dict[tuple[str, Outcome], list[str]] = {}
        for name, outcome in self.outcomes.items():
            kinds.setdefault((kind_of(name), outcome), []).append(name)
        total = Counter(outcome.sparse for outcome in self.outcomes.values())
        head = f"slidesparse: {total[True]} of {sum(total.values())} layers run sparse{self._memory()}"
        linears = [outcome.linear for outcome in self.outcomes.values() if outcome.linear is not None]
        return [head, *describe_gain(linears)] + [
            f"slidesparse: {kind if len(names) > 1 else names[0]}: {'sparse' if outcome.sparse else 'dense'},"
            f" {outcome.text}" + (f" ({len(names)} layers)" if len(names) > 1 else "")
            for (kind, outcome), names in kinds.items()
        ]

    def _memory(self) -> str:
        """Return what the weights of packed layers take, and would take dense, in words; nothing without any."""
        packed = [outcome for outcome in self.outcomes.values() if outcome.sparse and outcome.kept_bytes]
        kept, dense = sum(one.kept_bytes for one in packed), sum(one.dense_bytes for one in packed)
        return f"; their weights take {kept / 1e9:.2f} GB, dense {dense / 1e9:.2f}" if packed else ""


def _is_to_come(layer: object) -> bool:
    """Return whether vLLM will load a layer that it built: one that is still there, and whose weights have memory."""
    parameters = getattr(layer, "parameters", tuple)
    return layer is not None and not any(parameter.is_meta for parameter in parameters())


def _hint(outcome: Outcome) -> str:
    """Return what helps layers that were left dense, besides running them sparse all the same."""
    if MEASURED_HERE in outcome.text:
        return PRUNE_MORE
    if CANNOT_BE_MEASURED in outcome.text:
        return ""
    return MEASURE_EXPERTS if outcome.experts else MEASURE


def _remedies(most: Outcome, eligible: Iterable[Outcome]) -> str:
    """Return what may run layers sparse, as the end of a sentence and another one; nothing where nothing does."""
    options = _forcing(eligible)
    return f". {_hint(most)}{FORCE % json.dumps({NAME: options})}" if options else ""


def _forcing(eligible: Iterable[Outcome]) -> dict[str, str]:
    """Return the options that run layers sparse whatever was measured; a backend only where it can run all linears."""
    outcomes = list(eligible)
    options = {"experts": "sparse"} if any(outcome.experts for outcome in outcomes) else {}
    backends = {outcome.sparse_by for outcome in outcomes if not outcome.experts}
    backend = backends.pop() if len(backends) == 1 else None
    return options if backend is None else {"backend": backend, **options}
