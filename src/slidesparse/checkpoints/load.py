"""``slidesparse.load``: a transformers model with SlideLinear layers, from a checkpoint that ``prune`` wrote."""

from __future__ import annotations

import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidesparse.base.counted import counted
from slidesparse.base.device import usable_device
from slidesparse.base.log import LOG
from slidesparse.checkpoints.check_tensors import check_finite, refuse_faults, stored_names
from slidesparse.checkpoints.checkpoint import Checkpoint, generation_settings
from slidesparse.checkpoints.expert_tensors import ExpertReader
from slidesparse.checkpoints.load_experts import ExpertLoader
from slidesparse.checkpoints.marker import Marker, quantisation_dtype
from slidesparse.checkpoints.meta_model import MetaModel, build_meta_model
from slidesparse.errors import SlideSparseWarning
from slidesparse.files.hub import source_folder
from slidesparse.gemm.select import Choice, Fallback
from slidesparse.layer.linear import SlideLinear
from slidesparse.layer.settle import Chooser, RunsPacked, pack_dense, settle
from slidesparse.tuning.at_load import LoadTuner, Tune, check_tune
from slidesparse.tuning.measure import SIZES
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import FLOATS

_LOADING = threading.Lock()
"""Lock of loading, in which accelerate and transformers change the construction of modules for all threads."""


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    backend: str = "auto",
    fallback: Fallback = "dense",
    tune: Tune = "auto",
    revision: str | None = None,
) -> nn.Module:
    """Load a pruned checkpoint for inference.

    Pruned INT8 and FP8 experts of a mixture run sparse on a Hopper GPU; the log gives the reason why others run dense.

    Args:
        path: A folder that ``slidesparse prune`` wrote, or as text its ``namespace/name`` on the Hugging Face hub, from
            which it is fetched into huggingface_hub's cache. A folder of that name comes first.
        device: Device of the model.
        backend: ``auto`` or a backend's name, for every sparse layer.
        fallback: Backend of ``auto`` for layers that no accelerated backend can run.
        tune: ``auto`` measures, on a GPU and for ``backend="auto"``, each kind of layer without times on this machine
            once, some seconds for a model; ``off`` measures nothing.
        revision: Branch, tag or commit of a model of the hub; None: its main branch.

    Returns:
        The transformers model of the checkpoint's architecture, in evaluation mode.

    Raises:
        CheckpointError: The folder is not such a checkpoint, or is damaged; or there is no such model to fetch.
        PatternViolation: A weight does not satisfy the pattern that the checkpoint claims.
        InputError: An unknown value of ``tune``, or a revision of a local folder.
        UnsupportedError: There is no such device here.
    """
    check_tune(tune, "tune")
    device = usable_device(device)
    checkpoint = Checkpoint(source_folder(path, revision))
    marker = Marker.require(checkpoint.config, path)
    with _LOADING:
        return _filled(checkpoint, marker, device, backend, fallback, tune)


def _filled(
    checkpoint: Checkpoint, marker: Marker, device: torch.device, backend: str, fallback: Fallback, tune: Tune
) -> nn.Module:
    quantised = quantisation_dtype(checkpoint.config) is not None
    meta = build_meta_model(checkpoint, real_buffers=True)
    model: Any = meta.model
    dtype = model.config.dtype
    linears = meta.linears(marker)
    refuse_faults(meta, checkpoint)
    activations = dtype if dtype in FLOATS else torch.bfloat16
    tuner = None if tune == "off" else LoadTuner(SIZES[-1], activations, LOG)
    chooser = Chooser(backend, fallback, tuner)
    filled = set()
    for name, linear in linears.items():
        prefix = meta.prefix(name)
        scale = checkpoint.tensor(f"{prefix}.weight_scale", device) if quantised else None
        pattern, stored = marker.pattern_of(name), f"{prefix}.weight"
        packed, choice = _settled(checkpoint.tensor(stored, device), scale, pattern, chooser, stored)
        bias = meta.read(f"{name}.bias", partial(checkpoint.tensor, device=device)) if linear.bias is not None else None
        if bias is not None:
            check_finite(bias, f"{prefix}.bias")
        layer = SlideLinear(packed, bias, backend=backend, fallback=fallback, choice=choice, dense_dtype=dtype)
        model.set_submodule(name, layer)
        filled |= {f"{name}.weight", f"{name}.bias"}
    filled |= ExpertLoader(meta, checkpoint, marker, device, backend, fallback).load()
    _load_rest(meta, checkpoint, filled, device)
    loaded: nn.Module = model.to(device).eval()
    return loaded


def _settled(
    weight: torch.Tensor, scale: torch.Tensor | None, pattern: Pattern, chooser: Chooser, name: str
) -> tuple[PackedWeight, Choice]:
    """Return the packed weight of a SlideLinear, and its backends."""
    settled = settle(weight, scale, pattern, chooser, name=name)
    if isinstance(settled, RunsPacked):
        return settled.packed, settled.choice
    packed = pack_dense(weight, scale, pattern, name=name)
    return packed, settled.choice or chooser.choose(packed)


def _load_rest(meta: MetaModel, checkpoint: Checkpoint, filled: set[str], device: str | torch.device) -> None:
    """Load all tensors outside of SlideLinears (embeddings, norms, dense linears), and the generation settings."""
    model: Any = meta.model
    # Tensors of several float types are converted to the model's type, as transformers does.
    dtype = model.config.dtype
    stored = stored_names(meta)
    experts = ExpertReader(checkpoint, meta, device)

    def read(name: str) -> torch.Tensor:
        value = meta.read(name, experts.tensor).to(device)
        check_finite(value, stored.get(name, name))
        return value.to(meta.runs_in(name, dtype)) if dtype in FLOATS and value.is_floating_point() else value

    rest = {name: read(name) for name in meta.filled if name not in filled}
    model.load_state_dict(rest, strict=False, assign=True)
    meta.tie(but=filled)
    unused = meta.names.unexpected
    if unused:
        warnings.warn(
            f"{type(model).__name__} has no use for {counted(len(unused), 'tensor')} of {checkpoint.path}:"
            f" {', '.join(unused[:3])}",
            SlideSparseWarning,
            stacklevel=4,
        )
    settings = generation_settings(checkpoint)
    if settings is not None and hasattr(model, "generation_config"):
        model.generation_config = settings
