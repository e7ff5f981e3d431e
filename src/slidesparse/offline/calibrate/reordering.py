"""Reorder the inner channels of a checkpoint while it is read: its layers run once, from disk, to find the orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.errors import InputError
from slidesparse.files.checkpoint import ChangedCheckpoint, Checkpoint
from slidesparse.files.kept_tensors import kept_tensors
from slidesparse.files.meta_model import MetaModel
from slidesparse.models.hooks import hooked
from slidesparse.models.reorder import Inner, can_change_places, find_inner, orders, rows_in
from slidesparse.offline.calibrate.dense_layers import DenseLayers
from slidesparse.weights.pattern import DENSE, Pattern

KEPT = "reordering.safetensors"
ROWS, COLUMNS = "rows of ", "columns of "


class ReorderedCheckpoint(ChangedCheckpoint):
    """A checkpoint whose rows and columns change places when they are read.

    Args:
        source: The checkpoint.
        orders: ``rows of TENSOR`` or ``columns of TENSOR`` -> the row or column that comes to each place.
    """

    def __init__(self, source: Checkpoint, orders: Mapping[str, torch.Tensor]) -> None:
        super().__init__(source)
        self.orders = orders

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor."""
        value = self.source.tensor(name, device)
        if (order := self.orders.get(f"{ROWS}{name}")) is not None:
            value = value[order.to(value.device)]
        if (order := self.orders.get(f"{COLUMNS}{name}")) is not None:
            value = value[:, order.to(value.device)]
        return value


def find_reordering(
    meta: MetaModel, checkpoint: Checkpoint, patterns: Mapping[str, Pattern], run: Callable[[], object] | None
) -> list[Inner]:
    """Return what may be inner channels, as far as a run on the meta device tells, where whole groups read them.

    Args:
        meta: The meta model.
        checkpoint: The source, in a float type.
        patterns: Linear -> pattern, of all that will be treated.
        run: Runs the model once; None: it cannot be run.

    Raises:
        InputError: There are none.
    """
    linears: dict[str, Any] = {name: module for name, module in meta.model.named_modules() if name in patterns}
    found = [] if run is None else find_inner(linears, meta.model, run)
    uniform = [one for one in found if patterns[one.reader] != DENSE and patterns[one.reader].is_uniform]

    def is_stored_plainly(name: str) -> bool:
        leaves = [leaf for leaf, _ in meta.model.get_submodule(name).named_parameters()]
        return all(meta.own_tensor(checkpoint, f"{name}.{leaf}") == f"{meta.prefix(name)}.{leaf}" for leaf in leaves)

    channels = [one for one in uniform if all(map(is_stored_plainly, (*one.writers, one.reader)))]
    if not channels:
        raise _cannot_reorder(meta.model)
    return channels


def _cannot_reorder(model: nn.Module) -> InputError:
    return InputError(
        f"no channels of {type(model).__name__} can change places",
        needed="MLPs whose last linear gets a uniform pattern, with functions of single channels before it",
        remedy="leave out --reorder",
    )


def reorder_checkpoint(
    checkpoint: Checkpoint,
    channels: Sequence[Inner],
    patterns: Mapping[str, Pattern],
    windows: torch.Tensor,
    folder: Path,
    device: torch.device,
    progress: bool | None = None,
) -> ReorderedCheckpoint:
    """Find the orders of inner channels, by what a text sends through them.

    Args:
        checkpoint: The source, in a float type.
        channels: From :func:`find_reordering`.
        patterns: Linear -> pattern, of all that will be treated.
        windows: Calibration text, int64 [samples, length].
        folder: Keeps the orders; those of an interrupted run are used again, since pruned layers depend on them.
        device: Where layers run, one at a time.
        progress: Show a progress bar; None: on a terminal only.

    Raises:
        InputError: None of the channels can change places.
        CheckpointError: The checkpoint is damaged, or the orders that were kept.
    """

    def find() -> dict[str, torch.Tensor]:
        groups = {one.reader: patterns[one.reader].group for one in channels}
        return _find_orders(DenseLayers(checkpoint, patterns, windows, device), channels, groups, progress)

    kept = kept_tensors(folder / KEPT, find)
    return ReorderedCheckpoint(checkpoint, {name: order.to(torch.int64) for name, order in kept.items()})


@torch.no_grad()
def _find_orders(
    layers: DenseLayers, channels: Sequence[Inner], groups: dict[str, int], progress: bool | None
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, index in layers.walk("reorder", progress):
        here = [one for one in channels if one.reader.startswith(f"{name}.")]
        modules: dict[str, Any] = layers.modules(linear for one in here for linear in (*one.writers, one.reader))
        squares = _squares(layers, index, {one.reader: modules[one.reader] for one in here})
        layer, run = layers.layer_list.layers[index], partial(layers.output, index)
        same = [one for one in here if can_change_places(layer, modules, one, run)]
        for one, order in orders(modules, same, groups, squares, index):
            found |= _by_tensor(layers.meta, modules, one, order.to(torch.int32).cpu())
    if not found:
        raise _cannot_reorder(layers.model)
    return found


def _squares(layers: DenseLayers, index: int, readers: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Run a layer, and return the sum of squares of each input of these linears, float32 [channels]."""
    sums: dict[str, torch.Tensor] = {}

    def see(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            found = args[0].flatten(0, -2).to(torch.float32).square().sum(0)
            sums[name] = sums[name] + found if name in sums else found

        return hook

    with hooked(reader.register_forward_pre_hook(see(name)) for name, reader in readers.items()):
        layers.outputs(index)
    return sums


def _by_tensor(meta: MetaModel, modules: Mapping[str, nn.Module], one: Inner, order: torch.Tensor) -> dict[str, Any]:
    """Return the order by the tensors in which rows, or columns, take it."""
    found = {f"{COLUMNS}{meta.prefix(one.reader)}.weight": order}
    for name in one.writers:
        for leaf, parameter in modules[name].named_parameters(recurse=False):
            found[f"{ROWS}{meta.prefix(name)}.{leaf}"] = rows_in(order, len(parameter))
    return found
