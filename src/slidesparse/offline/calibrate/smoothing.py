"""Smooth a checkpoint while it is read: its layers run once, from disk, and tensors are scaled when they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.base.progress import progress_bar
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.errors import InputError
from slidesparse.files.stored import STORED_NAMES
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import write_tensors
from slidesparse.models.gram_tree import windows_of_a_batch
from slidesparse.models.hooks import hooked
from slidesparse.models.layer_stack import find_layer_list, record_inputs, run_layer
from slidesparse.models.smooth import Fold, Quantise, best_exponents, find_folds, find_inner_folds, fold
from slidesparse.offline.calibrate.layer_store import LayersToPrune, open_layers
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.offline.source import Source
from slidesparse.offline.storage import Storage
from slidesparse.weights.quant import Rounding, quantize_rows, quantize_rows_to_six_bits

KEPT = "smoothing.safetensors"

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
    """Return the possible folds of treated linears, by a run on the meta device; an InputError where there are none."""
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

    folds = [one for one in candidates if is_in_one_layer(one) and is_stored_plainly(one)]
    if not folds:
        raise _cannot_smooth(meta.model)
    return folds


def _cannot_smooth(model: nn.Module) -> InputError:
    return InputError(
        f"no norm of {type(model).__name__} can be smoothed",
        needed="norms that only linears read, with a weight that multiplies",
        remedy="leave out --smooth",
    )


class DenseLayers:
    """The layers of a checkpoint, loaded one after the other, and the hidden states of a text."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        linears: Iterable[str],
        windows: torch.Tensor,
        device: torch.device,
        compute: torch.dtype | None = None,
    ) -> None:
        self.layer_list, self.store = open_layers(checkpoint, linears, checkpoint.path, device, compute=compute)
        self.meta = self.store.meta
        self.model = self.meta.model
        batches = windows.split(windows_of_a_batch(windows))
        inputs: list[Any] = [{"input_ids": ids.to(device), "use_cache": False} for ids in batches]
        self.samples = record_inputs(self.model, self.layer_list, inputs)
        self._outputs: list[torch.Tensor] = []

    def walk(self, label: str, progress: bool | None) -> Iterator[tuple[str, int]]:
        """Load layer after layer, and yield its name and number; the caller calls :meth:`outputs`."""
        with progress_bar(label, len(self.layer_list.layers), unit="layers", show=progress) as advance:
            for index, (name, layer) in enumerate(self.layer_list.items()):
                self.store.load(name, layer)
                yield name, index
                for sample, hidden in zip(self.samples, self._outputs, strict=True):
                    sample.hidden = hidden
                self.store.release(name, layer)
                advance(1)

    def outputs(self, index: int) -> list[torch.Tensor]:
        """Run a layer on all samples; the next layer reads these outputs, even if this one changes later."""
        self._outputs = [run_layer(self.layer_list.layers[index], sample, index) for sample in self.samples]
        return self._outputs

    def output(self, index: int) -> torch.Tensor:
        """Run a layer on the first sample for a trial; later layers still read :meth:`outputs`."""
        return run_layer(self.layer_list.layers[index], self.samples[0].fork(), index)


@dataclass(frozen=True)
class Smoothing:
    """Folds of activation outliers into weights of a type; ``required`` where a user chose smoothing."""

    folds: tuple[Fold, ...]
    dtype: torch.dtype = torch.int8
    rounding: Rounding = "absmax"
    required: bool = True


def plan_smoothing(
    source: Source, options: PruneOptions, storage: Storage, layers: LayersToPrune | None
) -> Smoothing | None:
    """Return the smoothing of a checkpoint, or None; by default calibrated INT8 is smoothed as far as possible."""
    if options.smooth and storage.source is not None:
        raise InputError("smoothing", got="a source in 8 bits", needed="a float source")
    by_default = options.smooth is None and storage.rounds and storage.dtype == torch.int8
    if layers is None or not (options.smooth or by_default):
        return None
    linears = [name for name in layers.patterns if name not in layers.experts]
    try:
        folds = find_smoothing(source, linears)
    except InputError:
        if options.smooth:
            raise
        return None
    return Smoothing(tuple(folds), storage.dtype, storage.weight_rounding, bool(options.smooth))


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
    pruned layers depend on them. If smoothing is required and changes the outputs of every layer, that is an
    InputError.
    """
    kept = folder / KEPT
    if not kept.exists():
        folder.mkdir(exist_ok=True)
        # In FP16 a trial would refuse good folds too, since factors round weights below 2^-14.
        stored = {checkpoint.stored(name).dtype for name in checkpoint.files}
        compute = torch.float32 if STORED_NAMES[torch.float16] in stored else None
        linears = [name for one in smoothing.folds for name in one.linears]
        layers = DenseLayers(checkpoint, linears, windows, device, compute=compute)
        of_inputs = partial(quantize_rows, dtype=smoothing.dtype)
        of_weights = quantize_rows_to_six_bits if smoothing.rounding == "6bit" else of_inputs
        write_tensors(kept, _find_factors(layers, smoothing, progress, of_inputs, of_weights))
    reader = TensorReader(kept)
    return SmoothedCheckpoint(checkpoint, {name: reader.verified(name) for name in reader.stored})


@torch.no_grad()
def _find_factors(
    layers: DenseLayers, smoothing: Smoothing, progress: bool | None, of_inputs: Quantise, of_weights: Quantise
) -> dict[str, torch.Tensor]:
    factors: dict[str, torch.Tensor] = {}
    changed = False
    for layer, index in layers.walk("smooth", progress):
        here = [one for one in smoothing.folds if one.writer.startswith(f"{layer}.")]
        helpful, refused = _smoothed(layers, index, here, of_inputs, of_weights)
        changed = changed or refused
        for one, powers in helpful.items():
            scale = torch.exp2(powers.to(torch.float32)).cpu()
            factors |= {f"{layers.meta.prefix(linear)}.weight": scale for linear in one.linears}
            for name in _parameters_of_writer(layers.meta, one):
                rows = ROWS if layers.meta.model.get_parameter(name).dim() == 2 else ""
                factors[f"{layers.meta.names.origins[name]}{rows}"] = scale.reciprocal()
    if smoothing.required and changed and not factors:
        raise _cannot_smooth(layers.model)
    return factors


def _parameters_of_writer(meta: MetaModel, one: Fold) -> list[str]:
    """Return the names of the writer's parameters in the model."""
    return [f"{one.writer}.{leaf}" for leaf, _ in meta.model.get_submodule(one.writer).named_parameters(recurse=False)]


def _smoothed(
    layers: DenseLayers, index: int, folds: Sequence[Fold], of_inputs: Quantise, of_weights: Quantise
) -> tuple[dict[Fold, torch.Tensor], bool]:
    """Run a layer, and return the exponents of its helpful folds, and whether others changed its outputs."""
    names = (name for one in folds for name in (one.writer, *one.linears))
    modules = {name: layers.model.get_submodule(name) for name in names}
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
        before = layers.outputs(index)[0]
    helpful: dict[Fold, torch.Tensor] = {}
    refused = False
    for one in folds:
        if any(other.linears == one.linears for other in helpful):
            continue  # their inputs are smooth now
        weights: list[Any] = [modules[name].weight for name in one.linears]
        read = one.linears[0]
        powers = best_exponents(some[read], largest[read], weights, of_inputs, of_weights)
        if not bool(powers.any()):
            continue
        fold(modules, one, powers)
        if torch.equal(layers.output(index), before):
            helpful[one] = powers
        else:
            fold(modules, one, -powers)
            refused = True
    return helpful, refused
