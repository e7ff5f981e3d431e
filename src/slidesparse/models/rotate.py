"""Rotate the residual stream of a language model by an orthogonal matrix; it computes what it did.

RMSNorm without a gain gives the same for a rotated input, rotated. So once gains are folded into the linears that read
the norms, all that writes to the stream is multiplied by Q, and all that reads it by Q's inverse. Source: Ashkboos et
al., "QuaRot" (2024). Which modules read and write follows from what a run of the model passes from one to the other.
Whether that is all there is must be tried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slidesparse.errors import InputError
from slidesparse.models.layer_stack import LayerList
from slidesparse.models.parts import language_model
from slidesparse.models.smooth import Fold, find_folds, is_norm
from slidesparse.models.targets import output_embedding

LARGEST_CHANGE = 0.01
"""Norm of an error over that of what a layer adds to the stream, in float32, whose rounding is far smaller. What cannot
be rotated changes by about its size."""

REMEDY = "leave out --rotate"


@dataclass(frozen=True)
class Stream:
    """What reads and writes the residual stream of a model.

    Attributes:
        embedding: The input embedding.
        folds: Norms in the layers, and the linears that read them.
        writers: Linears of the layers that write to the stream.
        final: The norm after the layers, and the output embedding that reads it.
    """

    embedding: str
    folds: tuple[Fold, ...]
    writers: tuple[str, ...]
    final: Fold

    def inside(self, layer: str) -> tuple[list[Fold], list[str]]:
        """Return the folds and the writers of one layer."""
        start = f"{layer}."
        return [one for one in self.folds if one.writer.startswith(start)], [
            name for name in self.writers if name.startswith(start)
        ]


def find_stream(model: nn.Module, layer_list: LayerList, run: Callable[[], object]) -> Stream:
    """Return what reads and writes the stream, as far as a run shows.

    Args:
        model: May be on the meta device.
        layer_list: Its layers.
        run: Runs the model once, on any input.

    Raises:
        InputError: The model cannot be rotated, with the reason.
    """
    embedding, head = _embeddings(model)
    hidden = embedding.embedding_dim
    name_of = {id(module): name for name, module in model.named_modules()}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    norms = {name: module for name, module in model.named_modules() if _is_on_stream(module, hidden)}
    folds = {one.writer: one for one in find_folds(model, run) if one.writer in norms}
    for name, norm in norms.items():
        if name not in folds:
            raise cannot_rotate(model, f"{name}, which not only linears read", "norms that only linears read")
        if [leaf for leaf, _ in norm.named_parameters(recurse=False)] != ["weight"]:
            raise cannot_rotate(model, f"{name} with a bias", "RMSNorms with a gain")
    start = f"{layer_list.name}."
    outside = [name for name in linears if not name.startswith(start)]
    final = [one for one in folds.values() if not one.writer.startswith(start)]
    if outside != [name_of[id(head)]] or [list(one.linears) for one in final] != [outside]:
        got = ", ".join([*outside, *(one.writer for one in final)]) or "nothing"
        raise cannot_rotate(model, f"{got} outside the layers", "a norm there, and an output embedding that reads it")
    readers = {linear for one in folds.values() for linear in one.linears}
    writers = [name for name, linear in linears.items() if linear.out_features == hidden and name not in readers]
    inside = tuple(one for one in folds.values() if one.writer.startswith(start))
    return Stream(name_of[id(embedding)], inside, tuple(writers), final[0])


def _embeddings(model: Any) -> tuple[nn.Embedding, nn.Linear]:
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    head = output_embedding(model)
    if language_model(model) is not model or not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise cannot_rotate(model, type(model).__name__, "a language model with an input and an output embedding")
    if head.weight is embedding.weight:
        raise cannot_rotate(model, "an output embedding that is tied to the input", "one with weights of its own")
    return embedding, head


def _is_on_stream(module: nn.Module, hidden: int) -> bool:
    return not any(module.children()) and is_norm(module) and len(module.get_parameter("weight")) == hidden


def cannot_rotate(model: nn.Module, got: str, needed: str) -> InputError:
    """Return the error of a model that cannot be rotated."""
    return InputError(f"the stream of {type(model).__name__} cannot be rotated", got=got, needed=needed, remedy=REMEDY)


@torch.no_grad()
def fold_gains(modules: Mapping[str, Any], folds: Iterable[Fold]) -> None:
    """Move the gains of norms into the linears that read them, in place."""
    for one in folds:
        gain = modules[one.writer].weight
        for name in one.linears:
            modules[name].weight.mul_(gain)
        gain.fill_(1.0)


@torch.no_grad()
def rotate(modules: Mapping[str, Any], folds: Iterable[Fold], writers: Iterable[str], q: torch.Tensor) -> None:
    """Rotate what linears read and write, in place.

    Args:
        modules: Name -> module.
        folds: With gains that are folded.
        writers: Names of linears.
        q: Orthogonal, float32 [hidden, hidden].
    """
    for name in (name for one in folds for name in one.linears):
        modules[name].weight.copy_(modules[name].weight @ q)
    for writer in (modules[name] for name in writers):
        for parameter in writer.parameters(recurse=False):  # a bias is a column
            parameter.copy_(q.T @ parameter)


def is_rotated(found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> bool:
    """Say whether one hidden state is another within rounding, next to the size of a third."""
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= LARGEST_CHANGE * scale.norm())
