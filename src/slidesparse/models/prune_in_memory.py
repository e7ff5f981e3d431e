"""Calibrated pruning of a model that is in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slidesparse.base.progress import progress_bar
from slidesparse.base.rank_tensors import RankTensors
from slidesparse.base.ranks import ALONE
from slidesparse.errors import InputError
from slidesparse.models.causal import vocabulary_of
from slidesparse.models.gram_tree import windows_of_a_batch
from slidesparse.models.layer_stack import find_layer_list, record_inputs, require_single_passes
from slidesparse.models.layerwise import prune_layers
from slidesparse.models.match_layer import Matching
from slidesparse.models.parts import text_config
from slidesparse.models.shared_layers import SharedLayers
from slidesparse.pruning import Pruner
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import require_dense


def check_windows_of_tokens(windows: torch.Tensor, model: nn.Module) -> None:
    """Raise an InputError for calibration windows that a model cannot read."""
    require_dense(windows, "calibration")
    needed = "int64 [windows, length], with 2 tokens or more in a window"
    if windows.dtype != torch.int64 or windows.dim() != 2 or not len(windows) or windows.shape[1] < 2:
        raise InputError("calibration windows", got=f"{windows.dtype} {list(windows.shape)}", needed=needed)
    config = getattr(model, "config", None)
    vocabulary, most = vocabulary_of(config), getattr(text_config(config), "max_position_embeddings", None)
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or (vocabulary and high >= vocabulary):
        raise InputError("tokens of calibration", got=f"{low} to {high}", needed=f"0 to {(vocabulary or 0) - 1}")
    if isinstance(most, int) and 0 < most < windows.shape[1]:
        raise InputError("calibration windows", got=f"{windows.shape[1]} tokens", needed=f"at most {most}")


def prune_in_memory(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    sets: Sequence[Sequence[str]],
    patterns: Mapping[str, Pattern],
    pruner: Pruner,
    windows: torch.Tensor,
    *,
    run: Callable[[], object] | None = None,
    matching: Matching | None = None,
    rounder: Pruner | None = None,
) -> dict[str, torch.Tensor]:
    """Return the pruned weights of linears by name, [out, in] in their types; the model keeps its own.

    Args:
        model: A causal language model whose layers are in one ``nn.ModuleList``.
        linears: The linears to prune, all of them in these layers.
        sets: Linears that read one input, from :func:`slidesparse.models.sparsify.sets_to_prune`.
        patterns: Linear -> pattern.
        pruner: A method that needs calibration.
        windows: int64 [windows, length].
        run: Runs the model, to check that each layer runs once; None: it cannot be run.
        matching: See :func:`slidesparse.models.layerwise.prune_layers`.
        rounder: See :func:`slidesparse.models.layerwise.prune_layers`.

    Raises:
        InputError: The layers of such a model cannot be run one by one, or an activation is NaN or Inf.
    """
    layer_list = find_layer_list(model, linears)
    require_single_passes(model, layer_list, run)
    device = next(model.parameters()).device
    parts = windows.to(device).split(windows_of_a_batch(windows))
    batches = [{"input_ids": part, "use_cache": False} for part in parts]
    shared = SharedLayers(RankTensors(ALONE, device), len(batches))  # so that sums have the order of ``prune``'s
    how: Any = {"matching": matching, "rounder": rounder}
    with _borrowed(model, linears), progress_bar(pruner.name, len(layer_list.layers), unit="layers") as advance:
        samples = record_inputs(model, layer_list, batches)
        for losses in prune_layers(model, layer_list, sets, patterns, pruner, samples, shared.prune_layer, **how):
            worst = max((loss.loss for loss in losses), default=0.0)
            advance(1, f"loss {worst:.2e}" if worst else "")
        return {name: linear.weight.data for name, linear in linears.items()}


@contextmanager
def _borrowed(model: nn.Module, linears: Mapping[str, nn.Linear]) -> Iterator[None]:
    """Run a model in evaluation mode with copies of these weights, and give it its own back."""
    modes = {module: module.training for module in model.modules()}
    own = {name: linear.weight.data for name, linear in linears.items()}
    try:
        model.eval()
        for name, linear in linears.items():
            linear.weight.data = own[name].clone()
        yield
    finally:
        for name, linear in linears.items():
            linear.weight.data = own[name]
        for module, mode in modes.items():
            module.training = mode
