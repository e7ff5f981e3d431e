"""The options of pruning a checkpoint, their checks, and the types that follow from them and from the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from slidesparse.base.arguments import require_kind
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import is_bitnet, quantisation_dtype, source_quantisation
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.models.config_keys import MARKER_KEY, QUANTIZATION_KEY
from slidesparse.models.parts import Part
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.calibrate.texts import DEFAULT
from slidesparse.pruning import get_pruner
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import FLOATS, QUANTISED, dtype_name, parse_dtype

PruneRounding = Literal["absmax", "ternary", "6bit"]
ROUNDINGS: tuple[PruneRounding, ...] = get_args(PruneRounding)


@dataclass(frozen=True)
class PruneOptions:
    """The options of pruning a checkpoint: arguments of :func:`slidesparse.prune`, by their names.

    Dense exceptions to a pattern keep 8 bits, whatever the rounding of the others.
    """

    pattern: str
    dtype: str | None = None
    method: str = "sparsegpt"
    calibration: Calibration | None = None
    rounding: PruneRounding = "absmax"
    ignore: tuple[str, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    lm_head: bool = False
    part: Part = "language"
    match_steps: int = 0
    smooth: bool = True

    def __post_init__(self) -> None:
        if self.calibration is None and get_pruner(self.method).needs_calibration:
            object.__setattr__(self, "calibration", Calibration(DEFAULT))


def resolve_dtypes(checkpoint: Checkpoint, options: PruneOptions) -> tuple[torch.dtype | None, torch.dtype]:
    """Return the quantised type of the source (None: float) and the type of the output.

    Raises:
        CheckpointError: The source is pruned and quantised already, or is a BitNet checkpoint of packed weights.
        InputError: The type or the rounding does not fit the source.
    """
    config = checkpoint.config
    if config.get(MARKER_KEY) is not None and QUANTIZATION_KEY in config:
        remedy = "start from the dense model, or from one that is pruned in a float type"
        raise CheckpointError(f"{checkpoint.path} is pruned and quantised already", remedy=remedy)
    wanted = None if options.dtype is None else parse_dtype(options.dtype)
    bitnet = is_bitnet(config)
    if bitnet:
        if source_quantisation(config).get("quantization_mode") != "online":
            raise CheckpointError(
                "the BitNet checkpoint holds packed ternary weights",
                needed="its BF16 master (quantization_mode: online)",
            )
        if options.rounding != "ternary":
            raise InputError("a BitNet master means its weights to be ternary", remedy="pass --rounding ternary")
    source = None if bitnet else quantisation_dtype(config)
    if source is not None:
        other = [] if wanted in (None, source) else [f"--dtype {options.dtype}"]
        other += [] if options.rounding == "absmax" else [f"--rounding {options.rounding}"]
        if other:
            raise InputError(
                "the source is quantised already and is not rounded twice",
                got=", ".join(other),
                needed=f"--dtype {dtype_name(source)} or none, --rounding absmax",
            )
    return source, source or wanted or torch.int8


def check_type(tensor: str, stored: Stored, source: torch.dtype | None, dtype: torch.dtype) -> None:
    """Refuse a treated tensor whose type differs from the source's, or without quantising from the output's."""
    allowed = {STORED_NAMES[one] for one in ([source] if source else FLOATS)}
    if stored.dtype not in allowed:
        remedy = f"leave it alone with --ignore {tensor.removesuffix('.weight')}" if source else None
        raise CheckpointError(f"type of {tensor}", got=stored.dtype, needed=" or ".join(sorted(allowed)), remedy=remedy)
    if dtype not in QUANTISED and stored.dtype != STORED_NAMES[dtype]:
        raise InputError(
            f"pruning without quantising keeps the type of {tensor}",
            got=dtype_name(dtype),
            needed=f"{stored.dtype}, or int8 or fp8 to quantise",
        )


def check_options(options: PruneOptions) -> None:
    """Raise an InputError for options that are wrong or contradictory for any source."""
    require_kind(options.layers, Mapping, "layers", "a dict from names to patterns")
    patterns = {Pattern.parse(pattern) for pattern in (options.pattern, *options.layers.values())}
    idle = {"--match-steps": options.match_steps > 0}
    floats = options.dtype is not None and parse_dtype(options.dtype) not in QUANTISED
    idle[f"--method {options.method}"] = floats and options.calibration is not None  # in 8 bits a text smooths
    if patterns == {DENSE} and (given := [name for name, holds in idle.items() if holds]):
        raise InputError(
            "options without effect",
            got=f"{', '.join(given)} without a pattern",
            needed="a pattern: these treat the weights that are pruned",
            remedy=f"use --pattern 6:8, or leave out {given[0].split()[0]}",
        )
    if options.match_steps < 0:
        raise InputError("steps of matching", got=options.match_steps, needed="0 or more")
    _require_text(options)
    _require_type(options, None if options.dtype is None else parse_dtype(options.dtype))


def require_one_process(options: PruneOptions, processes: int) -> None:
    """Raise an InputError for matching layers, which several processes cannot share."""
    if processes > 1 and options.match_steps:
        remedy = "run without torchrun, or leave out --match-steps"
        raise InputError("layers are matched by one process", got=f"{processes} processes", remedy=remedy)


def _require_text(options: PruneOptions) -> None:
    """Refuse an unused text, and options that lack one."""
    pruner, calibration = get_pruner(options.method), options.calibration
    if calibration is not None and not pruner.needs_calibration:
        raise InputError(
            f"{pruner.name} takes no calibration text", got=calibration.file, remedy="use --method wanda or sparsegpt"
        )
    if pruner.needs_calibration and options.rounding == "ternary":
        raise InputError("the ternary rounding cannot be calibrated", got=pruner.name, needed="--method magnitude")
    if calibration is None and options.match_steps:
        remedy = "use --method sparsegpt or wanda, or leave out --match-steps"
        raise InputError("matching needs calibration text", got=f"--method {options.method}", remedy=remedy)


def _require_type(options: PruneOptions, dtype: torch.dtype | None) -> None:
    """Refuse a rounding that does not fit the type; None: the source's, which is not known yet."""
    if options.rounding not in ROUNDINGS:
        raise InputError("unknown rounding", got=repr(options.rounding), needed=" or ".join(ROUNDINGS))
    if options.rounding != "absmax" and dtype not in (None, torch.int8):
        what = f"the {options.rounding} rounding ends in INT8 storage"
        raise InputError(what, got=f"--dtype {options.dtype}", needed="--dtype int8, or --rounding absmax")
