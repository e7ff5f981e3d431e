"""Rotate a checkpoint's residual stream while it is read: its layers run once, from disk, to learn the rotation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.base.progress import progress_bar
from slidesparse.errors import InputError
from slidesparse.files.checkpoint import ChangedCheckpoint, Checkpoint
from slidesparse.files.kept_tensors import kept_tensors
from slidesparse.files.meta_model import MetaModel
from slidesparse.models.grams import collect_grams
from slidesparse.models.hooks import hooked
from slidesparse.models.layer_stack import Sample, find_layer_list, record_inputs, run_around, run_layer
from slidesparse.models.learn_rotation import Costed, learn, mean_damage, random_rotation, readers, writer
from slidesparse.models.rotate import REMEDY, Stream, cannot_rotate, find_stream, fold_gains, is_rotated, rotate
from slidesparse.offline.calibrate.dense_layers import DenseLayers
from slidesparse.weights.pattern import DENSE, Pattern

KEPT, ROTATION = "rotation.safetensors", "rotation"

ROWS_AT_ONCE = 1 << 14
"""Rows of a tensor that are rotated at a time: in float32, an embedding takes twice its memory."""


@dataclass(frozen=True)
class Rotation:
    """How tensors of a checkpoint change with the stream.

    Attributes:
        stream: What reads and writes the stream.
        readers: Weight of what reads it -> the gain that is folded in, or None for the input embedding.
        gains: Of norms, which become 1.
        writers: Weights and biases of what writes to it.
    """

    stream: Stream
    readers: dict[str, str | None]
    gains: frozenset[str]
    writers: frozenset[str]


class RotatedCheckpoint(ChangedCheckpoint):
    """A checkpoint whose residual stream is rotated when its tensors are read.

    They are computed in float32, and rounded once to the type in which they are stored.

    Args:
        source: The checkpoint.
        rotation: How tensors change.
        q: Orthogonal, float32 [hidden, hidden].
    """

    def __init__(self, source: Checkpoint, rotation: Rotation, q: torch.Tensor) -> None:
        super().__init__(source)
        self.rotation, self.q = rotation, q

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor."""
        value = self.source.tensor(name, device)
        if name in self.rotation.gains:
            return torch.ones_like(value)
        if name in self.rotation.readers:
            gain = self.rotation.readers[name]
            return self._rotated(value, None if gain is None else self.source.tensor(gain, device))
        if name in self.rotation.writers:
            return self._rotated(value.T).T.contiguous() if value.dim() == 2 else self._rotated(value[None])[0]
        return value

    def _rotated(self, rows: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows [n, hidden] times a gain, if there is one, times Q; in their type."""
        q = self.q.to(rows.device)
        matrix = q if gain is None else gain.to(torch.float32)[:, None] * q
        return torch.cat([(some.to(torch.float32) @ matrix).to(rows.dtype) for some in rows.split(ROWS_AT_ONCE)])


def find_rotation(
    meta: MetaModel, checkpoint: Checkpoint, linears: Mapping[str, Any], run: Callable[[], object] | None
) -> Rotation:
    """Return how a checkpoint's tensors change with its stream, as far as a run on the meta device shows.

    Args:
        meta: The meta model.
        checkpoint: The source, in a float type.
        linears: Those that will be treated, which are in the layers.
        run: Runs the model once.

    Raises:
        InputError: It cannot be rotated.
    """
    model = meta.model
    if run is None:
        raise cannot_rotate(model, "a model that cannot be run to see what reads the stream", "a language model")
    stream = find_stream(model, find_layer_list(model, linears), run)
    gains = {linear: one.writer for one in (*stream.folds, stream.final) for linear in one.linears}
    own = [f"{stream.embedding}.weight", *(f"{name}.weight" for name in (*gains, *gains.values()))]
    written = [f"{name}.{leaf}" for name in stream.writers for leaf in _parameters(model.get_submodule(name))]
    tensors: dict[str, str] = {}
    for name in (*own, *written):
        tensor = meta.own_tensor(checkpoint, name)
        if tensor is None:
            raise cannot_rotate(model, f"{name}, which the checkpoint has in another form", "tensors as the model's")
        tensors[name] = tensor
    return Rotation(
        stream,
        {tensors[own[0]]: None} | {tensors[f"{name}.weight"]: tensors[f"{gains[name]}.weight"] for name in gains},
        frozenset(tensors[f"{name}.weight"] for name in gains.values()),
        frozenset(tensors[name] for name in written),
    )


def _parameters(module: nn.Module) -> list[str]:
    return [leaf for leaf, _ in module.named_parameters(recurse=False)]


def rotate_checkpoint(
    checkpoint: Checkpoint,
    rotation: Rotation,
    patterns: Mapping[str, Pattern],
    windows: torch.Tensor,
    folder: Path,
    device: torch.device,
    steps: int,
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> RotatedCheckpoint:
    """Learn a rotation of the stream after which patterns remove what costs little on a text.

    Args:
        checkpoint: The source, in a float type.
        rotation: From :func:`find_rotation`.
        patterns: Linear -> pattern, of all that will be treated. The rotation is learned for the commonest group.
        windows: Calibration text, int64 [samples, length].
        folder: Keeps the rotation; that of an interrupted run is used again, since pruned layers depend on it.
        device: Where layers run, one at a time, in float32, and where the rotation is learned.
        steps: Of learning.
        seed: Of the rotation to start from, and of what each step looks at.
        progress: Show progress bars; None: on a terminal only.

    Raises:
        InputError: The model computes something else when it is rotated, or the rotation gains nothing.
        CheckpointError: The checkpoint is damaged, or the rotation that was kept.
    """

    def find() -> dict[str, torch.Tensor]:
        groups = Counter(pattern.group for pattern in patterns.values() if pattern != DENSE)
        if not groups:
            raise InputError("rotating", got="dense linears alone", needed="linears with a pattern", remedy=REMEDY)
        group = groups.most_common(1)[0][0]
        layers = DenseLayers(checkpoint, patterns, windows, device, torch.float32)
        start = random_rotation(layers.samples[0].hidden.shape[-1], seed).to(device)
        seen = _Walk(layers, rotation.stream, patterns, group, start, seed).sets(progress)
        return {ROTATION: _learned(start, seen, group, steps, seed, progress)}

    return RotatedCheckpoint(checkpoint, rotation, kept_tensors(folder / KEPT, find)[ROTATION])


def _learned(
    start: torch.Tensor, sets: list[Costed], group: int, steps: int, seed: int, progress: bool | None
) -> torch.Tensor:
    if not sets:
        raise InputError("rotating", got="linears whose outputs are zero on the calibration text", remedy=REMEDY)
    with progress_bar("learn rotation", steps, unit="steps", show=progress) as advance:
        q = learn(start, sets, group, steps, seed=seed, advance=advance)
    before, after = (mean_damage(one, sets, group) for one in (torch.eye(len(q), device=q.device), q))
    if not after < before:
        raise InputError(
            "the rotation that was learned gains nothing",
            got=f"an estimated loss of {after:.3g}",
            needed=f"less than {before:.3g}, that of the model as it is",
            remedy=f"give it more steps, or {REMEDY}",
        )
    return q


class _Walk:
    """One walk through the layers, which tries out the rotation and collects what it is learned from.

    Args:
        layers: The layers, in float32.
        stream: What reads and writes the stream.
        patterns: Linear -> pattern.
        group: Columns of a group.
        q: Any rotation, to try.
        seed: Draws rows and columns.
    """

    def __init__(
        self,
        layers: DenseLayers,
        stream: Stream,
        patterns: Mapping[str, Pattern],
        group: int,
        q: torch.Tensor,
        seed: int,
    ) -> None:
        self.layers, self.stream, self.group, self.q = layers, stream, group, q
        self.treated = {name for name, pattern in patterns.items() if pattern != DENSE}
        self.draw = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def sets(self, progress: bool | None) -> list[Costed]:
        """Return what the weights of all sets cost, on the CPU.

        Raises:
            InputError: The model computes something else when its stream is rotated.
        """
        rotated = self._around()
        found: list[Costed] = []
        for name, index in self.layers.walk("rotate", progress):
            folds, writers = self.stream.inside(name)
            modules: Any = self.layers.modules([*(m for one in folds for m in (one.writer, *one.linears)), *writers])
            dense = self.layers.output(index)
            fold_gains(modules, folds)
            sets = [[one for one in fold.linears if one in self.treated] for fold in folds]
            found += self._costs(index, modules, [names for names in sets if names], writers)
            self.layers.outputs(index)
            rotate(modules, folds, writers, self.q)
            before, layer = self.layers.samples[0].hidden, self.layers.layer_list.layers[index]
            rotated.hidden = run_layer(layer, rotated, index)
            self._require(name, rotated.hidden, dense @ self.q, dense - before)
        return found

    def _costs(self, index: int, modules: Any, sets: list[list[str]], writers: list[str]) -> list[Costed]:
        """Return what the weights of one layer's sets cost, whose gains are folded; sets of zeros are left out."""
        written = [name for name in writers if name in self.treated]
        watched = {name: modules[name] for name in (*(names[0] for names in sets), *written)}
        layer = self.layers.layer_list.layers[index]
        grams = collect_grams(layer, index, watched, self.layers.samples) if watched else {}
        found: list[Costed] = [
            readers(torch.cat([modules[name].weight for name in names]), grams[names[0]], self.draw) for names in sets
        ]
        found += [writer(modules[name].weight.clone(), grams[name], self.group, self.draw) for name in written]
        return [one.to(torch.device("cpu")) for one in found if one.energy > 0]

    def _around(self) -> Sample:
        """Try out what is around the layers, and return what the first layer reads of a rotated stream."""
        layers, final = self.layers, self.stream.final
        modules, inputs = layers.modules([self.stream.embedding, final.writer]), layers.inputs[0]
        norm: Any = modules[final.writer]
        before, gain = run_around(layers.model, layers.layer_list, inputs), norm.weight.clone()
        if before.shape[-1] != len(self.q):
            raise cannot_rotate(layers.model, "layers inside no model of their own", "a stack of layers with a norm")
        embedding = modules[self.stream.embedding]
        try:
            norm.weight.fill_(1.0)
            with hooked([embedding.register_forward_hook(lambda _, args, out: out @ self.q)]):
                after = run_around(layers.model, layers.layer_list, inputs)
                rotated = record_inputs(layers.model, layers.layer_list, [inputs])[0]
        finally:
            norm.weight.copy_(gain)
        self._require(final.writer, (after @ self.q.T) * gain, before, before)
        self._require(self.stream.embedding, rotated.hidden, layers.samples[0].hidden @ self.q, rotated.hidden)
        return rotated

    def _require(self, name: str, found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> None:
        if not is_rotated(found, expected, scale):
            raise cannot_rotate(self.layers.model, f"another result of {name}", "what it computes, rotated")
