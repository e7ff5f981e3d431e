"""Check config.json for what transformers takes without a word, and for other quantisers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from slidesparse.base.bounded_regex import require_bounded
from slidesparse.base.counted import counted
from slidesparse.errors import CheckpointError, InputError, SlideSparseError, first_line
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.json_files import read_json
from slidesparse.files.marker import FROM_FLOAT, is_bitnet, quantisation_dtype, source_quantisation
from slidesparse.models.config_keys import MARKER_KEY

GENERATION_FILE = "generation_config.json"
"""Holds the settings with which a model writes text."""

COUNTS = frozenset(
    {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"}
)
"""Keys under which config files have their numbers of layers."""

SHARED_LAYERS = 256
"""Layers that a model may have whose layers share their tensors, as ALBERT's do."""

LARGEST = 1 << 24
"""A number that a config may have though no tensor has such a dimension: Llama 4 reads ten million positions."""

NO_SIZE = re.compile("theta|base|seed|param")
"""Keys of numbers for which nothing is made."""

NAME_LENGTH = 100
"""Characters of a name for which the regular expressions of a config must be bounded; most have fewer."""

SPARE_MODULES, MODULES_OF_A_TENSOR = 20_000, 16
"""Modules and parameters that a model may have: seconds of work, and a multiple for each tensor."""

QUANTISER_FILES = ("quantize_config.json", "quant_config.json")
"""Where GPTQ and AWQ wrote their settings before these had a key in config.json."""

QUANTISER_TENSORS = (".qweight", ".qzeros")
"""Ends of the names of their tensors."""


def require_plausible(checkpoint: Checkpoint) -> None:
    """Refuse numbers and regular expressions that would keep transformers busy for days.

    Raises:
        CheckpointError: Naming the key.
    """
    layers = max(len(checkpoint.files), SHARED_LAYERS)
    size = max(LARGEST, *(n for shard in checkpoint.shards.values() for one in shard.values() for n in one.shape))
    for key, value in _values("", checkpoint.config):
        most, has = (layers, f"{len(checkpoint.files)} tensors") if key in COUNTS else (size, "no tensor of that size")
        where = f"{key} of {checkpoint.path}/config.json"
        if isinstance(value, int) and value > most and NO_SIZE.search(key) is None:
            raise CheckpointError(where, got=value, needed=f"at most {most}: the checkpoint holds {has}")
        if isinstance(value, str) and value.startswith("re:"):
            try:
                require_bounded(value.removeprefix("re:"), NAME_LENGTH)
            except InputError as error:
                raise CheckpointError.of(error.located(where)) from error


def _values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in a value, with the innermost key around it."""
    if isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _values(inner, item)
    elif isinstance(value, list):
        for item in value:
            yield from _values(key, item)
    else:
        yield key, value


@contextmanager
def counted_modules(checkpoint: Checkpoint) -> Iterator[None]:
    """Refuse a model of far more modules than the checkpoint has tensors for, whatever key counts them.

    Raises:
        CheckpointError: While they are made.
    """
    most = SPARE_MODULES + MODULES_OF_A_TENSOR * len(checkpoint.files)
    numbers = count()

    def one_more(*_: Any) -> None:
        if next(numbers) > most:
            raise CheckpointError(
                f"layers in {checkpoint.path}/config.json",
                got=f"more than {most} modules and parameters",
                needed=f"a model of the checkpoint's {counted(len(checkpoint.files), 'tensor')}",
            )

    handles = [
        register_module_module_registration_hook(one_more),
        register_module_parameter_registration_hook(one_more),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def require_family(checkpoint: Checkpoint, model_class: Any, config: Any) -> None:
    """Refuse a ``model_type`` that is not of the model that ``architectures`` names.

    transformers only warns, and takes the other family's settings where the file has none.

    Raises:
        CheckpointError: Naming both.
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


def other_quantisation(checkpoint: Checkpoint) -> CheckpointError | None:
    """Return the error that names the quantisation of a checkpoint that lacks weights; None where nothing shows one."""
    config = checkpoint.config
    try:
        if not is_bitnet(config):
            quantisation_dtype(config)
    except CheckpointError as error:
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
    """Return a checkpoint's settings as transformers has them, or None where it has none.

    Raises:
        CheckpointError: The file cannot be read, or transformers does not take what it says.
    """
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
