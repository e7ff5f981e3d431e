"""Smooth a checkpoint while it is read: its layers run once, from disk, and tensors are scaled when they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.errors import InputError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.dense_layers import DenseLayers
from slidesparse.files.meta_model import MetaModel, build_meta_model
from slidesparse.files.stored import Stored
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.models.smooth import Fold, exponents, find_folds, fold
from slidesparse.models.sparsify import run_once

KEPT = "smoothing.safetensors"


class SmoothedCheckpoint(Checkpoint):
    """A checkpoint whose norms and linears are scaled when they are read.

    Args:
        source: The checkpoint on disk, whose files are left as they are.
        factors: Tensor -> what its last dimension is multiplied by, powers of two.
    """

    def __init__(self, source: Checkpoint, factors: Mapping[str, torch.Tensor]) -> None:
        self.__dict__.update(source.__dict__)
        self.factors = factors

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor."""
        value = super().tensor(name, device)
        return value * self.factors[name].to(value) if name in self.factors else value


def smooth_checkpoint(
    checkpoint: Checkpoint,
    linears: Iterable[str],
    windows: torch.Tensor,
    folder: Path,
    device: torch.device,
    progress: bool | None = None,
) -> SmoothedCheckpoint:
    """Find the factors of all norms in the layers, by what their channels are on a text.

    Args:
        checkpoint: The source, in a float type.
        linears: Those that will be treated: their layers are smoothed.
        windows: Calibration text, int64 [samples, length].
        folder: Keeps the factors; those of an interrupted run are used again, since pruned layers depend on them.
        device: Where layers run, one at a time.
        progress: Show a progress bar; None: on a terminal only.

    Raises:
        InputError: No norm of the model can be smoothed.
        CheckpointError: The checkpoint is damaged, or the factors that were kept.
    """
    folder.mkdir(exist_ok=True)
    kept = folder / KEPT
    if not kept.exists():
        found = _find_factors(checkpoint, linears, windows, device, progress)
        stored = {name: Stored("F32", tuple(scale.shape)) for name, scale in found.items()}
        with TensorWriter(kept, stored, {}, with_digests=True) as writer:
            for name, scale in found.items():
                writer.write(name, scale)
    reader = TensorReader(kept)
    return SmoothedCheckpoint(checkpoint, {name: reader.verified(name) for name in reader.stored})


@torch.no_grad()
def _find_factors(
    checkpoint: Checkpoint,
    linears: Iterable[str],
    windows: torch.Tensor,
    device: torch.device,
    progress: bool | None,
) -> dict[str, torch.Tensor]:
    folds = _folds(checkpoint)
    layers = DenseLayers(checkpoint, linears, windows, device)
    factors: dict[str, torch.Tensor] = {}
    for name, index in layers.walk("smooth", progress):
        here = [one for one in folds if one.norm.startswith(f"{name}.")]
        for one, powers in _smoothed(layers, index, here).items():
            scale = torch.exp2(powers.to(torch.float32)).cpu()
            factors |= {f"{layers.meta.prefix(linear)}.weight": scale for linear in one.linears}
            factors |= dict.fromkeys(_tensors_of_norm(layers.meta, one), scale.reciprocal())
    if not factors:
        raise InputError(
            f"no norm of {type(layers.model).__name__} can be smoothed",
            needed="norms that only linears read, with a gain that multiplies",
            remedy="leave out --smooth",
        )
    return factors


def _folds(checkpoint: Checkpoint) -> list[Fold]:
    """Return the norms that can be folded, as far as a run on the meta device and the names of tensors tell."""
    meta = build_meta_model(checkpoint)
    run = run_once(meta.model)
    found = [] if run is None else find_folds(meta.model, run)
    return [one for one in found if _is_stored_plainly(meta, checkpoint, one)]


def _is_stored_plainly(meta: MetaModel, checkpoint: Checkpoint, one: Fold) -> bool:
    """Say whether a norm's and its readers' tensors are in the checkpoint as the model has them, and nobody else's."""
    used = Counter(origin for origin in meta.names.origins.values() if isinstance(origin, str))
    origins = [*_tensors_of_norm(meta, one), *(meta.names.origins.get(f"{name}.weight") for name in one.linears)]
    plain = all(isinstance(found, str) and found in checkpoint.files and used[found] == 1 for found in origins)
    return plain and not set(one.linears) & set(meta.why_stored_otherwise())


def _tensors_of_norm(meta: MetaModel, one: Fold) -> list[Any]:
    """Return where the norm's gain and bias come from: names of tensors, where they are stored as they are."""
    parameters = meta.model.get_submodule(one.norm).named_parameters(recurse=False)
    return [meta.names.origins.get(f"{one.norm}.{name}") for name, _ in parameters]


def _smoothed(layers: DenseLayers, index: int, folds: Sequence[Fold]) -> dict[Fold, torch.Tensor]:
    """Run a layer, and return the exponents of its norms; none where its outputs would not stay the same."""
    modules = layers.modules(name for one in folds for name in (one.norm, *one.linears))
    largest: dict[str, torch.Tensor] = {}

    def see(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            found = out.abs().flatten(0, -2).amax(0)
            largest[name] = torch.maximum(largest[name], found) if name in largest else found

        return hook

    handles = [modules[one.norm].register_forward_hook(see(one.norm)) for one in folds]
    try:
        before = layers.outputs(index)[0]
    finally:
        for handle in handles:
            handle.remove()
    found: dict[Fold, torch.Tensor] = {}
    for one in folds:
        weights: list[Any] = [modules[name].weight for name in one.linears]
        powers = exponents(largest[one.norm], weights)
        fold(modules, one, powers)
        if bool(powers.any()) and torch.equal(layers.output(index), before):
            found[one] = powers
        else:
            fold(modules, one, -powers)
    return found
