"""The outcome of pruning a checkpoint, for the run, the dry run and the model card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slidesparse.base.counted import counted
from slidesparse.base.progress import advice
from slidesparse.base.readable_size import readable_size
from slidesparse.checkpoints.tokenizer_files import NO_TOKENIZER
from slidesparse.gemm.cards import warn_of_type
from slidesparse.models.experts import EXPERTS_FOLLOW
from slidesparse.models.targets import describe_dense
from slidesparse.offline.prune_options import PruneRounding
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import parse_dtype

NOT_IN_TRANSFORMERS = (
    "the installed transformers cannot load it in 8 bits: vLLM may, slidesparse.load does, and a float --dtype fits all"
)

SIX_BITS = "weights have six bits: files hold them as INT8, a Hopper GPU takes 0.75 to 0.8 of the memory for them"

BY_SIZE = "pruned by magnitude, for a smoke test only: --method sparsegpt loses many times less"

OTHER_TEXT = "calibrated on Python's standard library: text like the model's use loses less (--calibration FILE)"

MOST_NAMES = 3
"""Most names of tensors in a line."""


@dataclass(frozen=True, kw_only=True)
class PruneOutcome:
    """The common outcome of a run and a dry run.

    Attributes:
        destination: The new checkpoint.
        dtype: Type of the treated weights.
        rounding: Rounding of INT8 weights.
        treated_experts: Lines on the treated experts of a mixture.
        in_transformers: Whether the installed transformers loads the new checkpoint; None where that is unknown.
        dense_head: The output embedding, where it follows a pattern and vLLM runs it dense; else None.
        lacks_tokenizer: Whether the model takes text, and the source has no tokenizer to copy.
        method: Pruning method.
        was_pruned: Whether the source was pruned, and its zeros are kept.
        calibrated: Method and text of a calibration, in words; empty without one.
        default_text: Whether the calibration text is the default one.
        not_copied: Files of the source with code, or with other copies of the weights and their descriptions.
        destination_bytes: Bytes of the new tensors; in a dry run of other files too.
    """

    destination: str
    dtype: str
    rounding: PruneRounding
    treated_experts: list[str]
    in_transformers: bool | None
    dense_head: str | None
    lacks_tokenizer: bool
    method: str
    was_pruned: bool
    calibrated: str
    default_text: bool
    not_copied: list[str]
    destination_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def _on_use(self, patterns: Iterable[str]) -> list[str]:
        """Return lines on the use of weights with these patterns, advice first."""
        head = (
            f"{self.dense_head} follows its pattern, and vLLM runs it dense: it asks no plugin for one in a float type"
        )
        prunes = any(pattern != str(DENSE) for pattern in patterns)
        facts = {
            # Sizes of files do not show six bits.
            SIX_BITS: self.rounding == "6bit",
            EXPERTS_FOLLOW: bool(self.treated_experts),
            head: self.dense_head is not None,
            NO_TOKENIZER: self.lacks_tokenizer,
            NOT_IN_TRANSFORMERS: self.in_transformers is False,
        }
        by_size = self.method == "magnitude" and not self.was_pruned and prunes
        better = {BY_SIZE: by_size, OTHER_TEXT: self.default_text, warn_of_type(parse_dtype(self.dtype)): True}
        return [
            *advice(line for line, holds in better.items() if line is not None and holds),
            *(line for line, holds in facts.items() if holds),
        ]


@dataclass(frozen=True, kw_only=True)
class PruneSummary(PruneOutcome):
    """The outcome of pruning a checkpoint.

    Attributes:
        patterns: Treated layer -> pattern.
        experts: Treated weights of experts -> pattern, of a mixture.
        dense: Linear left alone -> reason.
        other: Module or parameter that multiplies and is no ``nn.Linear`` -> reason why it was left alone.
        links: Links of the source that were left out.
        unexpected: Unexpected keys: copied tensors that the model does not use.
        resumed: Shards that an interrupted run had finished.
        source_card: Name of the source's README.md beside the new model card; None where the source has none.
        losses: Linears that read one input -> squared error of their outputs over their energy on the calibration text,
            before their layer is matched; empty without calibration.
        input_rounding: The same linears -> cost of rounding inputs to INT8, in that measure; empty for other types.
        weight_rounding: The same linears -> cost of rounding weights to six bits or FP8; empty without.
        borrowed: Weights of experts with too few tokens -> their tokens, of all that were needed.
        source_bytes: Bytes of the source's tensors.
    """

    patterns: dict[str, str]
    experts: dict[str, str]
    dense: dict[str, str]
    other: dict[str, str]
    links: list[str]
    unexpected: list[str]
    resumed: list[str]
    source_card: str | None
    losses: dict[str, float]
    input_rounding: dict[str, float]
    weight_rounding: dict[str, float]
    borrowed: dict[str, str]
    source_bytes: int

    @property
    def counts(self) -> list[tuple[str, int]]:
        """Number of linears with each pattern, the most common first."""
        return Counter(self.patterns.values()).most_common()

    @property
    def left(self) -> list[str]:
        """Lines on the dense layers, with reasons."""
        return describe_dense({**self.dense, **self.other})

    def describe(self) -> str:
        """Return the summary as text."""
        patterns = ", ".join(f"{count} at {pattern}" for pattern, count in self.counts)
        lines = [f"treated {counted(len(self.patterns), 'layer')}: {patterns}"]
        lines += [f"treated experts: {line}" for line in self.treated_experts]
        lines += _spread("calibration loss", self.losses)
        lines += _spread("rounding inputs to INT8 costs", self.input_rounding)
        lines += _spread("rounding weights costs", self.weight_rounding)
        if self.borrowed:
            name, words = next(iter(self.borrowed.items()))
            count = f"{len(self.borrowed)} of the experts' weights"
            lines.append(f"saw few tokens, and borrowed from their layer: {count}, such as {name} ({words})")
        lines += self.left
        many = len(self.unexpected) > MOST_NAMES  # a head with experts has hundreds
        unexpected = [f"{len(self.unexpected)} tensors, such as {self.unexpected[0]}"] if many else self.unexpected
        for what, names in (
            ("copied, though the model does not use them", unexpected),
            ("taken over from an interrupted run", self.resumed),
            ("not copied, other weights or code", self.not_copied),
            ("not copied, they are links", self.links),
        ):
            lines += [f"{what}: {', '.join(names)}"] if names else []
        own = "" if self.source_card is None else f"; that of the source is {self.source_card}"
        lines += advice([f"README.md is a model card to read and correct{own}"])
        sizes = f"{readable_size(self.source_bytes)} -> {readable_size(self.destination_bytes)}"
        lines.append(f"{sizes} in {self.destination}")
        return "\n".join([*lines, *self._on_use([*self.patterns.values(), *self.experts.values()])])


def _spread(what: str, costs: Mapping[str, float]) -> list[str]:
    """Return a line with the mean and the worst cost of sets of linears, if there are any."""
    if not any(costs.values()):
        return []
    worst, mean = max(costs, key=costs.__getitem__), sum(costs.values()) / len(costs)
    names = ", ".join(worst.split(" "))
    return [f"{what}: mean {mean:.2e}, worst {costs[worst]:.2e} at {names}"]
