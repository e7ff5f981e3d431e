"""Prune a checkpoint with calibration: read its layers from disk one by one, and write each back to disk pruned.

The pruned weights of a layer are written at once, so that a killed run resumes after its last finished layer; the
layers before it run once more, for the next one's inputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.base.log import LOG
from slidesparse.base.progress import progress_bar
from slidesparse.base.rank_tensors import RankTensors
from slidesparse.base.ranks import ALONE, Ranks
from slidesparse.base.typed_json import decode, parse_json
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.expert_tensors import ExpertRowsByName
from slidesparse.checkpoints.meta_model import MetaModel, build_meta_model
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import write_tensors
from slidesparse.models.expert_weights import ExpertWeight, calibrated_experts
from slidesparse.models.gram_tree import windows_of_a_batch
from slidesparse.models.layer_stack import LayerList, find_layer_list, record_inputs, stack_around
from slidesparse.models.layerwise import LayerStore, SetLoss, prune_layers
from slidesparse.models.match_layer import Matching
from slidesparse.models.shared_layers import SharedLayers
from slidesparse.pruning import Pruner
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import dequantize

LOSSES = "losses"

NO_EXPERTS = ExpertRowsByName((), {})


@dataclass(frozen=True)
class LayersToPrune:
    """Layers to prune or round one by one: arguments of :func:`slidesparse.models.layerwise.prune_layers` and two more.

    Attributes:
        windows: The calibration windows: int64 [samples, length].
        experts: The pruned experts' weights in the checkpoint.
    """

    windows: torch.Tensor
    pruner: Pruner
    sets: Sequence[Sequence[str]]
    patterns: Mapping[str, Pattern]
    experts: ExpertRowsByName = NO_EXPERTS
    matching: Matching | None = None
    rounder: Pruner | None = None

    @cached_property
    def changed(self) -> frozenset[str]:
        """The linears and kinds of experts' weights that change with the text."""
        return frozenset(self.experts.layer_of.get(name, name) for names in self.sets for name in names)


@dataclass(eq=False)
class CheckpointLayerStore(LayerStore):
    """Reads the layers of a checkpoint one by one, and frees each afterwards."""

    checkpoint: Checkpoint
    meta: MetaModel
    folder: Path
    device: torch.device
    compute: torch.dtype
    ranks: Ranks
    experts: ExpertRowsByName

    def fill(self, names: Sequence[str]) -> None:
        """Read these tensors of the model's state from the checkpoint."""
        known = set(self.meta.filled)
        state = {name: self.meta.read(name, self._read) for name in names if name in known}
        types = {name: self.meta.runs_in(name, self.compute) for name in state}
        wide = {name: t.to(types[name]) if t.is_floating_point() else t for name, t in state.items()}
        self.meta.model.load_state_dict(wide, strict=False, assign=True)

    def load(self, name: str, layer: nn.Module) -> None:
        """See :class:`slidesparse.models.layerwise.LayerStore`."""
        self.fill([f"{name}.{tensor}" for tensor in layer.state_dict(keep_vars=True)])

    def release(self, name: str, layer: nn.Module) -> None:
        """See :class:`slidesparse.models.layerwise.LayerStore`."""
        empty = {tensor: torch.empty_like(value, device="meta") for tensor, value in layer.state_dict().items()}
        layer.load_state_dict(empty, assign=True)

    def weight(self, name: str, linear: nn.Linear | ExpertWeight) -> torch.Tensor:
        """Return the weight to prune in its stored type, or in float32 if that has 8 bits."""
        if name in self.experts:
            return self.experts.weight(name, self._read_expert)
        return self._read(f"{self.meta.prefix(name)}.weight")

    def _read_expert(self, tensor: str, index: int) -> torch.Tensor:
        if len(self.checkpoint.stored(tensor).shape) == 2:
            return self._read(tensor)
        return self.checkpoint.part(tensor, index, self.device)

    def finished(self, name: str) -> dict[str, torch.Tensor] | None:
        """See :class:`slidesparse.models.layerwise.LayerStore`."""
        path = self.file(name)
        # Only the first process looks for the file, whose absence a shared file system may cache.
        if not self.ranks.gather(self.ranks.is_first and path.exists())[0]:
            return None
        weights = None
        try:
            reader = TensorReader(path)
            weights = {tensor: reader.verified(tensor, self.device) for tensor in reader.stored}
        except CheckpointError as error:
            LOG.warning("%s; the layer is pruned again", error)
        return weights if all(self.ranks.gather(weights is not None)) else None

    def keep(self, name: str, weights: dict[str, torch.Tensor], losses: Sequence[SetLoss]) -> None:
        """See :class:`slidesparse.models.layerwise.LayerStore`."""
        if self.ranks.is_first:
            write_tensors(self.file(name), weights, {LOSSES: json.dumps([asdict(loss) for loss in losses])})

    def losses(self, name: str) -> list[SetLoss]:
        """Return the losses of a finished layer, one for each set of linears."""
        path = self.file(name)
        try:
            text = TensorReader(path).metadata.get(LOSSES, "")
            losses: tuple[SetLoss, ...] = decode(tuple[SetLoss, ...], parse_json(text, LOSSES, non_finite=True), LOSSES)
        except InputError as error:
            raise CheckpointError(f"{path} is damaged: {error}", remedy="remove it and run again") from error
        return list(losses)

    def file(self, name: str) -> Path:
        """Return the file of a finished layer."""
        return self.folder / f"{name}.safetensors"

    def _read(self, tensor: str) -> torch.Tensor:
        value = self.checkpoint.tensor(tensor, self.device)
        scale = f"{tensor}_scale"
        known = scale in self.checkpoint.files
        return dequantize(value, self.checkpoint.tensor(scale, self.device)) if known else value


def open_layers(
    checkpoint: Checkpoint,
    linears: Iterable[str],
    folder: Path,
    device: torch.device,
    *,
    compute: torch.dtype | None = None,
    ranks: Ranks = ALONE,
    experts: ExpertRowsByName = NO_EXPERTS,
) -> tuple[LayerList, CheckpointLayerStore]:
    """Return the layers of a model, without weights, and the store that loads them; all modules before have theirs."""
    if compute is None and device.type == "cpu":
        compute = torch.float32  # CPUs are slow in all other types
    meta = build_meta_model(checkpoint, real_buffers=True, dtype=compute)
    model: Any = meta.model
    layer_list = find_layer_list(model, linears)
    compute = compute or model.config.dtype or torch.float32
    store = CheckpointLayerStore(checkpoint, meta, folder, device, compute, ranks, experts)
    _prepare_stack(model, layer_list, store, device)
    return layer_list, store


def _prepare_stack(model: nn.Module, layer_list: LayerList, store: CheckpointLayerStore, device: torch.device) -> None:
    """Fill the modules before the layers, and move all buffers to the layers' device."""
    stack, _ = stack_around(model, layer_list)
    around = [name for name in model.state_dict(keep_vars=True) if name.startswith(f"{stack}." if stack else "")]
    store.fill([name for name in around if not name.startswith(f"{layer_list.name}.")])
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


class PrunedLayers:
    """The pruned weights of all layers, on disk, and the loss of every set of linears."""

    def __init__(self, files: Sequence[Path], losses: list[SetLoss]) -> None:
        self.losses = losses
        readers = [TensorReader(path) for path in files]
        self.reader_of = {name: reader for reader in readers for name in reader.stored}

    def weight(self, name: str) -> torch.Tensor:
        """Return the pruned weight of a linear, or of an expert."""
        return self.reader_of[name].tensor(name)


def prune_layers_from_disk(
    checkpoint: Checkpoint,
    job: LayersToPrune,
    folder: Path,
    device: torch.device,
    *,
    progress: bool | None = None,
    ranks: Ranks = ALONE,
) -> PrunedLayers:
    """Prune all layers of a causal language model with calibration.

    ``folder`` gets a file for each pruned layer; those of an interrupted run with the same options are reused.
    """
    folder.mkdir(exist_ok=True)
    layer_list, store = open_layers(checkpoint, job.patterns, folder, device, ranks=ranks, experts=job.experts)
    model = store.meta.model
    weights = calibrated_experts(model, job.experts.layers) if job.experts.layers else {}
    batches = job.windows.split(windows_of_a_batch(job.windows))
    losses = []
    with progress_bar(job.pruner.name, len(layer_list.layers), unit="layers", show=progress) as advance:
        shared = SharedLayers(RankTensors(ranks, device), len(batches))
        own = [{"input_ids": batches[number].to(device), "use_cache": False} for number in shared.own]
        samples = record_inputs(model, layer_list, own)
        steps = prune_layers(
            model,
            layer_list,
            job.sets,
            job.patterns,
            job.pruner,
            samples,
            shared.prune_layer,
            store,
            experts=weights,
            matching=job.matching,
            rounder=job.rounder,
        )
        for (name, _), _ in zip(layer_list.items(), steps, strict=True):
            ranks.wait()  # for the file of the layer, which the first process writes
            here = store.losses(name)
            losses += here
            worst = max((loss.loss for loss in here), default=0.0)
            advance(1, f"loss {worst:.2e}" if worst else "")
    return PrunedLayers([store.file(name) for name, _ in layer_list.items()], losses)
