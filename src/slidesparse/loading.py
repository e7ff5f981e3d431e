"""``slidesparse.load``: a transformers model with SlideLinear layers, from a checkpoint that ``prune`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError, UnsupportedError
from slidesparse.gemm.select import Fallback
from slidesparse.linear import SlideLinear
from slidesparse.marker import Marker, quantisation_dtype
from slidesparse.packed import PackedWeight, pack
from slidesparse.packed_file import FILE_NAME, PackedFile
from slidesparse.pattern import Pattern
from slidesparse.skeleton import model_class, tensor_prefixes
from slidesparse.support import check_pattern


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
        device: Where to.
        backend: ``auto`` or a backend's name, for every sparse layer.
        fallback: What ``auto`` does where no accelerated backend can run.

    Returns:
        The transformers model of the checkpoint's architecture, in evaluation mode.

    Raises:
        CheckpointError: The folder is not such a checkpoint, or is damaged.
        PatternViolation: A weight does not satisfy the pattern that the checkpoint claims.
    """
    checkpoint = Checkpoint(path)
    marker = Marker.require(checkpoint.config, path)
    packed_file = PackedFile(checkpoint) if (checkpoint.path / FILE_NAME).exists() else None
    quantised = quantisation_dtype(checkpoint.config) is not None
    model = _empty_model(checkpoint)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in marker.ignore}
    prefixes = tensor_prefixes(model, checkpoint, linears)
    used = set()
    for name, linear in linears.items():
        prefix = prefixes[name]
        scale = checkpoint.tensor(f"{prefix}.weight_scale", device) if quantised else None
        if packed_file is not None:
            shape = (linear.out_features, linear.in_features)
            packed = packed_file.read(name, marker.pattern_of(name), shape, scale, device)
        else:
            packed = _read_and_pack(checkpoint, prefix, marker.pattern_of(name), scale, device)
        bias = checkpoint.tensor(f"{prefix}.bias", device) if linear.bias is not None else None
        model.set_submodule(name, SlideLinear(packed, bias, backend=backend, fallback=fallback))
        used |= {f"{prefix}.weight", f"{prefix}.weight_scale", f"{prefix}.bias"}
    _load_rest(model, checkpoint, used, device)
    return model.to(device).eval()


def _read_and_pack(
    checkpoint: Checkpoint, prefix: str, pattern: Pattern, scale: torch.Tensor | None, device: str | torch.device
) -> PackedWeight:
    weight = checkpoint.tensor(f"{prefix}.weight", device)
    groups = check_pattern(weight, pattern, name=f"{prefix}.weight")
    return pack(weight, pattern, scale=scale, groups=groups, name=f"{prefix}.weight")


def _empty_model(checkpoint: Checkpoint) -> nn.Module:
    """The model with parameters on the meta device and buffers (rotary tables) computed."""
    known, config = model_class(checkpoint)
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise UnsupportedError("accelerate is not installed", remedy='pip install "slidesparse[hf]"') from error
    with init_empty_weights(include_buffers=False):
        model: nn.Module = known(config)
    return model


def _load_rest(model: nn.Module, checkpoint: Checkpoint, used: set[str], device: str | torch.device) -> None:
    """Load what is not in a SlideLinear: embeddings, norms, dense linears."""
    base = getattr(model, "base_model_prefix", "")
    wanted = model.state_dict().keys()
    rest: dict[str, torch.Tensor] = {}
    for tensor in checkpoint.files.keys() - used:
        candidates = (tensor, f"{base}.{tensor}", tensor.removeprefix(f"{base}."))
        known = next((name for name in candidates if name in wanted), None)
        if known is not None:
            rest[known] = checkpoint.tensor(tensor, device)
    model.load_state_dict(rest, strict=False, assign=True)
    tie: Any = model.tie_weights
    tie()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"{checkpoint.path} holds no {', '.join(missing[:3])} ({len(missing)} tensors missing)")
