"""Prune a checkpoint with calibration: read its layers from disk one by one, and write each back to disk pruned.

The pruned weights of a layer are written as soon as they are known, so a run that is killed goes on after its last
finished layer; the layers before it only run once more, to give the next one its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from slidesparse.base.progress import progress_bar
from slidesparse.base.rank_tensors import rank_tensors
from slidesparse.base.ranks import Ranks
from slidesparse.errors import InputError, first_line
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.expert_tensors import ExpertRowsByName
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.models.expert_weights import calibrated_experts
from slidesparse.models.layer_stack import record_inputs
from slidesparse.models.layerwise import SetLoss, prune_layers
from slidesparse.models.match_layer import Matching
from slidesparse.models.shared_layers import SharedLayers
from slidesparse.offline.calibrate.layer_store import open_layers, windows_of_a_batch
from slidesparse.prune import Pruner
from slidesparse.weights.pattern import Pattern


class PrunedLayers:
    """The pruned weights of all layers, on disk.

    Attributes:
        losses: The loss of every set of linears.
    """

    def __init__(self, files: Sequence[Path], losses: list[SetLoss]) -> None:
        self.losses = losses
        readers = [TensorReader(path) for path in files]
        self.reader_of = {name: reader for reader in readers for name in reader.stored}

    def weight(self, name: str) -> torch.Tensor:
        """Return the pruned weight of a linear."""
        return self.reader_of[name].tensor(name)


def prune_layers_from_disk(
    checkpoint: Checkpoint,
    sets: Sequence[Sequence[str]],
    patterns: Mapping[str, Pattern],
    pruner: Pruner,
    windows: torch.Tensor,
    folder: Path,
    device: torch.device,
    *,
    progress: bool | None,
    ranks: Ranks,
    experts: ExpertRowsByName | None,
    matching: Matching | None,
) -> PrunedLayers:
    """Prune all layers of a causal language model with calibration on windows [samples, length].

    ``folder`` gets a file for each pruned layer; those of an interrupted run with the same options are used again.

    Raises:
        InputError: The model or its activations cannot be used.
        CheckpointError: The checkpoint is damaged.
    """
    folder.mkdir(exist_ok=True)
    layer_list, store = open_layers(checkpoint, patterns, folder, device, ranks=ranks, experts=experts)
    model = store.meta.model
    weights = {} if experts is None else calibrated_experts(model, experts.layers)
    batches = windows.split(windows_of_a_batch(windows))
    losses = []
    with (
        _explained(model),
        progress_bar(pruner.name, len(layer_list.layers), unit="layers", show=progress) as advance,
        rank_tensors(ranks, device) as tensors,
    ):
        shared = SharedLayers(tensors, len(batches))
        own = [{"input_ids": batches[number].to(device), "use_cache": False} for number in shared.own]
        samples = record_inputs(model, layer_list, own)
        steps = prune_layers(
            model,
            layer_list,
            sets,
            patterns,
            pruner,
            samples,
            store,
            shared.prune_layer,
            experts=weights,
            matching=matching,
        )
        for (name, _), _ in zip(layer_list.items(), steps, strict=True):
            ranks.wait()  # for the file of the layer, which the first process writes
            here = store.losses(name)
            losses += here
            advance(1, f"loss {max((loss.loss for loss in here), default=0.0):.2e}")
    return PrunedLayers([store.file(name) for name, _ in layer_list.items()], losses)


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise InputError(
            f"{type(model).__name__} does not fit on the GPU layer by layer",
            got=first_line(error),
            remedy="use fewer or shorter calibration windows (--samples, --length)",
        ) from error
