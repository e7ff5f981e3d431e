"""``slidesparse plan``: measure how much damage each pattern does in each set of linears, and choose.

Measuring takes long and does not depend on the target, so the measurements go to a file of their own, line by line: a
run that is killed goes on there, and another target needs no new measurements.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.base.device import usable_device
from slidesparse.base.from_bench import from_bench
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import progress_bar
from slidesparse.errors import CheckpointError, InputError, UnsupportedError
from slidesparse.files.check_tensors import refuse_faults
from slidesparse.files.checkpoint import INDEX_FILE, Checkpoint
from slidesparse.files.json_files import write_json
from slidesparse.files.marker import quantisation_dtype
from slidesparse.files.meta_model import MetaModel, build_meta_model
from slidesparse.files.source_files import survey
from slidesparse.models.causal import refuse_masked, require_causal
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.expert_weights import calibrated_experts
from slidesparse.models.experts import LEAVE_DENSE, find_experts
from slidesparse.models.layer_stack import find_layer_list, require_single_passes
from slidesparse.models.sparsify import run_once
from slidesparse.offline.calibrate.calibration import FEWER, SHORTER, calibration_windows
from slidesparse.offline.evaluate import load_any
from slidesparse.offline.plan.choose_patterns import Multiplies, Plan, Times, choose_patterns, require_reachable
from slidesparse.offline.plan.plan_file import about, described
from slidesparse.offline.plan.plan_options import HELD_OUT, SERVED_LOADS, PlanOptions
from slidesparse.offline.plan.plan_sets import PlannedSets, find_sets
from slidesparse.offline.plan.sensitivity import damage_together, measure_sensitivities
from slidesparse.offline.plan.sensitivity_file import opened_measurements, sensitivity_file
from slidesparse.offline.stored_plan import PLAN_VERSION
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import DENSE, Pattern


def plan_checkpoint(
    source: str | Path,
    out: str | Path,
    options: PlanOptions,
    *,
    device: str | torch.device = "cpu",
    progress: bool | None = None,
) -> Plan:
    """Choose a pattern for every linear of a checkpoint, and write the choice for ``prune --plan``.

    Unlike ``prune`` this holds the whole model on the device, in float32: damage is measured at the model's output.

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
    patterns = [pattern for pattern in map(Pattern.parse, options.patterns) if pattern != DENSE]
    pruner = get_pruner(options.method)
    meta = _usable_model(checkpoint)
    if options.at:
        _refuse_mixture(meta.model)
    run = run_once(meta.model)
    planned = find_sets(meta, checkpoint, options, run)
    if planned.kept_type is not None and options.recipe != "absmax":
        raise InputError(
            "these experts cannot be quantised as they are stored",
            got=f"--recipe {options.recipe}",
            remedy=f"leave it out, or add {LEAVE_DENSE}",
        )
    layers = find_layer_list(meta.model, planned.shapes, remedy=None)  # whatever the method
    if pruner.needs_calibration:
        require_single_passes(meta.model, layers, run)
    times, patterns, basis = _times(options, planned, patterns, len(layers.layers), device)
    require_reachable(planned.with_choices(patterns), options.target, times)
    config: Any = meta.model.config
    n_seen, too_short = (options.calibration.samples, FEWER) if pruner.needs_calibration else (0, SHORTER)
    text = replace(options.calibration, samples=HELD_OUT + n_seen)  # damage is measured on the first ones
    windows = calibration_windows(checkpoint.path, config, text, too_short).to(device)
    model = load_any(checkpoint, device).float()  # 16 bits round anew after any change: more than a light pattern does
    require_causal(model)
    model.config.output_router_logits = False  # else a mixture's head reads what all layers give, and not all run
    experts = calibrated_experts(model, planned.reached)
    measured = about(checkpoint, options, windows)
    batches = [{"input_ids": ids[None], "use_cache": False} for ids in windows]
    held_out, seen = batches[:HELD_OUT], batches[HELD_OUT:]
    with opened_measurements(sensitivity_file(out), measured) as file:
        _refuse_existing(out)  # by a run that was still measuring
        known = file.damages_of(planned.sets)
        allowed = ((tuple(names), planned.allowed(names, patterns)) for names in planned.sets)
        wanted = {names: [one for one in some if (names[0], str(one)) not in known] for names, some in allowed}
        total = sum(map(len, wanted.values()))
        with progress_bar("plan", total, unit="measurements", show=progress) as advance:
            for found in measure_sensitivities(model, wanted, pruner, seen, held_out, experts) if total else ():
                file.add(found)
                advance(1, f"{found.pattern} {found.damage:.1e}")
        plan = choose_patterns(planned.with_choices(patterns, file.damages_of(planned.sets)), options.target, times)
        together = damage_together(model, planned.sets, plan.patterns, pruner, seen, held_out, experts)
        plan = replace(plan, basis=basis, together=together, kept_type=planned.kept_type)
        write_json(out, {"version": PLAN_VERSION, **measured, **described(plan, options)})
    return plan


def _usable_model(checkpoint: Checkpoint) -> MetaModel:
    """Return the meta model of a checkpoint that can be planned for: dense, whole, causal, and fit to be copied."""
    if checkpoint.config.get(MARKER_KEY) is not None or quantisation_dtype(checkpoint.config) is not None:
        raise CheckpointError(
            f"{checkpoint.path} is pruned or quantised already", needed="the dense model in a float type"
        )
    meta = build_meta_model(checkpoint)
    refuse_faults(meta, checkpoint)
    survey(checkpoint.path, {"config.json", INDEX_FILE, *checkpoint.shards}, "copy")
    refuse_masked(type(meta.model))
    return meta


def _refuse_mixture(model: nn.Module) -> None:
    """Raise an UnsupportedError for the speed of a served mixture: its experts take time, dense or not."""
    if experts := find_experts(model):
        raise UnsupportedError(
            "the speed of a served mixture of experts cannot be predicted",
            got=f"--at and {experts[0].name}",
            needed="records of a whole mixture that was served dense and at each pattern",
            remedy="leave out --at, and matrix products alone are modelled",
        )


def _times(
    options: PlanOptions, planned: PlannedSets, patterns: Sequence[Pattern], layers: int, device: torch.device
) -> tuple[Times, list[Pattern], tuple[str, ...]]:
    """Return what a step takes, the patterns of which that is known, and what it rests on."""
    if not options.at:
        left_alone = sum(Multiplies().of(one, DENSE) for one in planned.dense)
        return (Multiplies(options.mma_gain, rest=left_alone, rest_before=left_alone),), list(patterns), ()
    served: tuple[Times, list[Pattern], tuple[str, ...]]
    served = from_bench(SERVED_LOADS, "slidesparse plan --at").times_of(options, planned, patterns, layers, device)
    return served


def _refuse_existing(out: Path) -> None:
    if out.is_dir():
        raise InputError(f"{out} is a folder", needed="a file to make, such as plan.json in it")
    if os.path.lexists(out):
        raise InputError(
            f"{out} exists", remedy="remove it, and its measurements are used again; or choose another name"
        )
