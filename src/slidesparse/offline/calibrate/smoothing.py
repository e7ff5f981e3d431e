"""Smooth a checkpoint while it is read: its layers run once, from disk, and tensors are scaled when they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.base.progress import progress_bar
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.files.stored import STORED_NAMES
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import write_tensors
from slidesparse.models.gram_tree import windows_of_a_batch
from slidesparse.models.hooks import hooked
from slidesparse.models.layer_stack import Sample, find_layer_list, record_inputs, run_layer
from slidesparse.models.smooth import Fold, Quantise, best_exponents, find_folds, find_inner_folds, fold
from slidesparse.offline.calibrate.layer_store import LayersToPrune, open_layers
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage
from slidesparse.weights.quant import Rounding, quantize_rows, quantize_rows_to_six_bits

KEPT = "smoothing.safetensors"

TO_INT8: Quantise = partial(quantize_rows, dtype=torch.int8)

TOKENS = 256
"""Tokens on which factors are compared."""

ROWS = " rows"
"""End of a weight's key among the factors where its rows are multiplied, not its columns."""


class SmoothedCheckpoint(Checkpoint):
    """A checkpoint whose norms and linears are scaled when they are read, in their own type.

    Args:
        source: The checkpoint.
        factors: Tensor -> powers of two that multiply its last dimension; with :data:`ROWS`, its first.
    """

    def __init__(self, source: Checkpoint, factors: Mapping[str, torch.Tensor]) -> None:
        self.__dict__.update(source.__dict__)
        self.source, self.factors = source, factors

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor."""
        value = self.source.tensor(name, device)
        factors = [self.factors[name]] if name in self.factors else []
        factors += [self.factors[f"{name}{ROWS}"][:, None]] if f"{name}{ROWS}" in self.factors else []
        if not factors:
            return value
        scaled = value.to(torch.float32)  # so that FP16 rounds once, after both
        for factor in factors:
            scaled = scaled * factor.to(scaled)
        return scaled.to(value.dtype)


def find_smoothing(source: Source, linears: Collection[str]) -> list[Fold]:
    """Return the possible folds of treated linears, by a run on the meta device."""
    meta, candidates = source.meta, []
    if source.run is not None:
        known: dict[str, Any] = {name: meta.model.get_submodule(name) for name in linears}
        candidates = find_folds(meta.model, source.run) + find_inner_folds(known, meta.model, source.run)
    layers = [f"{name}." for name, _ in find_layer_list(meta.model, linears).items()]
    otherwise = meta.why_stored_otherwise()

    def is_in_one_layer(one: Fold) -> bool:
        """Return whether a trial is possible, since layers run one at a time."""
        return any(all(name.startswith(layer) for name in (one.writer, *one.linears)) for layer in layers)

    def is_stored_plainly(one: Fold) -> bool:
        parameters = [*_parameters_of_writer(meta, one), *(f"{name}.weight" for name in one.linears)]
        own = [meta.own_tensor(source.checkpoint, parameter) for parameter in parameters]
        return None not in own and not any(name in otherwise for name in (one.writer, *one.linears))

    return [one for one in candidates if is_in_one_layer(one) and is_stored_plainly(one)]


@dataclass(frozen=True)
class Smoothing:
    """Folds of activation outliers into INT8 weights of a rounding."""

    folds: tuple[Fold, ...]
    rounding: Rounding = "absmax"


def plan_smoothing(
    source: Source, options: PruneOptions, storage: Storage, layers: LayersToPrune | None
) -> Smoothing | None:
    """Return the smoothing of a checkpoint: of calibrated INT8, unless it is turned off; None where nothing folds."""
    if layers is None or not (options.smooth and storage.rounds and storage.dtype == torch.int8):
        return None
    folds = find_smoothing(source, [name for name in layers.patterns if name not in layers.experts])
    return Smoothing(tuple(folds), storage.weight_rounding) if folds else None


def smooth_checkpoint(
    checkpoint: Checkpoint,
    smoothing: Smoothing,
    windows: torch.Tensor,
    folder: Path,
    device: torch.device,
    progress: bool | None = None,
) -> SmoothedCheckpoint:
    """Return a float checkpoint with the factors of channels found on calibration windows [samples, length].

    Layers run one at a time on a device. Factors are kept in ``folder``; those of an interrupted run are reused, since
    pruned layers depend on them.
    """
    kept = folder / KEPT
    if not kept.exists():
        folder.mkdir(exist_ok=True)
        write_tensors(kept, _find_factors(checkpoint, smoothing, windows, device, progress))
    reader = TensorReader(kept)
    return SmoothedCheckpoint(checkpoint, {name: reader.verified(name) for name in reader.stored})


@torch.no_grad()
def _find_factors(
    checkpoint: Checkpoint, smoothing: Smoothing, windows: torch.Tensor, device: torch.device, progress: bool | None
) -> dict[str, torch.Tensor]:
    # In FP16 a trial would refuse good folds too, since factors round weights below 2^-14.
    stored = {checkpoint.stored(name).dtype for name in checkpoint.files}
    compute = torch.float32 if STORED_NAMES[torch.float16] in stored else None
    linears = [name for one in smoothing.folds for name in one.linears]
    layers, store = open_layers(checkpoint, linears, checkpoint.path, device, compute=compute)
    batches = windows.split(windows_of_a_batch(windows))
    inputs: list[Any] = [{"input_ids": ids.to(device), "use_cache": False} for ids in batches]
    samples = record_inputs(store.meta.model, layers, inputs)
    of_weights = quantize_rows_to_six_bits if smoothing.rounding == "6bit" else TO_INT8
    modules, factors = dict(store.meta.model.named_modules()), dict[str, torch.Tensor]()
    with progress_bar("smooth", len(layers.layers), unit="layers", show=progress) as advance:
        for index, (name, layer) in enumerate(layers.items()):
            store.load(name, layer)
            here = [one for one in smoothing.folds if one.writer.startswith(f"{name}.")]
            run = partial(run_layer, layer, index=index)
            outputs, helpful = _smoothed(run, modules, samples, here, of_weights)
            factors |= _factors_of(store.meta, helpful)
            for sample, hidden in zip(samples, outputs, strict=True):
                sample.hidden = hidden  # of the layer before it was smoothed
            store.release(name, layer)
            advance(1)
    return factors


def _factors_of(meta: MetaModel, helpful: Mapping[Fold, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the factors of tensors that carry out folds with these exponents."""
    factors: dict[str, torch.Tensor] = {}
    for one, powers in helpful.items():
        scale = torch.exp2(powers.to(torch.float32)).cpu()
        factors |= {f"{meta.prefix(linear)}.weight": scale for linear in one.linears}
        for name in _parameters_of_writer(meta, one):
            rows = ROWS if meta.model.get_parameter(name).dim() == 2 else ""
            factors[f"{meta.names.origins[name]}{rows}"] = scale.reciprocal()
    return factors


def _parameters_of_writer(meta: MetaModel, one: Fold) -> list[str]:
    """Return the names of the writer's parameters in the model."""
    return [f"{one.writer}.{leaf}" for leaf, _ in meta.model.get_submodule(one.writer).named_parameters(recurse=False)]


def _smoothed(
    run: Callable[[Sample], torch.Tensor],
    modules: Mapping[str, nn.Module],
    samples: Sequence[Sample],
    folds: Sequence[Fold],
    of_weights: Quantise,
) -> tuple[list[torch.Tensor], dict[Fold, torch.Tensor]]:
    """Run a layer, and return its outputs and the exponents of its helpful folds, which do not change them."""
    largest: dict[str, torch.Tensor] = {}
    some: dict[str, torch.Tensor] = {}

    def see(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            inputs = args[0].flatten(0, -2)
            some.setdefault(name, inputs[:TOKENS].clone())
            here = inputs.abs().amax(0)
            largest[name] = torch.maximum(largest[name], here) if name in largest else here

        return hook

    readers = dict.fromkeys(one.linears[0] for one in folds)
    with hooked(modules[name].register_forward_pre_hook(see(name)) for name in readers):
        outputs = [run(sample) for sample in samples]
    helpful: dict[Fold, torch.Tensor] = {}
    for one in folds:
        if any(other.linears == one.linears for other in helpful):
            continue  # their inputs are smooth now
        weights: list[Any] = [modules[name].weight for name in one.linears]
        read = one.linears[0]
        powers = best_exponents(some[read], largest[read], weights, TO_INT8, of_weights)
        if not bool(powers.any()):
            continue
        fold(modules, one, powers)
        if torch.equal(run(samples[0].fork()), outputs[0]):
            helpful[one] = powers
        else:
            fold(modules, one, -powers)
    return outputs, helpful
