"""The checkpoints of ``bench serve``: where they lie, how much of a disk they take, which are removed for others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from slidesparse.base.file_lock import file_lock
from slidesparse.errors import InputError, UnsupportedError, system_words
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import parse_dtype
from slidesparse_bench.engine.eagle_head import write_eagle_head
from slidesparse_bench.engine.four_bits import ACTIVATIONS, GROUP
from slidesparse_bench.engine.vllm_checkpoint import ARCHITECTURES, model_config, write_checkpoint
from slidesparse_bench.kernels.operands import rounding_for
from slidesparse_bench.serve.serve_profile import DTYPES, ServeProfile
from slidesparse_bench.served_records import EngineKey

SPARE_BYTES = 10**9
"""Left free, for logs and caches."""

LOCK = ".lock"
"""A file in the user's folder, which a run holds."""


@contextmanager
def scratch_folder(folder: Path | None) -> Iterator[Path]:
    """A folder for checkpoints: the user's, which keeps them, or a temporary one.

    Raises:
        InputError: It cannot be made, or another run has it: each would replace the checkpoints of the other.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("--scratch", got=system_words(error), needed="a folder that can be written") from error
    with file_lock(folder / LOCK, 0) as held:
        if not held:
            raise InputError("--scratch", got="one that another bench serve uses", needed="one for each")
        yield folder


def checkpoint_folder(scratch: Path, key: EngineKey) -> Path:
    """Where an engine's checkpoint lies; engines of one pattern, and as many bits, share it."""
    pattern = key.pattern.replace(":", "of")
    rounding = rounding_for(key.backend, key.weights)
    return scratch / f"{key.model}-{key.layers}-{key.weights}-{pattern}{'' if rounding == 'absmax' else f'-{rounding}'}"


def checkpoint_bytes(key: EngineKey) -> int:
    """How large an engine's checkpoint is: pruned weights are stored with their zeros."""
    kind = ARCHITECTURES[key.model]
    sizes = kind.sizes(key.model)
    linears = key.layers * sum(out * columns for out, columns in sizes)
    (_, hidden), *_ = sizes
    four_bits, float_bytes = key.weights in ACTIVATIONS, torch.bfloat16.itemsize
    stored = 0.5 + float_bytes / GROUP if four_bits else parse_dtype(key.weights).itemsize
    ends = kind.vocabulary * hidden * (float_bytes + (stored if kind.lm_head else float_bytes))
    return round(linears * stored + ends)


def require_space(scratch: Path, keys: Sequence[EngineKey], removable: Sequence[EngineKey]) -> None:
    """Refuse to begin what the disk cannot hold.

    Args:
        scratch: Where checkpoints are written.
        keys: The engines of one model and type that have to run.
        removable: Engines of others, whose checkpoints would be removed.

    Raises:
        UnsupportedError: The disk is too small.
    """
    folders = {checkpoint_folder(scratch, key): checkpoint_bytes(key) for key in keys}
    needed = sum(size for folder, size in folders.items() if not folder.exists())
    if not needed:
        return
    others = {checkpoint_folder(scratch, key) for key in removable}
    held = sum(file.stat().st_size for folder in others if folder.exists() for file in folder.iterdir())
    free = shutil.disk_usage(scratch).free + held
    if needed + SPARE_BYTES > free:
        raise UnsupportedError(
            f"no disk space for the checkpoints of {keys[0].model} in {keys[0].dtype}",
            got=f"{free / 1e9:.1f} GB in {scratch}",
            needed=f"{(needed + SPARE_BYTES) / 1e9:.1f} GB",
            remedy="name a larger disk with --scratch, or fewer --engines or --layers",
        )


def ready_checkpoint(scratch: Path, key: EngineKey, removable: Sequence[EngineKey]) -> Path:
    """An engine's checkpoint, written unless it is there; those of other models and types are removed before."""
    folder = checkpoint_folder(scratch, key)
    if not folder.exists():
        for other in removable:
            shutil.rmtree(checkpoint_folder(scratch, other), ignore_errors=True)
        _write(folder, key)
    return folder


def ready_draft(scratch: Path, key: EngineKey) -> Path:
    """The EAGLE-3 draft of an engine's model, written unless it is there."""
    folder = scratch / f"{key.model}-eagle3"
    if not folder.exists():
        partial = scratch / f"{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write_eagle_head(partial, model_config(key.model), torch.device("cuda", torch.cuda.current_device()))
        partial.rename(folder)
    return folder


def removable(profile: ServeProfile, key: EngineKey) -> list[EngineKey]:
    """Engines of other models and types: a disk may hold the checkpoints of one."""
    return [
        other
        for model in ARCHITECTURES
        for dtype in DTYPES
        if (model, dtype) != (key.model, key.dtype)
        for other in profile.keys(model, dtype)
    ]


def _write(folder: Path, key: EngineKey) -> None:
    """All of it or nothing: a run may be stopped meanwhile."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    device = torch.device("cuda", torch.cuda.current_device())
    config = model_config(key.model, key.layers)
    pattern = Pattern.parse(key.pattern)
    if key.weights in ACTIVATIONS:
        write_checkpoint(partial, config, torch.bfloat16, pattern, device, four_bits=key.weights)
    else:
        rounding, lm_head = rounding_for(key.backend, key.weights), ARCHITECTURES[key.model].lm_head
        write_checkpoint(partial, config, parse_dtype(key.weights), pattern, device, rounding, lm_head)
    torch.cuda.empty_cache()
    partial.rename(folder)
