"""``slidesparse.load``: a transformers model with SlideLinear layers, from a checkpoint that ``prune`` wrote."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.base.device import usable_device
from slidesparse.errors import CheckpointError, SlideSparseError, SlideSparseWarning, first_line
from slidesparse.files.check_tensors import check_finite, refuse_faults
from slidesparse.files.checkpoint import Checkpoint, read_json
from slidesparse.files.marker import Marker, quantisation_dtype
from slidesparse.files.meta_model import MetaModel, build_meta_model
from slidesparse.files.packed_file import FILE_NAME, PackedFile
from slidesparse.gemm.select import Fallback
from slidesparse.linear import SlideLinear
from slidesparse.packed import PackedWeight
from slidesparse.packing import pack
from slidesparse.pattern import Pattern
from slidesparse.quant import FLOATS

GENERATION_FILE = "generation_config.json"


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    backend: str = "auto",
    fallback: Fallback = "dense",
) -> nn.Module:
    """Load a pruned checkpoint for inference.

    Args:
        path: A folder that ``slidesparse prune`` wrote.
        device: Device of the model.
        backend: ``auto`` or a backend's name, for every sparse layer.
        fallback: How ``auto`` runs layers that no accelerated backend can run.

    Returns:
        The transformers model of the checkpoint's architecture, in evaluation mode.

    Raises:
        CheckpointError: The folder is not such a checkpoint, or is damaged.
        PatternViolation: A weight does not satisfy the pattern that the checkpoint claims.
        UnsupportedError: There is no such device here.
    """
    device = usable_device(device)
    checkpoint = Checkpoint(path)
    marker = Marker.require(checkpoint.config, path)
    packed_file = PackedFile(checkpoint) if (checkpoint.path / FILE_NAME).exists() else None
    quantised = quantisation_dtype(checkpoint.config) is not None
    meta = build_meta_model(checkpoint, real_buffers=True)
    linears = meta.linears(marker)
    refuse_faults(meta, checkpoint)
    filled = set()
    for name, linear in linears.items():
        prefix = meta.prefix(name)
        scale = checkpoint.tensor(f"{prefix}.weight_scale", device) if quantised else None
        if packed_file is not None:
            stored = checkpoint.stored(f"{prefix}.weight")
            packed = packed_file.read(name, marker.pattern_of(name), stored, scale, device)
        else:
            packed = _read_and_pack(checkpoint, prefix, marker.pattern_of(name), scale, device)
        bias = checkpoint.tensor(f"{prefix}.bias", device) if linear.bias is not None else None
        if bias is not None:
            check_finite(bias, f"{prefix}.bias")
        meta.model.set_submodule(name, SlideLinear(packed, bias, backend=backend, fallback=fallback))
        filled |= {f"{name}.weight", f"{name}.bias"}
    _load_rest(meta, checkpoint, filled, device)
    return meta.model.to(device).eval()


def _read_and_pack(
    checkpoint: Checkpoint, prefix: str, pattern: Pattern, scale: torch.Tensor | None, device: str | torch.device
) -> PackedWeight:
    weight = checkpoint.tensor(f"{prefix}.weight", device)
    return pack(weight, pattern, scale=scale, name=f"{prefix}.weight")


def _load_rest(meta: MetaModel, checkpoint: Checkpoint, filled: set[str], device: str | torch.device) -> None:
    """Load all tensors that are in no SlideLinear (embeddings, norms, dense linears), and the generation settings."""
    model: Any = meta.model
    # Tensors of several float types are converted to the model's type, as transformers does.
    dtype = model.config.dtype

    def read(tensor: str) -> torch.Tensor:
        value = checkpoint.tensor(tensor, device)
        check_finite(value, tensor)
        return value.to(dtype) if dtype in FLOATS and value.dtype in FLOATS else value

    rest = {name: read(tensor) for name, tensor in meta.tensors.items() if name not in filled}
    model.load_state_dict(rest, strict=False, assign=True)
    if any(parameter.is_meta for parameter in model.parameters()):  # a stored output embedding is never tied away
        model.tie_weights()
    if meta.unexpected:
        warnings.warn(
            f"{len(meta.unexpected)} tensors of {checkpoint.path} are not used by {type(model).__name__} and were not"
            f" loaded: {', '.join(meta.unexpected[:3])}",
            SlideSparseWarning,
            stacklevel=3,
        )
    if (checkpoint.path / GENERATION_FILE).exists() and hasattr(model, "generation_config"):
        model.generation_config = _generation_config(checkpoint.path / GENERATION_FILE)


def require_generation_config(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose settings for generation, which are copied as they are, would let no model load.

    Raises:
        CheckpointError: transformers cannot use them.
    """
    if (checkpoint.path / GENERATION_FILE).exists():
        _generation_config(checkpoint.path / GENERATION_FILE)


def _generation_config(path: Path) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_dict(read_json(path))
    except SlideSparseError:
        raise
    except Exception as error:  # wrong settings can raise anything in a library
        raise CheckpointError(f"{path} cannot be used", got=first_line(error), remedy="correct or remove it") from error
