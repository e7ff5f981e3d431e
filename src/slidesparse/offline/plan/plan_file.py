"""The file of a plan, written by ``slidesparse plan`` and followed by ``prune``; and a plan as text."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, get_args

import torch

from slidesparse.base.counted import counted
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import wrapped
from slidesparse.base.readable_size import readable_size
from slidesparse.errors import CheckpointError, InputError, SlideSparseWarning
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.identity import fingerprint
from slidesparse.files.json_files import read_json
from slidesparse.models.experts import LEAVE_DENSE
from slidesparse.models.targets import matches_entry
from slidesparse.offline.calibrate.calibration import Calibration, digest
from slidesparse.offline.plan.choose_patterns import Plan
from slidesparse.offline.plan.plan_options import PlanOptions
from slidesparse.offline.published import BEST, expected_cost
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import Rounding

PLAN_VERSION = 1

MOST_NAMES = 3
"""Most names of linears in a line."""


EXPERTS_COUNTED = "experts count as if they were multiplied sparse, as a Hopper GPU does in INT8 and FP8"

KEPT = (
    "these experts cannot be quantised as they are stored: prune keeps {}, in which they run dense;"
    f" {LEAVE_DENSE} plans all else for {{}}"
)

ROUNDED_TO_SIX_BITS = "sizes are those of six bits; damage is measured in float, without what rounding to them adds"


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


def about(checkpoint: Checkpoint, options: PlanOptions, windows: torch.Tensor) -> dict[str, Any]:
    """Return everything that the measurements depend on, for JSON."""
    return {
        "model": str(checkpoint.path),
        "weights": fingerprint(checkpoint, checkpoint.config),
        "method": options.method,
        "calibration": options.calibration.to_json(),
        "windows": digest(windows),
        "ignore": list(options.ignore),
    }


def described(plan: Plan, options: PlanOptions) -> dict[str, Any]:
    """Return a plan and what it was asked for, for JSON."""
    gpu = {} if options.gpu is None else {"gpu": options.gpu}
    served = {"at": list(options.at), "dtype": options.dtype, **gpu}
    return {
        "target": {name: value for name, value in asdict(options.target).items() if value is not None},
        **(served if options.at else {"mma_gain": float(options.mma_gain)}),
        "recipe": options.recipe,
        "modelled": {
            "speedup": plan.speedup,
            "sparsity": plan.sparsity,
            "gigabytes": plan.gigabytes,
            "damage": plan.damage,
            "damage_together": plan.together,
            **({"speedups": dict(plan.speedups), "basis": list(plan.basis)} if options.at else {}),
        },
        "layers": {name: str(pattern) for name, pattern in plan.patterns.items()},
    }


def describe(plan: Plan, options: PlanOptions, out: Path, source: Checkpoint) -> str:
    """Return a plan as text for the terminal, with the command that uses it in one line, to be copied."""
    counts = Counter(map(str, plan.patterns.values()))
    text = _calibration_words(options.calibration) if get_pruner(options.method).needs_calibration else ""
    together = "" if plan.together is None else f", measured with all of it pruned {plan.together:.4f}"
    said = [
        f"{len(plan.patterns)} layers: " + ", ".join(f"{n} at {pattern}" for pattern, n in counts.most_common()),
        *([EXPERTS_COUNTED] if plan.has_experts else []),
        *([KEPT.format(plan.kept_type, options.dtype)] if plan.kept_type else []),
        f"{_speed_words(plan, options)}, {plan.sparsity:.1%} zeros, {readable_size(plan.gigabytes * 1e9)},"
        f" predicted damage {plan.damage:.4f} nats a token{together}",
        *([] if options.recipe == "absmax" else [ROUNDED_TO_SIX_BITS]),
        *plan.basis,
        f"{expected_cost(plan.sparsity, source.n_bytes)}; least is lost by {BEST}",
    ]
    command = f"slidesparse prune SRC DST --plan {quote(str(out))} --method {options.method}{text}"
    return "\n".join([*map(wrapped, said), f"use it with: {command} --dtype {plan.kept_type or options.dtype}"])


def _speed_words(plan: Plan, options: PlanOptions) -> str:
    if not options.at:
        return f"modelled {plan.speedup:.3f}x of dense"
    told = ", ".join(f"{speedup:.3f}x at {name}" for name, speedup in plan.speedups.items())
    return f"predicted over stock vLLM: {told}"


def _calibration_words(calibration: Calibration) -> str:
    """Return the options with which ``prune`` sees the text as ``plan`` did, each where it is not the usual one."""
    usual = Calibration(calibration.file)
    names = [name for name in ("samples", "length", "seed") if getattr(calibration, name) != getattr(usual, name)]
    texts = "".join(f" --calibration {quote(one)}" for one in (calibration.file, *calibration.more))
    told = "".join(f" --{name} {getattr(calibration, name)}" for name in names)
    return texts + told + ("" if calibration.bos else " --no-bos")
