"""Refuse options of ``prune`` that do not go together, before any file is read.

What depends on the source as well, on its type or its structure, is refused where the source is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from slidesparse.base.arguments import require_kind
from slidesparse.errors import InputError
from slidesparse.offline.prune_options import RECIPES, PruneOptions
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import QUANTISED, dtype_name, parse_dtype


class _Asked(NamedTuple):
    """A step around pruning, in words."""

    option: str
    doing: str
    done: str


STEPS = (
    _Asked("--match", "matching", "layers are matched"),
    _Asked("--smooth", "smoothing", "layers are smoothed"),
)


def check_options(options: PruneOptions) -> None:
    """Refuse options that are wrong whatever the source is.

    Raises:
        InputError: A pattern, a type, a method or a number is none; or two options contradict each other.
    """
    require_kind(options.layers, Mapping, "layers", "a dict from names to patterns")
    patterns = {Pattern.parse(pattern) for pattern in (options.pattern, *options.layers.values())}
    if options.recipe == "6bit" and patterns == {DENSE}:
        raise InputError(
            "options without effect",
            got="--recipe 6bit without a pattern",
            needed="a pattern, whose weights are rounded so",
            remedy="use --pattern 6:8, or leave out --recipe",
        )
    if options.match < 0:
        raise InputError("steps of matching", got=options.match, needed="0 or more")
    _require_text(options)
    _require_type(options, None if options.dtype is None else parse_dtype(options.dtype))


def require_one_process(options: PruneOptions, processes: int) -> None:
    """Refuse steps that several processes cannot share.

    Raises:
        InputError: There are several, and such a step is asked for.
    """
    for step in _asked(options) if processes > 1 else ():
        raise InputError(
            f"{step.done} by one process",
            got=f"{processes} processes",
            remedy=f"run without torchrun, or leave out {step.option}",
        )


def _asked(options: PruneOptions) -> list[_Asked]:
    return [step for step in STEPS if getattr(options, step.option.removeprefix("--"))]


def _require_text(options: PruneOptions) -> None:
    """Refuse a text that nothing reads, and what lacks one."""
    pruner, calibration = get_pruner(options.method), options.calibration
    if calibration is not None and not pruner.needs_calibration:
        raise InputError(
            f"{pruner.name} takes no calibration text", got=calibration.file, remedy="use --method wanda or sparsegpt"
        )
    if calibration is None and pruner.needs_calibration:
        raise InputError(f"{pruner.name} needs calibration text", remedy="add --calibration FILE")
    if pruner.needs_calibration and options.recipe == "ternary":
        raise InputError("the ternary recipe cannot be calibrated", got=pruner.name, needed="--method magnitude")
    for step in _asked(options) if calibration is None else ():
        raise InputError(
            f"{step.doing} needs calibration text",
            got=f"--method {options.method}",
            remedy=f"use --method sparsegpt or wanda with --calibration FILE, or leave out {step.option}",
        )


def _require_type(options: PruneOptions, dtype: torch.dtype | None) -> None:
    """Refuse a recipe or a step that does not go with the type; None: that of the source, which is not known yet."""
    if options.recipe not in RECIPES:
        raise InputError("unknown recipe", got=repr(options.recipe), needed=" or ".join(RECIPES))
    if dtype is None:
        return
    if options.recipe != "absmax" and dtype != torch.int8:
        what = f"the {options.recipe} recipe ends in INT8 storage"
        raise InputError(what, got=dtype_name(dtype), needed="--dtype int8, or --recipe absmax")
    if options.smooth and dtype not in QUANTISED:
        raise InputError("smoothing helps rounding to 8 bits", got=f"--dtype {dtype_name(dtype)}", needed="int8 or fp8")
