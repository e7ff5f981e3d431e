"""Outcomes of the layers of one model, logged when the last layer has been loaded.

vLLM loads layer after layer and has no call at the end, so :class:`ModelStatus` waits for all layers that were built,
except those dropped again (an output embedding that turns out to be tied), or left without memory (the tower of a model
that takes no images).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import dataclass, field

from slidesparse.errors import UnsupportedError
from slidesparse.integrations.gain import LoadedLinear, describe_gain
from slidesparse.models.layer_kinds import kind_of

NONE_SPARSE = (
    "slidesparse: none of the %d layers that could run sparse does (%s): %s is served at dense speed. A start"
    " measures its layers; backend and experts in --additional-config force them (docs/serving.md)"
)
NO_PATTERN_HERE = (
    "slidesparse: none of the %d layers in this stage of the pipeline satisfies any pattern: it runs dense"
)

LACKED = "dense by torch, since vLLM has no INT8 kernel for this GPU"


@dataclass(frozen=True)
class Outcome:
    """The outcome of loading one layer.

    Attributes:
        sparse: It runs on packed weights.
        qualified: Its weight satisfies its pattern, is marked with one, has eight bits, or was skipped.
        text: Pattern and backend, or the reason why it stays dense.
        eligible: It has groups that could run sparse, and the user did not choose dense.
        joined: It runs dense by our operator, which the norm or activation before it may be joined with.
        kept_bytes: Bytes of its kept weight, 0 where not counted; ``dense_bytes``: as vLLM loaded it.
        linear: The times of a linear whose backends were chosen, sparse or dense.
        how: Its form in words, where it is neither sparse nor a plain dense one.
    """

    sparse: bool
    qualified: bool
    text: str
    eligible: bool = False
    joined: bool = False
    kept_bytes: int = field(default=0, compare=False)
    dense_bytes: int = field(default=0, compare=False)
    linear: LoadedLinear | None = field(default=None, compare=False)
    how: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "how", self.how or ("sparse" if self.sparse else "dense"))


@dataclass
class ModelStatus:
    """The outcomes of one model's layers.

    Attributes:
        waiting: Layers that are not loaded yet, by name.
        outcomes: Outcomes of layers, by name.
        part: Other processes have other layers of the model (pipeline parallelism).
    """

    waiting: dict[str, weakref.ref[object]] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    part: bool = False

    def expect_layer(self, name: str, layer: object) -> None:
        """Wait for a built layer to be loaded."""
        self.waiting[name] = weakref.ref(layer)

    def note_outcome(self, name: str, outcome: Outcome, log: logging.Logger) -> None:
        """Note the outcome of a loaded layer; after the last one, log all outcomes.

        A whole model in floats without a weight in any pattern is an UnsupportedError: nothing would be gained.
        """
        self.outcomes[name] = outcome
        self.waiting.pop(name, None)
        self.waiting = {other: layer for other, layer in self.waiting.items() if _is_to_come(layer())}
        if self.waiting:
            return
        if not any(outcome.qualified for outcome in self.outcomes.values()):
            self._refuse_no_pattern(log)
        for line in self.describe():
            log.info(line)
        eligible = [outcome for outcome in self.outcomes.values() if outcome.eligible]
        if eligible and not any(outcome.sparse for outcome in eligible):
            ((most, _),) = Counter(eligible).most_common(1)
            served = "this stage of the pipeline" if self.part else "the pruned model"
            log.warning(NONE_SPARSE, len(eligible), most.text, served)

    def _refuse_no_pattern(self, log: logging.Logger) -> None:
        """Refuse a model without any pattern; only warn of a part of one, since others may have the pruned layers."""
        if self.part:
            log.warning(NO_PATTERN_HERE, len(self.outcomes))
            return
        raise UnsupportedError(
            "--quantization slidesparse: no layer of this checkpoint satisfies any pattern",
            got=f"{len(self.outcomes)} layers, none with two zeros in every group of 32 columns or less",
            remedy="prune it with slidesparse prune, or serve it without --quantization slidesparse",
        )

    def describe(self) -> list[str]:
        """Return lines with totals, with the speed-up, and for every kind of layer and outcome."""
        kinds: dict[tuple[str, Outcome], list[str]] = {}
        for name, outcome in self.outcomes.items():
            kinds.setdefault((kind_of(name), outcome), []).append(name)
        linears = [outcome.linear for outcome in self.outcomes.values() if outcome.linear is not None]
        return [f"slidesparse: {self._total()}", *describe_gain(linears)] + [
            f"slidesparse: {kind if len(names) > 1 else names[0]}: {outcome.how},"
            f" {outcome.text}" + (f" ({len(names)} layers)" if len(names) > 1 else "")
            for (kind, outcome), names in kinds.items()
        ]

    def _total(self) -> str:
        """Describe how many layers run sparse; where none has a pattern, how many run dense by our operators."""
        outcomes = self.outcomes.values()
        forms, joined = Counter(outcome.how for outcome in outcomes), sum(outcome.joined for outcome in outcomes)
        if any(outcome.sparse or outcome.eligible for outcome in outcomes):
            others = "".join(f", {count} {how}" for how, count in forms.items() if how not in ("sparse", "dense"))
            return f"{forms['sparse']} of {len(outcomes)} layers run sparse{others}{self._memory()}"
        if forms[LACKED]:
            return f"nothing is sparse: {forms[LACKED]} of {len(outcomes)} layers run {LACKED}"
        if not joined:
            return f"nothing is sparse, and nothing is fused: all {len(outcomes)} layers are vLLM's own"
        return (
            f"nothing is sparse: {joined} of {len(outcomes)} layers run dense by the product of vLLM's own,"
            " with norms, activations and quantisation fused"
        )

    def _memory(self) -> str:
        """Describe the memory of packed layers' weights, packed and dense; empty without any."""
        packed = [outcome for outcome in self.outcomes.values() if outcome.sparse and outcome.kept_bytes]
        kept, dense = sum(one.kept_bytes for one in packed), sum(one.dense_bytes for one in packed)
        return f"; their weights take {kept / 1e9:.2f} GB, dense {dense / 1e9:.2f}" if packed else ""


def _is_to_come(layer: object) -> bool:
    """Return whether vLLM will load a built layer: it still exists, and its weights have memory."""
    parameters = getattr(layer, "parameters", tuple)
    return layer is not None and not any(parameter.is_meta for parameter in parameters())
