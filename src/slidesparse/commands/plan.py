"""``slidesparse plan``: measure how much damage each pattern does in each set of linears, and choose.

Measuring takes long and does not depend on the target, so the measurements go to a file of their own, line by line: a
run that is killed goes on there, and another target needs no new measurements.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from slidesparse.base.device import usable_device
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import progress_bar
from slidesparse.commands.evaluate import load_any
from slidesparse.commands.plan_file import PLAN_VERSION, about, described
from slidesparse.commands.plan_options import HELD_OUT, PlanOptions
from slidesparse.commands.prune_experts import can_be_quantised, entries_for_linears
from slidesparse.commands.sensitivity_file import opened_measurements, sensitivity_file
from slidesparse.commands.step_time import LayerTimes, joined_size, served_steps, served_times
from slidesparse.errors import CheckpointError, InputError, UnsupportedError
from slidesparse.files.calibration import FEWER, SHORTER, Calibration, calibration_windows
from slidesparse.files.check_tensors import refuse_faults
from slidesparse.files.checkpoint import INDEX_FILE, Checkpoint
from slidesparse.files.expert_tensors import tensors_of
from slidesparse.files.generation_settings import generation_settings
from slidesparse.files.json_files import write_json
from slidesparse.files.marker import quantisation_dtype
from slidesparse.files.meta_model import MetaModel, build_meta_model
from slidesparse.files.source_files import survey
from slidesparse.files.stored import STORED_NAMES
from slidesparse.gemm import Problem, get_backend
from slidesparse.models.causal import refuse_masked, require_causal
from slidesparse.models.choose_patterns import (
    Multiplies,
    PatternChoice,
    Plan,
    PlanSet,
    Times,
    choose_patterns,
    require_reachable,
)
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.expert_weights import calibrated_experts
from slidesparse.models.experts import (
    LEAVE_DENSE,
    Experts,
    experts_of_a_token,
    find_experts,
    find_routers,
    linears_inside,
)
from slidesparse.models.layer_stack import find_layer_list, require_single_passes
from slidesparse.models.parts import text_config
from slidesparse.models.sensitivity import damage_together, may_have, measure_sensitivities
from slidesparse.models.sparsify import require_alike, run_once, sets_to_prune
from slidesparse.models.targets import find_targets, matches_entry
from slidesparse.models.weight_reads import read_without_calling
from slidesparse.pattern import DENSE, Pattern
from slidesparse.prune import get_pruner
from slidesparse.quant import FLOATS, dtype_name

EXPERTS_COUNTED = "experts count as if they were multiplied sparse, as a Hopper GPU does in INT8 and FP8"


def plan_checkpoint(
    source: str | Path,
    out: str | Path,
    options: PlanOptions,
    *,
    device: str | torch.device = "cpu",
    progress: bool | None = None,
) -> Plan:
    """Choose a pattern for every linear of a checkpoint, and write the choice for ``prune --plan``.

    Unlike ``prune`` this holds the whole model on the device, since damage is measured at the model's output.

    Args:
        source: A local Hugging Face checkpoint in a float type.
        out: JSON file to make. The measurements go into another file in its folder, :func:`sensitivity_file`.
        options: Target, text, method and patterns.
        device: Device on which the model runs.
        progress: Show a progress bar; None: on a terminal only.

    Raises:
        InputError: An option, the text or the target cannot be used, or ``out`` exists.
        CheckpointError: The source cannot be used, or the measurements are of another one.
        UnsupportedError: Times of the layers are asked for, and there are none.
    """
    out, device = usable_path(out, "plan"), usable_device(device)
    _refuse_existing(out)
    if not out.absolute().parent.is_dir():
        raise InputError("the folder of the plan does not exist", got=out.parent, remedy="make it first")
    checkpoint = Checkpoint(source)
    if checkpoint.config.get(MARKER_KEY) is not None or quantisation_dtype(checkpoint.config) is not None:
        raise CheckpointError(f"{source} is pruned or quantised already", needed="the dense model in a float type")
    patterns = [pattern for pattern in map(Pattern.parse, options.patterns) if pattern != DENSE]
    pruner = get_pruner(options.method)
    meta = build_meta_model(checkpoint)
    refuse_faults(meta, checkpoint)
    generation_settings(checkpoint)  # copied as they are: refused where no model would load with them
    survey(checkpoint.path, {"config.json", INDEX_FILE, *checkpoint.shards}, "copy")  # what prune never copies
    refuse_masked(type(meta.model))
    experts = find_experts(meta.model)
    planned = _planned_experts(experts, meta, checkpoint, options)
    kept_type = _kept_type(planned, meta, checkpoint)
    inside, ignore = linears_inside(meta.model, experts), entries_for_linears(options.ignore, experts, meta.model)
    keep = meta.why_stored_otherwise() | find_routers(meta.model, experts)
    keep |= read_without_calling(
        meta.model, find_targets(meta.model, ignore, keep=keep, without=inside).linears, run_once(meta.model)
    )
    linears = find_targets(meta.model, ignore, keep=keep, without=inside).linears
    shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
    if options.backend is not None:
        _require_backend(options.backend, patterns, shapes, device)
    # The sets that a calibrated method sees, whatever the method: fused layers share a pattern in any case.
    coupled = dict.fromkeys(linears, Pattern.parse("6:8"))
    run = run_once(meta.model)
    everything = find_targets(meta.model, without=inside).linears  # prune leaves dense what the plan does not name
    require_alike(meta.model, everything, {name: coupled.get(name, DENSE) for name in everything}, run)
    sets = sets_to_prune(meta.model, linears, coupled, get_pruner("wanda"), run)
    sets += [[one.layer(leaf) for leaf in one.weights] for one in planned]
    shapes |= {one.layer(leaf): one.rows(leaf) for one in planned for leaf in one.weights}
    reached = {one.layer(leaf): _reached(one, meta.model) for one in planned for leaf in one.weights}
    layers = find_layer_list(meta.model, shapes, remedy=None)  # whatever the method
    if pruner.needs_calibration:
        require_single_passes(meta.model, layers, run)
    times, patterns, basis = _times(
        options, _plan_sets(sets, shapes, (), {}, reached), patterns, len(layers.layers), device
    )
    undamaged = {(name, str(pattern)): 0.0 for name in shapes for pattern in patterns}
    require_reachable(_plan_sets(sets, shapes, patterns, undamaged, reached), options.target, times)
    config: Any = meta.model.config
    too_short = FEWER if pruner.needs_calibration else SHORTER
    windows = calibration_windows(checkpoint.path, config, _windows_of(options), too_short).to(device)
    model = load_any(source, device)
    require_causal(model)
    weights = calibrated_experts(model, reached)
    measured = about(checkpoint, options, windows)
    batches = [{"input_ids": ids[None], "use_cache": False} for ids in windows]
    total = sum(may_have(pattern, experts=names[0] in reached) for names in sets for pattern in patterns)
    with opened_measurements(sensitivity_file(out), measured) as file:
        _refuse_existing(out)  # by a run that was still measuring
        known = file.damages_of(sets)
        with progress_bar("plan", total, unit="measurements", show=progress) as advance:
            for found in measure_sensitivities(
                model, sets, patterns, pruner, batches[HELD_OUT:], batches[:HELD_OUT], known, weights
            ):
                file.add(found)
                advance(1, f"{found.pattern} {found.damage:.1e}")
        damages = file.damages_of(sets)
        chosen = _plan_sets(sets, shapes, patterns, damages, reached)
        plan = choose_patterns(chosen, options.target, times)
        together = damage_together(model, sets, plan.patterns, pruner, batches[HELD_OUT:], batches[:HELD_OUT], weights)
        plan = replace(plan, basis=basis, together=together, kept_type=kept_type)
        write_json(out, {"version": PLAN_VERSION, **measured, **described(plan, options)})
    return plan


def _times(
    options: PlanOptions, sets: Sequence[PlanSet], patterns: Sequence[Pattern], layers: int, device: torch.device
) -> tuple[Times, list[Pattern], tuple[str, ...]]:
    """Return what a step takes, the patterns of which that is known, and what it rests on.

    Raises:
        InputError: A load is none.
        UnsupportedError: Not one of the patterns was measured on all layers.
    """
    if not options.at:
        return (Multiplies(options.mma_gain),), list(patterns), ()
    times = LayerTimes(options.dtype, device)
    timed = [p for p in patterns if all(times.find(p, *joined_size(one)) for one in sets if not one.of_experts)]
    served = served_times(options.at, layers, times, timed)
    if not timed:
        raise UnsupportedError(
            "no times of these layers",
            got=f"{options.dtype}, {', '.join(map(str, patterns))}",
            remedy="measure them with slidesparse tune, or leave out --at",
        )
    left_out = ", ".join(str(pattern) for pattern in patterns if pattern not in timed)
    basis = [*times.basis(timed, sets), f"all else as served: {served_steps().source}"]
    return served, timed, (*basis, *([f"left out, since not measured: {left_out}"] if left_out else []))


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise InputError(
            f"{out} exists", remedy="remove it, and its measurements are used again; or choose another name"
        )


def _planned_experts(
    found: Sequence[Experts], meta: MetaModel, checkpoint: Checkpoint, options: PlanOptions
) -> list[Experts]:
    """Return the experts that get a pattern, those of a layer one together.

    Raises:
        InputError: Some weights of a layer's experts are on the ignore list, and others are not.
        UnsupportedError: Nobody can tell along which dimension an expert multiplies.
    """
    planned = []
    for one in found:
        layers = [one.layer(leaf) for leaf in one.weights]
        left = [name for name in layers if any(matches_entry(name, entry) for entry in options.ignore)]
        if left and len(left) < len(layers):
            raise InputError(
                "the experts of a layer get one pattern", got=f"--ignore of {left[0]}", needed="all or none"
            )
        if not left:
            tensors_of(one, meta, checkpoint)
            planned.append(one)
    return planned


def _kept_type(planned: Sequence[Experts], meta: MetaModel, checkpoint: Checkpoint) -> str | None:
    """Return the type of experts that ``prune`` cannot quantise as they are stored; None where there are none."""
    for one in planned:
        for name, tensor in tensors_of(one, meta, checkpoint).items():
            stored = checkpoint.stored(name)
            if not can_be_quantised(name, tensor, stored, type(meta.model).__name__):
                return next(dtype_name(dtype) for dtype in FLOATS if STORED_NAMES[dtype] == stored.dtype)
    return None


def _reached(experts: Experts, model: Any) -> Fraction:
    """Return the share of a layer's experts to which a token is routed."""
    return Fraction(min(experts_of_a_token(text_config(model.config)), experts.count), experts.count)


def _plan_sets(
    sets: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, int]],
    patterns: Sequence[Pattern],
    damages: Mapping[tuple[str, str], float],
    reached: Mapping[str, Fraction],
) -> list[PlanSet]:
    """Return the sets with the patterns that each may get, dense among them."""
    made = []
    for names in sets:
        allowed = [pattern for pattern in patterns if may_have(pattern, experts=names[0] in reached)]
        choices = (PatternChoice(pattern, damages[names[0], str(pattern)]) for pattern in allowed)
        made.append(
            PlanSet(
                tuple(names),
                tuple(shapes[name] for name in names),
                (PatternChoice(DENSE, 0.0), *choices),
                reached.get(names[0], Fraction(1)),
            )
        )
    return made


def describe(plan: Plan, options: PlanOptions, out: Path) -> str:
    """Return a plan as text, with the command that uses it."""
    counts = Counter(map(str, plan.patterns.values()))
    text = _calibration_words(options.calibration) if get_pruner(options.method).needs_calibration else ""
    return "\n".join(
        [
            f"{len(plan.patterns)} layers: " + ", ".join(f"{n} at {pattern}" for pattern, n in counts.most_common()),
            *([EXPERTS_COUNTED] if plan.has_experts else []),
            *([] if plan.kept_type is None else [_kept_words(plan.kept_type, options.dtype)]),
            f"{_speed_words(plan, options)}, {plan.sparsity:.1%} zeros, {plan.gigabytes:.3f} GB,"
            f" predicted damage {plan.damage:.4f} nats a token" + _together_words(plan),
            *plan.basis,
            f"use it with: slidesparse prune SRC DST --plan {quote(str(out))} --method {options.method}{text}"
            f" --dtype {plan.kept_type or options.dtype}",
        ]
    )


def _kept_words(kept_type: str, wanted: str) -> str:
    return (
        f"these experts cannot be quantised as they are stored: prune keeps {kept_type}, in which they run dense;"
        f" {LEAVE_DENSE} plans all else for {wanted}"
    )


def _together_words(plan: Plan) -> str:
    """Return how the damage of the whole compares with the sum of what single sets do."""
    return "" if plan.together is None else f", measured with all of it pruned {plan.together:.4f}"


def _speed_words(plan: Plan, options: PlanOptions) -> str:
    if not options.at:
        return f"modelled {plan.speedup:.3f}x of dense"
    told = ", ".join(f"{speedup:.3f}x at {name}" for name, speedup in plan.speedups.items())
    return f"predicted over stock vLLM: {told}"


def _calibration_words(calibration: Calibration) -> str:
    """Return the options with which ``prune`` sees the text as ``plan`` did, each where it is not the usual one."""
    usual = Calibration(calibration.file)
    names = [name for name in ("samples", "length", "seed") if getattr(calibration, name) != getattr(usual, name)]
    return f" --calibration {quote(str(calibration.file))}" + "".join(
        f" --{name} {getattr(calibration, name)}" for name in names
    )


def _windows_of(options: PlanOptions) -> Calibration:
    """Return the text: the windows on which damage is measured come first, then those that the method sees."""
    seen = options.calibration.samples if get_pruner(options.method).needs_calibration else 0
    return replace(options.calibration, samples=HELD_OUT + seen)


def _require_backend(
    name: str, patterns: Iterable[Pattern], shapes: dict[str, tuple[int, int]], device: torch.device
) -> None:
    backend = get_backend(name)
    for pattern in patterns:
        for layer, shape in shapes.items():
            reason = backend.why_not(Problem(pattern, torch.int8, *shape, device))
            if reason is not None:
                raise InputError(
                    f"{name} cannot run {pattern} at {layer}: {reason}",
                    remedy="leave the pattern out with --patterns, or the layer with --ignore",
                )
