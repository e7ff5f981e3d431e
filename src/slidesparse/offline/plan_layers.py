"""Plan what is pruned layer by layer with a calibration text, and refuse a model or a text that cannot be used so."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from slidesparse.checkpoints.expert_tensors import ExpertRowsByName, ExpertTensor, find_expert_rows
from slidesparse.errors import InputError
from slidesparse.models.experts import LEAVE_DENSE
from slidesparse.models.layer_stack import find_layer_list, require_single_passes
from slidesparse.models.match_layer import Matching
from slidesparse.models.sparsify import sets_to_prune
from slidesparse.offline.calibrate.calibration import calibration_windows
from slidesparse.offline.calibrate.layer_store import LayersToPrune
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage
from slidesparse.pruning import RoundForOutputs, SparseGPT, get_pruner
from slidesparse.pruning.round_outputs import FP8, SIX_BITS
from slidesparse.weights.pattern import DENSE, Pattern


def plan_layers(
    source: Source,
    options: PruneOptions,
    storage: Storage,
    linears: dict[str, nn.Linear],
    patterns: Mapping[str, Pattern],
    experts: Mapping[str, ExpertTensor],
    expert_patterns: Mapping[str, Pattern],
) -> LayersToPrune | None:
    """Return what is pruned layer by layer; None without a calibration text.

    Linears outside of the layers need no text where they stay dense, and are not among it.
    """
    if options.calibration is None:
        return None
    model = source.meta.model
    pruned = [name for name, pattern in {**patterns, **expert_patterns}.items() if pattern != DENSE]
    inside = f"{find_layer_list(model, pruned or patterns).name}."
    here = {name: one for name, one in patterns.items() if one != DENSE or name.startswith(inside)}
    require_single_passes(model, find_layer_list(model, here), source.run)
    windows = calibration_windows(source.checkpoint.path, getattr(model, "config", None), options.calibration)
    tensors = {name: one for name, one in experts.items() if expert_patterns[one.layer] != DENSE}
    rows = ExpertRowsByName(find_expert_rows(source.experts, source.meta, source.checkpoint, tensors), tensors)
    if options.match and rows.layers:
        raise InputError(
            "layers whose experts are pruned cannot be matched",
            got=f"experts such as {next(iter(expert_patterns))}",
            remedy=f"leave out --match, or leave experts dense with {LEAVE_DENSE}",
        )
    pruner = get_pruner(options.method)
    # INT8 gains nothing (docs/log/rounding.md).
    grid = FP8 if storage.rounds and storage.dtype != torch.int8 else SIX_BITS if options.recipe == "6bit" else None
    sets = sets_to_prune(model, linears, patterns, pruner, source.run)
    return LayersToPrune(
        windows=windows,
        pruner=pruner,
        sets=[*(names for names in sets if names[0] in here), *([name] for name in rows.layer_of)],
        patterns={**here, **{name: expert_patterns[layer] for name, layer in rows.layer_of.items()}},
        experts=rows,
        matching=Matching(options.match, options.calibration.seed) if options.match else None,
        rounder=RoundForOutputs(grid) if grid is not None and isinstance(pruner, SparseGPT) else None,
    )
