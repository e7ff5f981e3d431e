"""Check config.json for what transformers takes without a word, and what it would build for days."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slidesparse.errors import CheckpointError
from slidesparse.files.checkpoint import Checkpoint

COUNTS = frozenset(
    {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"}
)
"""Keys under which config files have their numbers of layers."""

SHARED_LAYERS = 256
"""Layers that a model may have whose layers share their tensors, as ALBERT's do."""


def require_plausible(checkpoint: Checkpoint) -> None:
    """Refuse more layers than the checkpoint has tensors, before a model of them is built.

    Raises:
        CheckpointError: Naming the key.
    """
    most = max(len(checkpoint.files), SHARED_LAYERS)
    for key, value in _counts(checkpoint.config):
        if isinstance(value, int) and value > most:
            raise CheckpointError(
                f"{key} of {checkpoint.path}/config.json",
                got=value,
                needed=f"at most {most}: the checkpoint holds {len(checkpoint.files)} tensors",
            )


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif key in COUNTS:
            yield key, value


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
