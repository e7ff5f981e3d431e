"""The plan of ``slidesparse prune`` for each tensor of a checkpoint, made without weights.

A plan is data: a dry run prints it, and :func:`slidesparse.offline.execute.execute` changes nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slidesparse.checkpoints.check_tensors import refuse_faults
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.expert_tensors import ExpertRowsByName, find_expert_rows
from slidesparse.checkpoints.single_experts import single_experts
from slidesparse.errors import InputError
from slidesparse.files.stored import Stored
from slidesparse.models.experts import LEAVE_DENSE
from slidesparse.models.layer_stack import find_layer_list, require_single_passes
from slidesparse.models.match_layer import Matching
from slidesparse.models.sparsify import layer_patterns, require_alike, sets_to_prune
from slidesparse.models.targets import matches_entry
from slidesparse.offline.calibrate.calibration import calibration_windows
from slidesparse.offline.calibrate.layer_store import LayersToPrune
from slidesparse.offline.calibrate.smoothing import Smoothing, plan_smoothing
from slidesparse.offline.new_config import new_config
from slidesparse.offline.prune_options import PruneOptions, check_type, resolve_dtypes
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage, TensorJob
from slidesparse.offline.treated import Treated, find_treated
from slidesparse.pruning import get_pruner
from slidesparse.pruning.round_outputs import rounder_after
from slidesparse.weights.pattern import DENSE, Pattern


@dataclass(frozen=True)
class Plan:
    """The plan for a checkpoint.

    Attributes:
        source: The checkpoint and its model.
        options: The options.
        storage: The stored form of treated weights.
        treated: The treated layers, and those left alone with reasons.
        patterns: Treated linear, or kind of experts' weights -> pattern.
        shards: File name -> tensor of the source -> its job.
        config: config.json of the new checkpoint.
        layers: The layers to prune with a calibration text; None without one.
        smoothing: The folds of activation outliers into weights; None without smoothing.
    """

    source: Source
    options: PruneOptions
    storage: Storage
    treated: Treated
    patterns: dict[str, Pattern]
    shards: Mapping[str, Mapping[str, TensorJob]]
    config: dict[str, Any]
    layers: LayersToPrune | None
    smoothing: Smoothing | None

    @property
    def outputs(self) -> dict[str, dict[str, Stored]]:
        """File name -> tensor -> type and shape, of the new checkpoint."""
        return {
            shard: {name: one for job in jobs.values() for name, one in job.outputs.items()}
            for shard, jobs in self.shards.items()
        }


def plan(checkpoint: Checkpoint, options: PruneOptions, look: Callable[[Source], None] = lambda _: None) -> Plan:
    """Plan the treatment of each tensor of a checkpoint; ``look`` may refuse the weights before a text is cut.

    Raises:
        CheckpointError: The source cannot be used.
        InputError: An option does not fit the source.
        UnsupportedError: Its experts cannot be treated in their stored form.
    """
    storage = Storage(*resolve_dtypes(checkpoint, options), options.rounding, Pattern.parse(options.pattern))
    source = Source.of(checkpoint)
    refuse_faults(source.meta, checkpoint)
    treated = find_treated(source, options, storage)
    patterns = _patterns(source, options, treated.layers)
    of_linears = {name: patterns[name] for name in treated.linears.linears}
    # Ignored linears keep their type, and so differ from dense ones in 8 bits too.
    forms = dict.fromkeys(treated.unless_ignored, "left alone" if storage.rounds else DENSE) | of_linears
    require_alike(source.meta.model, treated.unless_ignored, forms, source.run)
    jobs: dict[str, TensorJob] = {}
    for name, pattern in of_linears.items():
        tensor = f"{source.meta.prefix(name)}.weight"
        check_type(tensor, checkpoint.stored(tensor), storage.source, storage.dtype)
        jobs[tensor] = storage.job(tensor, checkpoint.stored(tensor), name, pattern)
    for tensor, one in treated.experts.items():
        single = single_experts(type(source.meta.model).__name__, tensor)
        jobs[tensor] = storage.job(tensor, checkpoint.stored(tensor), one.layer, patterns[one.layer], one, single)
    shards = {
        shard: {name: jobs.get(name) or TensorJob({name: stored}) for name, stored in tensors.items()}
        for shard, tensors in checkpoint.shards.items()
    }
    config = new_config(source, storage, storage.common, treated, jobs)
    layers = _layers(source, options, storage, treated, patterns, look)
    smoothing = plan_smoothing(source, options, storage, layers)
    return Plan(source, options, storage, treated, patterns, shards, config, layers, smoothing)


def _patterns(source: Source, options: PruneOptions, treated: list[str]) -> dict[str, Pattern]:
    """Return the pattern of each treated layer, by the options, and by the marker of a pruned source.

    Patterns other than the marker's are refused: dense layers would lose weights unnoticed.
    """
    if (marker := source.marker) is None:
        return layer_patterns(treated, options.pattern, options.layers)
    experts = source.marked_experts()
    exceptions = {**marker.layers, **experts}
    kept = {name: exceptions[name] for name in treated if name in exceptions and name not in options.layers}
    patterns = layer_patterns(treated, options.pattern, {**options.layers, **kept})
    for name, pattern in patterns.items():
        left = name in marker.ignore or (name in source.expert_layers and name not in experts)
        marked = DENSE if left else exceptions.get(name, marker.pattern)
        if pattern != marked:
            entry = next((entry for entry in options.layers if matches_entry(name, entry)), None)
            follow = "leave out --lm-head" if name in marker.ignore else f"use --pattern {marked}"
            remedy = follow if entry is None else f"leave out --layer {entry}={options.layers[entry]}"
            needed = f"{marked}, as {source.checkpoint.path} is pruned"
            raise InputError(f"pattern of {name}", got=pattern, needed=needed, remedy=remedy)
    return patterns


def _layers(
    source: Source, options: PruneOptions, storage: Storage, treated: Treated, patterns: Mapping[str, Pattern],
    look: Callable[[Source], None],
) -> LayersToPrune | None:  # fmt: skip
    """Return the layers to prune or round with a calibration text; None without one.

    Dense linears outside of the layers need no text, and are left out.
    """
    if options.calibration is None:
        return None
    model, linears = source.meta.model, treated.linears.linears
    pruned = [name for name, pattern in patterns.items() if pattern != DENSE]
    inside = f"{find_layer_list(model, pruned or linears).name}."
    here = {name: patterns[name] for name in linears if patterns[name] != DENSE or name.startswith(inside)}
    require_single_passes(model, find_layer_list(model, here), source.run)
    pruner = get_pruner(options.method)
    rounder = rounder_after(pruner, storage.dtype, storage.weight_rounding) if storage.rounds else None
    six_bits = rounder is not None and storage.rounding_of(DENSE) == "6bit"  # for eight a text gains nothing
    changed = {name: pattern for name, pattern in patterns.items() if pattern != DENSE or six_bits}
    experts = {name: one for name, one in treated.experts.items() if one.layer in changed}
    rows = ExpertRowsByName(find_expert_rows(source.experts, source.meta, source.checkpoint, experts), experts)
    if options.match_steps and experts:
        raise InputError(
            "layers whose experts are pruned cannot be matched",
            got=f"experts such as {next(iter(experts.values())).layer}",
            remedy=f"leave out --match-steps, or leave experts dense with {LEAVE_DENSE}",
        )
    coupled = {name: linears[name] for name in here if name in changed}
    sets = sets_to_prune(model, coupled, changed, pruner, source.run)
    look(source)
    windows = calibration_windows(source.checkpoint.path, getattr(model, "config", None), options.calibration)
    return LayersToPrune(
        windows=windows,
        pruner=pruner,
        sets=[*sets, *([name] for name in rows.layer_of)],
        patterns={**here, **{name: patterns[layer] for name, layer in rows.layer_of.items()}},
        experts=rows,
        matching=Matching(options.match_steps, options.calibration.seed) if options.match_steps else None,
        rounder=rounder,
    )
