"""Check a checkpoint's tensors against its model, its config and its marker, before anything relies on them.

A library that loads a checkpoint makes up missing tensors, casts other types, and multiplies by any scale. So every
command checks names, shapes and types, by the files' headers, and the few values of scales before it reads weights.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slidesparse.checkpoints.checkpoint import Checkpoint, generation_settings
from slidesparse.checkpoints.expert_tensors import find_expert_tensors, marker_name
from slidesparse.checkpoints.marker import (
    Marker,
    is_bitnet,
    other_quantisation,
    quantisation_dtype,
    source_quantisation,
)
from slidesparse.checkpoints.meta_model import MetaModel
from slidesparse.errors import CheckpointError, UnsupportedError
from slidesparse.files.stored import ITEM_BYTES, STORED_NAMES
from slidesparse.models.targets import matches_entry
from slidesparse.weights.quant import FLOATS, QUANTISED
from slidesparse.weights.support import is_finite

FLOAT_NAMES = frozenset({"F64", *(STORED_NAMES[dtype] for dtype in FLOATS)})
SCALE_NAMES = frozenset(STORED_NAMES[dtype] for dtype in FLOATS)
QUANTISED_NAMES = frozenset(STORED_NAMES[dtype] for dtype in QUANTISED)


def refuse_faults(meta: MetaModel, checkpoint: Checkpoint) -> None:
    """Raise the first CheckpointError of a checkpoint: for missing tensors, or of :func:`find_faults`."""
    try:
        meta.require_complete()
    except CheckpointError as error:
        raise other_quantisation(checkpoint.config) or error from None
    for fault in find_faults(meta, checkpoint):
        raise fault


def left_alone(config: Mapping[str, Any], linears: Iterable[str]) -> set[str]:
    """Return the linears that a ``quantization_config`` ignores, which are in a float type."""
    ignore = source_quantisation(config).get("ignore") or ()
    return {name for name in linears if any(matches_entry(name, entry) for entry in ignore)}


def stored_names(meta: MetaModel) -> Mapping[str, str]:
    """Return the checkpoint's name of each value of the model's state that it stores unchanged."""
    return {name: origin for name, origin in meta.names.origins.items() if isinstance(origin, str)}


def find_faults(meta: MetaModel, checkpoint: Checkpoint) -> Iterator[CheckpointError]:
    """Yield an error for every fault, each naming its tensor.

    Faults are: a wrong shape or type; a weight in 8 bits that should be a float by the config or the marker, and the
    reverse; a scale that is missing, of wrong shape or type, NaN or Inf; a scale of a weight that is not quantised; and
    unreadable settings of generation. Missing tensors are left to :meth:`MetaModel.require_complete`.

    Raises:
        CheckpointError: The quantisation is of an unsupported kind.
    """
    for name in checkpoint.files:
        if (dtype := checkpoint.stored(name).dtype) not in ITEM_BYTES:
            yield CheckpointError(f"type of {name}", got=dtype, needed=f"one of {', '.join(ITEM_BYTES)}")
    try:
        generation_settings(checkpoint)
    except CheckpointError as error:
        yield error
    allowed, tensors = _Allowed(meta, checkpoint), stored_names(meta)
    parameters = dict(meta.model.named_parameters(remove_duplicate=False))
    for name, expected in meta.model.state_dict(keep_vars=True).items():
        own = tensors.get(name)
        if own is None:
            continue
        shape = checkpoint.stored(own).shape
        if shape != tuple(expected.shape):
            yield CheckpointError(
                f"shape of {own}", got=list(shape), needed=f"{list(expected.shape)}, as config.json says"
            )
        elif name in parameters and own not in allowed.experts:
            yield from _type_faults(own, checkpoint, *allowed.of(name))
    for own in allowed.experts:
        yield from _type_faults(own, checkpoint, *allowed.of_experts(own, len(checkpoint.stored(own).shape)))


class _Allowed:
    """The allowed types of each tensor, by the config, the marker and the model's linears."""

    def __init__(self, meta: MetaModel, checkpoint: Checkpoint) -> None:
        self.marker = Marker.from_config(checkpoint.config)
        dtype = None if is_bitnet(checkpoint.config) else quantisation_dtype(checkpoint.config)
        self.quantised = None if dtype is None else STORED_NAMES[dtype]
        self.linears = {name for name, module in meta.model.named_modules() if isinstance(module, nn.Linear)}
        self.left = left_alone(checkpoint.config, self.linears)
        try:
            self.experts = set(find_expert_tensors(meta, checkpoint))
        except UnsupportedError:  # untreated, and of a float type
            self.experts = set()

    def of(self, name: str) -> tuple[frozenset[str], str]:
        """Return the allowed types of a parameter, and the reason."""
        layer = name.removesuffix(".weight")
        if layer not in self.linears or layer == name:
            return FLOAT_NAMES, "no weight of a linear layer"
        if self.quantised is None:
            return FLOAT_NAMES, "config.json has no quantization_config"
        both = FLOAT_NAMES | {self.quantised}
        if self.marker is None:
            return both, f"the quantization_config says {self.quantised}"
        if layer in self.marker.ignore:
            return FLOAT_NAMES, "slidesparse_config ignores the layer"
        if layer in self.left:
            why = "quantization_config does, slidesparse_config does not"
            return frozenset(), f"both configs to ignore the layer, or neither: {why}"
        return frozenset({self.quantised}), "slidesparse_config does not ignore the layer"

    def of_experts(self, tensor: str, dimensions: int) -> tuple[frozenset[str], str]:
        """Return the allowed types of a tensor of experts, and the reason."""
        if self.quantised is None:
            return FLOAT_NAMES, "config.json has no quantization_config"
        if self.marker is None:
            return FLOAT_NAMES | {self.quantised}, f"the quantization_config says {self.quantised}"
        if marker_name(tensor, dimensions) in self.marker.experts:
            return frozenset({self.quantised}), "slidesparse_config names the experts"
        return FLOAT_NAMES, "slidesparse_config does not name the experts"


def _type_faults(tensor: str, checkpoint: Checkpoint, types: frozenset[str], why: str) -> Iterator[CheckpointError]:
    dtype, scale = checkpoint.stored(tensor).dtype, f"{tensor}_scale"
    if dtype not in types:
        offered = sorted(types - {"F64"})  # nothing is pruned in F64, which only copies have
        needed = f"{' or '.join(offered)}: {why}" if types else why
        yield CheckpointError(f"type of {tensor}", got=dtype, needed=needed)
    elif dtype in QUANTISED_NAMES and scale not in checkpoint.files:
        yield CheckpointError(f"the checkpoint holds no {scale}", got=f"{tensor} in {dtype}", needed="its scales")
    elif dtype in QUANTISED_NAMES:
        yield from _scale_faults(tensor, checkpoint)
    elif scale in checkpoint.files and tensor.endswith(".weight"):
        got = f"{dtype} and {scale}"
        yield CheckpointError(f"{tensor} has a scale and is not quantised", got=got, remedy=f"remove {scale}")


def _scale_faults(tensor: str, checkpoint: Checkpoint) -> Iterator[CheckpointError]:
    name, rows = f"{tensor}_scale", checkpoint.stored(tensor).shape[0]
    stored = checkpoint.stored(name)
    if stored.dtype not in SCALE_NAMES:
        yield CheckpointError(f"type of {name}", got=stored.dtype, needed=" or ".join(sorted(SCALE_NAMES)))
        return
    if stored.shape not in ((rows, 1), (rows,)):
        yield CheckpointError(f"shape of {name}", got=list(stored.shape), needed=f"[{rows}, 1]")
        return
    if not is_finite(checkpoint.tensor(name)):
        yield CheckpointError(f"{name} holds NaN or Inf", needed="positive numbers")


def not_finite(meta: MetaModel, checkpoint: Checkpoint, read: Container[str]) -> Iterator[str]:
    """Yield the tensors of parameters with NaN or Inf, except for the weights of layers in ``read``."""
    stored = stored_names(meta)
    for name, _ in meta.model.named_parameters():
        tensor = stored.get(name)
        if tensor is not None and name.removesuffix(".weight") not in read and not is_finite(checkpoint.tensor(tensor)):
            yield tensor


def check_finite(tensor: torch.Tensor, name: str) -> None:
    """Raise a CheckpointError for a tensor of a checkpoint that holds NaN or Inf."""
    if not is_finite(tensor):
        raise CheckpointError(f"{name} holds NaN or Inf", needed="finite numbers")
