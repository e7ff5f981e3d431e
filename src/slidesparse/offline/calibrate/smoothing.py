"""Smooth a checkpoint while it is read: its layers run once, from disk, and tensors are scaled when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.errors import InputError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.kept_tensors import kept_tensors
from slidesparse.files.meta_model import MetaModel
from slidesparse.files.stored import STORED_NAMES
from slidesparse.models.hooks import hooked
from slidesparse.models.layer_stack import find_layer_list
from slidesparse.models.smooth import Fold, Quantise, best_exponents, find_folds, find_inner_folds, fold
from slidesparse.offline.calibrate.dense_layers import DenseLayers
from slidesparse.weights.quant import Rounding, quantize_rows, quantize_rows_to_six_bits

KEPT = "smoothing.safetensors"

TOKENS = 256
"""Tokens by which factors are compared."""


ROWS = " rows"
"""What a weight's name ends in among the factors where its rows are multiplied, not its columns."""


class SmoothedCheckpoint(Checkpoint):
    """A checkpoint whose norms and linears are scaled when they are read, in their own type.

    Args:
        source: The checkpoint.
        factors: Tensor -> what its last dimension is multiplied by, powers of two; with :data:`ROWS`, its first.
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


def find_smoothing(
    meta: MetaModel, checkpoint: Checkpoint, linears: Iterable[str], run: Callable[[], object] | None
) -> list[Fold]:
    """Return what may be smoothed in the layers, as far as a run on the meta device and tensors' names tell.

    Args:
        meta: The meta model.
        checkpoint: The source, in a float type.
        linears: Those that will be treated: their layers are smoothed.
        run: Runs the model once; None: it cannot be run.

    Raises:
        InputError: There is nothing, or the linears are not in layers.
    """
    linears = list(linears)
    found = [] if run is None else find_folds(meta.model, run)
    if run is not None:
        known: dict[str, Any] = {name: meta.model.get_submodule(name) for name in linears}
        found += find_inner_folds(known, meta.model, run)
    layers = [f"{name}." for name, _ in find_layer_list(meta.model, linears).items()]
    otherwise = meta.why_stored_otherwise()

    def is_in_one_layer(one: Fold) -> bool:
        """Layers run one at a time, so what a norm at the end of one hands to the next cannot be tried."""
        return any(all(name.startswith(layer) for name in (one.writer, *one.linears)) for layer in layers)

    def is_stored_plainly(one: Fold) -> bool:
        parameters = [*_parameters_of_writer(meta, one), *(f"{name}.weight" for name in one.linears)]
        own = [meta.own_tensor(checkpoint, parameter) for parameter in parameters]
        return None not in own and not any(name in otherwise for name in (one.writer, *one.linears))

    folds = [one for one in found if is_in_one_layer(one) and is_stored_plainly(one)]
    if not folds:
        raise _cannot_smooth(meta.model)
    return folds


def _cannot_smooth(model: nn.Module) -> InputError:
    return InputError(
        f"no norm of {type(model).__name__} can be smoothed",
        needed="norms that only linears read, with a gain that multiplies",
        remedy="leave out --smooth",
    )


def smooth_checkpoint(
    checkpoint: Checkpoint,
    folds: Sequence[Fold],
    linears: Iterable[str],
    windows: torch.Tensor,
    folder: Path,
    device: torch.device,
    progress: bool | None = None,
    dtype: torch.dtype = torch.int8,
    recipe: Rounding = "absmax",
    required: bool = True,
) -> SmoothedCheckpoint:
    """Find the factors of channels, by what they are on a text.

    Args:
        checkpoint: The source, in a float type.
        folds: From :func:`find_smoothing`.
        linears: Those that will be treated.
        windows: Calibration text, int64 [samples, length].
        folder: Keeps the factors; those of an interrupted run are used again, since pruned layers depend on them.
        device: Where layers run, one at a time.
        progress: Show a progress bar; None: on a terminal only.
        dtype: In which inputs and weights will be served.
        recipe: How INT8 weights will be rounded.
        required: Whether it is an error when no layer stays the same.

    Raises:
        InputError: No layer stays the same when it is smoothed.
        CheckpointError: The checkpoint is damaged, or the factors that were kept.
    """

    def find() -> dict[str, torch.Tensor]:
        layers = DenseLayers(checkpoint, linears, windows, device, compute=_type_of_trials(checkpoint))
        rounding = partial(quantize_rows, dtype=dtype), _of_weights(dtype, recipe)
        return _find_factors(layers, folds, progress, *rounding, required=required)

    return SmoothedCheckpoint(checkpoint, kept_tensors(folder / KEPT, find))


def _type_of_trials(checkpoint: Checkpoint) -> torch.dtype | None:
    """Return the type in which layers are tried; None: the usual one.

    A norm that does not multiply shows in any type. In FP16 a trial would refuse others as well, since factors round
    weights below 2^-14.
    """
    stored = {checkpoint.stored(name).dtype for name in checkpoint.files}
    return torch.float32 if STORED_NAMES[torch.float16] in stored else None


def _of_weights(dtype: torch.dtype, recipe: Rounding) -> Quantise:
    return quantize_rows_to_six_bits if recipe == "6bit" else partial(quantize_rows, dtype=dtype)


@torch.no_grad()
def _find_factors(
    layers: DenseLayers,
    folds: Sequence[Fold],
    progress: bool | None,
    of_inputs: Quantise,
    of_weights: Quantise,
    required: bool,
) -> dict[str, torch.Tensor]:
    factors: dict[str, torch.Tensor] = {}
    changed = False
    for name, index in layers.walk("smooth", progress):
        here = [one for one in folds if one.writer.startswith(f"{name}.")]
        found, refused = _smoothed(layers, index, here, of_inputs, of_weights)
        changed = changed or refused
        for one, powers in found.items():
            scale = torch.exp2(powers.to(torch.float32)).cpu()
            factors |= {f"{layers.meta.prefix(linear)}.weight": scale for linear in one.linears}
            for name in _parameters_of_writer(layers.meta, one):
                rows = ROWS if layers.meta.model.get_parameter(name).dim() == 2 else ""
                factors[f"{layers.meta.names.origins[name]}{rows}"] = scale.reciprocal()
    if required and changed and not factors:
        raise _cannot_smooth(layers.model)
    return factors


def _parameters_of_writer(meta: MetaModel, one: Fold) -> list[str]:
    """Return the names of the writer's parameters in the model."""
    return [f"{one.writer}.{leaf}" for leaf, _ in meta.model.get_submodule(one.writer).named_parameters(recurse=False)]


def _smoothed(
    layers: DenseLayers, index: int, folds: Sequence[Fold], of_inputs: Quantise, of_weights: Quantise
) -> tuple[dict[Fold, torch.Tensor], bool]:
    """Run a layer, and return the exponents of its folds where they help, and whether others changed its outputs."""
    modules = layers.modules(name for one in folds for name in (one.writer, *one.linears))
    largest: dict[str, torch.Tensor] = {}
    some: dict[str, torch.Tensor] = {}

    def see(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            inputs = args[0].flatten(0, -2)
            some.setdefault(name, inputs[:TOKENS].clone())
            found = inputs.abs().amax(0)
            largest[name] = torch.maximum(largest[name], found) if name in largest else found

        return hook

    readers = dict.fromkeys(one.linears[0] for one in folds)
    with hooked(modules[name].register_forward_pre_hook(see(name)) for name in readers):
        before = layers.outputs(index)[0]
    found: dict[Fold, torch.Tensor] = {}
    refused = False
    for one in folds:
        if any(other.linears == one.linears for other in found):
            continue  # what these read is smooth now
        weights: list[Any] = [modules[name].weight for name in one.linears]
        read = one.linears[0]
        powers = best_exponents(some[read], largest[read], weights, of_inputs, of_weights)
        if not bool(powers.any()):
            continue
        fold(modules, one, powers)
        if torch.equal(layers.output(index), before):
            found[one] = powers
        else:
            fold(modules, one, -powers)
            refused = True
    return found, refused
