"""Check config.json for faults that transformers accepts silently, and for other quantisers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import is_bitnet, quantisation_dtype, source_quantisation
from slidesparse.checkpoints.quantisation_keys import FROM_FLOAT
from slidesparse.errors import CheckpointError, SlideSparseError, first_line
from slidesparse.files.json_files import read_json
from slidesparse.models.config_keys import MARKER_KEY

GENERATION_FILE = "generation_config.json"
"""Settings of generation."""

QUANTISER_FILES = ("quantize_config.json", "quant_config.json")
"""Settings of GPTQ and AWQ, from before these had a key in config.json."""

QUANTISER_TENSORS = (".qweight", ".qzeros")
"""Ends of the names of GPTQ's and AWQ's tensors."""


def require_family(checkpoint: Checkpoint, model_class: Any, config: Any) -> None:
    """Raise a CheckpointError for a ``model_type`` that does not fit the model in ``architectures``.

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
    """Return whether transformers itself builds this class for the model type, such as Llama's for InternLM3."""
    from transformers.models.auto import modeling_auto

    lists = [value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    named = [classes[config.model_type] for classes in lists if config.model_type in classes]
    return any(model_class.__name__ in ((name,) if isinstance(name, str) else name) for name in named)


def unread_quantisation(config: Mapping[str, Any]) -> CheckpointError | None:
    """Return the error for an unsupported quantisation in a config.json; None for ours, BitNet's and none."""
    try:
        quantisation_dtype(config)
    except CheckpointError as error:
        return None if is_bitnet(config) else error
    return None


def other_quantisation(checkpoint: Checkpoint) -> CheckpointError | None:
    """Return the error for the other quantisation of a checkpoint that lacks weights; None where nothing shows one."""
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
    """Return the signs of GPTQ or AWQ without a key: files of settings, and one of the tensors."""
    files = [name for name in QUANTISER_FILES if (checkpoint.path / name).is_file()]
    return files + [name for name in checkpoint.files if name.endswith(QUANTISER_TENSORS)][:1]


def generation_settings(checkpoint: Checkpoint) -> Any | None:
    """Return a checkpoint's settings of generation, None where it has none; a CheckpointError for unusable ones."""
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
