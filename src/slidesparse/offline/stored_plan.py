"""A plan as a file has it, and as ``prune`` follows it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from slidesparse.base.counted import counted
from slidesparse.base.paths import usable_path
from slidesparse.errors import CheckpointError, InputError, SlideSparseWarning
from slidesparse.files.json_files import read_json
from slidesparse.models.targets import matches_entry
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import Rounding

PLAN_VERSION = 1

MOST_NAMES = 3
"""Most names of linears in a line."""


@dataclass(frozen=True)
class StoredPlan:
    """A plan as ``prune`` follows it.

    Attributes:
        method: The pruning method with which damage was measured.
        layers: Linear -> pattern.
        ignore: What it was told to leave alone, as entries of an ignore list.
        weights: Fingerprint of the checkpoint on which damage was measured; None where the file has none.
        recipe: How the weights are to be rounded.
    """

    method: str
    layers: dict[str, str]
    ignore: tuple[str, ...] = ()
    weights: str | None = None
    recipe: Rounding = "absmax"

    def without(self, entries: Sequence[str]) -> StoredPlan:
        """Return the plan that leaves more alone; an InputError where nothing of it is left."""
        layers = {
            name: pattern
            for name, pattern in self.layers.items()
            if not any(matches_entry(name, entry) for entry in entries)
        }
        if not layers:
            raise InputError(
                "no layer of the plan is left", got=f"--ignore {' '.join(entries)}", needed="one that is not ignored"
            )
        return replace(self, layers=layers, ignore=tuple(dict.fromkeys([*self.ignore, *entries])))

    def warn_of_other_weights(self, weights: str, source: Path) -> None:
        """Warn where another checkpoint is to be pruned than the one on which damage was measured.

        A plan may serve for a model that was trained on, or for one with the same names of layers by mistake.
        """
        if self.weights not in (None, weights):
            _warn(
                f"the plan was measured on another checkpoint than {source}, whose weights or config.json differ:"
                " its predictions may not hold"
            )

    def compare_names(self, treated: Sequence[str], source: Path) -> None:
        """Warn where the plan names not all that can be treated: that of a smaller model, or one edited by hand.

        One that names what cannot be treated is an InputError.
        """
        known = set(treated)
        if foreign := [name for name in self.layers if name not in known]:
            raise InputError(
                f"the plan has a pattern for {counted(len(foreign), 'linear')} that {source} lacks or leaves alone",
                got=_shown(foreign),
                needed=f"linears such as {treated[0]}",
                remedy="make a plan of this model with slidesparse plan",
            )
        if unnamed := [name for name in treated if name not in self.layers]:
            _warn(
                f"the plan has no pattern for {counted(len(unnamed), 'linear')} of {source}, which stay dense:"
                f" {_shown(unnamed)}"
            )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _warn(message: str) -> None:
    warnings.warn(message, SlideSparseWarning, stacklevel=3)


def read_plan(path: str | Path) -> StoredPlan:
    """Read a file that ``plan`` wrote; an InputError for any other."""
    try:
        plan = read_json(usable_path(path, "plan"))
    except CheckpointError as error:
        raise InputError(str(error), remedy="make a plan with: slidesparse plan") from error
    method, layers, ignore = plan.get("method"), plan.get("layers"), plan.get("ignore", [])
    recipe = plan.get("recipe", "absmax")
    known = plan.get("version") == PLAN_VERSION and isinstance(ignore, list) and recipe in get_args(Rounding)
    if (
        not known
        or not isinstance(method, str)
        or not isinstance(layers, dict)
        or not layers
        or not all(isinstance(entry, str) for entry in ignore)
    ):
        raise InputError(f"{path} is no plan", needed=f"a file of version {PLAN_VERSION} that slidesparse plan wrote")
    patterns, weights = {name: _pattern(text, f"{path}, {name}") for name, text in layers.items()}, plan.get("weights")
    return StoredPlan(method, patterns, tuple(ignore), weights if isinstance(weights, str) else None, recipe)


def _pattern(text: Any, where: str) -> str:
    try:
        return str(Pattern.parse(text))
    except InputError as error:
        raise error.located(where) from error


def as_options(layers: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return a plan as options of ``prune``: the common pattern, and exceptions to it.

    Linears that the plan neither names nor leaves alone stay dense.
    """
    ((common, _),) = Counter(layers.values()).most_common(1)
    return common, {**layers, "re:.*": "dense"}
