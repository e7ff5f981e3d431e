"""What ``slidesparse plan`` writes into the file of a plan, and says of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from slidesparse.base.progress import wrapped
from slidesparse.base.readable_size import readable_size
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.identity import fingerprint
from slidesparse.models.experts import LEAVE_DENSE
from slidesparse.offline.calibrate.calibration import Calibration, digest
from slidesparse.offline.plan.choose_patterns import Plan
from slidesparse.offline.plan.plan_options import PlanOptions
from slidesparse.offline.published import BEST, expected_cost
from slidesparse.prune import get_pruner

EXPERTS_COUNTED = "experts count as if they were multiplied sparse, as a Hopper GPU does in INT8 and FP8"

KEPT = (
    "these experts cannot be quantised as they are stored: prune keeps {}, in which they run dense;"
    f" {LEAVE_DENSE} plans all else for {{}}"
)

ROUNDED_TO_SIX_BITS = "sizes are those of six bits; damage is measured in float, without what rounding to them adds"


def about(checkpoint: Checkpoint, options: PlanOptions, windows: torch.Tensor) -> dict[str, Any]:
    """Return everything that the measurements depend on, for JSON."""
    return {
        "model": str(checkpoint.path),
        "weights": fingerprint(checkpoint, checkpoint.config),
        "method": options.method,
        "calibration": options.calibration.to_json(),
        "windows": digest(windows),
        "ignore": list(options.ignore),
        "measured_in": "float32",  # earlier measurements, in the model's type, have its rounding in them
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
