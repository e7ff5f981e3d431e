"""Check config.json for what transformers takes without a word, and for other quantisers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count, repeat
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook

from slidesparse.base.counted import counted
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import is_bitnet, quantisation_dtype, source_quantisation
from slidesparse.checkpoints.quantisation_keys import FROM_FLOAT
from slidesparse.errors import CheckpointError, SlideSparseError, first_line
from slidesparse.files.json_files import read_json
from slidesparse.models.config_keys import MARKER_KEY

GENERATION_FILE = "generation_config.json"
"""Holds the settings with which a model writes text."""

LARGEST = 1 << 24
"""A number that a config may have though no tensor is so long: Llama 4 reads ten million positions."""

NO_SIZE = re.compile("theta|base|seed|param")
"""Keys of numbers for which nothing is made."""

SPARE, OF_A_TENSOR = 2048, 16
"""Modules that a model may have: some seconds of work, and so many for each tensor of the checkpoint."""

QUANTISER_FILES = ("quantize_config.json", "quant_config.json")
"""Where GPTQ and AWQ wrote their settings before these had a key in config.json."""

QUANTISER_TENSORS = (".qweight", ".qzeros")
"""Ends of the names of their tensors."""


def require_plausible(checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError for a number beyond any tensor."""
    most = max(LARGEST, *(n for shard in checkpoint.shards.values() for one in shard.values() for n in one.shape))
    for key, value in _values("", checkpoint.config):
        if isinstance(value, int) and value > most and NO_SIZE.search(key) is None:
            raise CheckpointError(f"{key} of {checkpoint.path}/config.json", got=value, needed=f"at most {most}")


def _values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value and all that is in it, each with the innermost key around it."""
    yield key, value
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else zip(repeat(key), value, strict=False):
            yield from _values(name, item)


@contextmanager
def counted_modules(checkpoint: Checkpoint) -> Iterator[None]:
    """Refuse a model that gets far more modules in this block than the checkpoint has tensors, whatever key says so."""
    most, numbers = SPARE + OF_A_TENSOR * len(checkpoint.files), count()

    def one_more(*_: Any) -> None:
        if next(numbers) >= most:
            needed = f"a model of {counted(len(checkpoint.files), 'tensor')}"
            raise CheckpointError(f"layers in {checkpoint.path}/config.json", got=f"{most} modules", needed=needed)

    handle = register_module_module_registration_hook(one_more)
    try:
        yield
    finally:
        handle.remove()


def require_family(checkpoint: Checkpoint, model_class: Any, config: Any) -> None:
    """Raise a CheckpointError for a ``model_type`` that is not of the model that ``architectures`` names.

    transformers only warns, and takes the other family's settings where the file has none.
    """
    needed = getattr(model_class, "config_class", None)
    inside = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    if needed is None or any(isinstance(one, needed) for one in (config, *inside)) or _is_listed(model_class, config):
        return
    raise CheckpointError(
        f"model_type of {checkpoint.path}/config.json",
        got=repr(checkpoint.config.get("model_type")),
        needed=f"{needed.model_type!r}, the one of {model_class.__name__}",
    )


def _is_listed(model_class: Any, config: Any) -> bool:
    """Return whether transformers itself makes that class of this model type, as Llama's of InternLM3's."""
    from transformers.models.auto import modeling_auto

    lists = [value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    found = [classes[config.model_type] for classes in lists if config.model_type in classes]
    return any(model_class.__name__ in ((name,) if isinstance(name, str) else name) for name in found)


def unread_quantisation(config: Mapping[str, Any]) -> CheckpointError | None:
    """Return why we do not read the quantisation that a config.json names; None for ours, for BitNet's and for none."""
    try:
        quantisation_dtype(config)
    except CheckpointError as error:
        return None if is_bitnet(config) else error
    return None


def other_quantisation(checkpoint: Checkpoint) -> CheckpointError | None:
    """Return the error that names the quantisation of a checkpoint that lacks weights; None where nothing shows one."""
    config = checkpoint.config
    if (error := unread_quantisation(config)) is not None:
        return error
    signs = [] if source_quantisation(config) or MARKER_KEY in config else _signs(checkpoint)
    if not signs:
        return None
    return CheckpointError(
        "quantisation of the source",
        got=f"{' and '.join(signs)}, as GPTQ and AWQ write them",
        needed="none, or compressed-tensors W8A8",
        remedy=FROM_FLOAT,
    )


def _signs(checkpoint: Checkpoint) -> list[str]:
    """Return what shows GPTQ or AWQ without a key: settings in a file of their own, and one of the tensors."""
    files = [name for name in QUANTISER_FILES if (checkpoint.path / name).is_file()]
    return files + [name for name in checkpoint.files if name.endswith(QUANTISER_TENSORS)][:1]


def generation_settings(checkpoint: Checkpoint) -> Any | None:
    """Return a checkpoint's settings as transformers has them, None where it has none; a CheckpointError for others."""
    from transformers import GenerationConfig

    path = checkpoint.path / GENERATION_FILE
    if not path.exists():
        return None
    try:
        return GenerationConfig.from_dict(read_json(path))
    except SlideSparseError:
        raise
    except Exception as error:  # wrong settings can raise anything in a library
        raise CheckpointError(f"{path} cannot be used", got=first_line(error), remedy="correct or remove it") from error
