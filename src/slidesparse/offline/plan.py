"""Plan what ``slidesparse prune`` does with each tensor of a checkpoint, before any weight is read.

A plan is data: a dry run prints it, and :func:`slidesparse.offline.execute.execute` changes nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slidesparse.checkpoints.check_tensors import refuse_faults
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.expert_tensors import ExpertTensor
from slidesparse.errors import InputError
from slidesparse.files.stored import Stored
from slidesparse.models.sparsify import layer_patterns, require_alike
from slidesparse.models.targets import matches_entry, treated_head
from slidesparse.offline.calibrate.layer_store import LayersToPrune
from slidesparse.offline.calibrate.smoothing import Smoothing, plan_smoothing
from slidesparse.offline.new_config import new_config
from slidesparse.offline.plan_layers import plan_layers
from slidesparse.offline.prune_options import PruneOptions, check_type
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage
from slidesparse.offline.treated import find_treated
from slidesparse.offline.treated_experts import TreatedExperts, find_treated_experts, marked_experts
from slidesparse.weights.pattern import DENSE, Pattern


@dataclass(frozen=True)
class TensorJob:
    """What becomes of one tensor of the source.

    Attributes:
        outputs: The tensors that it becomes -> type and shape.
        layer: The linear, or the kind of experts' weights, that is treated; None: the tensor is copied.
        pattern: Pattern of the layer; at ``dense`` it is rounded and not pruned.
        becomes: For each weight [out, in] in a treated tensor the ``outputs`` that hold it, without scales.
        expert: What a tensor of experts holds; None for linears, and where it is copied.
    """

    outputs: Mapping[str, Stored]
    layer: str | None = None
    pattern: Pattern = DENSE
    becomes: tuple[tuple[str, ...], ...] = ()
    expert: ExpertTensor | None = None


@dataclass(frozen=True)
class Plan:
    """What becomes of a checkpoint.

    Attributes:
        source: What was looked up about it.
        options: The options.
        storage: The form in which treated weights are stored.
        shards: File name -> tensor of the source -> what becomes of it.
        patterns: Treated linear -> pattern.
        experts: Treated kind of experts' weights -> pattern.
        dense: Linears, routers and kinds of experts' weights that are left alone -> why.
        other: Modules and parameters that multiply, and are no linears -> why they are left alone.
        head: The output embedding, where it is treated.
        config: config.json of the new checkpoint.
        layers: What is pruned layer by layer with a calibration text; None: nothing is.
        smoothing: Where outliers of activations are folded into weights first; None: nowhere.
    """

    source: Source
    options: PruneOptions
    storage: Storage
    shards: Mapping[str, Mapping[str, TensorJob]]
    patterns: dict[str, Pattern]
    experts: dict[str, Pattern]
    dense: dict[str, str]
    other: dict[str, str]
    head: str | None
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


def plan(checkpoint: Checkpoint, options: PruneOptions) -> Plan:
    """Decide what becomes of each tensor of a checkpoint.

    Raises:
        CheckpointError: The source cannot be used.
        InputError: An option does not fit the source.
        UnsupportedError: Its experts cannot be treated as they are stored.
    """
    storage = Storage.of(checkpoint, options)
    source = Source.of(checkpoint)
    refuse_faults(source.meta, checkpoint)
    experts = find_treated_experts(source, options, storage)
    targets, everything = find_treated(source, options, storage)
    patterns = _patterns(source, options, [*targets.linears, *experts.layers])
    of_linears = {name: patterns[name] for name in targets.linears}
    of_experts = {name: patterns[name] for name in experts.layers}
    # What --ignore leaves alone keeps its type, and so differs from what is dense in 8 bits, too.
    forms = dict.fromkeys(everything, "left alone" if storage.rounds else DENSE) | of_linears
    require_alike(source.meta.model, everything, forms, source.run)
    jobs = {**_jobs_of_linears(source, storage, of_linears), **_jobs_of_experts(experts, of_experts)}
    layers = plan_layers(source, options, storage, targets.linears, of_linears, experts.treated, of_experts)
    return Plan(
        source=source,
        options=options,
        storage=storage,
        shards={
            shard: {name: jobs.get(name) or TensorJob({name: stored}) for name, stored in tensors.items()}
            for shard, tensors in checkpoint.shards.items()
        },
        patterns=of_linears,
        experts=of_experts,
        dense={**targets.dense, **source.routers, **experts.dense},
        other=targets.other,
        head=treated_head(source.meta.model, targets.linears),
        config=new_config(source, storage, Pattern.parse(options.pattern), targets, of_linears, experts, of_experts),
        layers=layers,
        smoothing=plan_smoothing(source, options, storage, layers),
    )


def _patterns(source: Source, options: PruneOptions, treated: list[str]) -> dict[str, Pattern]:
    """Return the pattern of each treated layer: by the options, and by the marker of a pruned source.

    Other patterns than that are refused: what it left dense would lose weights unseen.
    """
    if (marker := source.marker) is None:
        return layer_patterns(treated, options.pattern, options.layers)
    experts = marked_experts(source)
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


def _jobs_of_linears(source: Source, storage: Storage, patterns: Mapping[str, Pattern]) -> dict[str, TensorJob]:
    jobs = {}
    for name, pattern in patterns.items():
        tensor = f"{source.meta.prefix(name)}.weight"
        stored = source.checkpoint.stored(tensor)
        check_type(tensor, stored, storage.source, storage.dtype)
        outputs = storage.announced([tensor], *stored.shape)
        jobs[tensor] = TensorJob(outputs, name, pattern, ((tensor,),))
    return jobs


def _jobs_of_experts(experts: TreatedExperts, patterns: Mapping[str, Pattern]) -> dict[str, TensorJob]:
    jobs = {}
    for tensor, expert in experts.treated.items():
        stored, names = experts.source.checkpoint.stored(tensor), experts.becomes(tensor)
        rows, columns = stored.shape[:-3:-1] if expert.transposed else stored.shape[-2:]
        announced = [experts.storage.announced(parts, rows, columns) for parts in names]
        outputs = {name: one for each in announced for name, one in each.items()}
        jobs[tensor] = TensorJob(
            outputs if experts.storage.quantised else {tensor: stored},
            expert.layer,
            patterns[expert.layer],
            tuple(map(tuple, names)),
            expert,
        )
    return jobs
