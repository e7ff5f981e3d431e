"""Build a checkpoint's model on the meta device, and match its parameters with the tensors of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slidesparse.errors import CheckpointError, UnsupportedError, first_line
from slidesparse.files.check_config import require_family, require_plausible
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.marker import Marker

BUILT_IN_ATTENTION = frozenset({None, "eager", "sdpa"})
"""Attention implementations that a config may ask for. For another name transformers may fetch a kernel from a hub and
run it."""


@dataclass(frozen=True)
class MetaModel:
    """A model without weights, and the checkpoint's tensors that fill it.

    Attributes:
        model: In evaluation mode; parameters on the meta device.
        tensors: Name in the model's state -> name in the checkpoint (``encoder.x`` may be ``bert.encoder.x`` there).
        missing: Missing keys: parameters that no tensor fills and that are not tied to one that is filled.
        unexpected: Unexpected keys: tensors of the checkpoint that fill no parameter and no buffer.
    """

    model: nn.Module
    tensors: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def linears(self, marker: Marker) -> dict[str, nn.Linear]:
        """Return the linears that are not on a marker's ignore list, by module name.

        Raises:
            CheckpointError: When the marker names a layer that the model does not have.
        """
        known = {name: module for name, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        unknown = [name for name in (*marker.ignore, *marker.layers) if name not in known]
        if unknown:
            raise CheckpointError("the marker names layers that the model does not have", got=", ".join(unknown[:3]))
        return {name: module for name, module in known.items() if name not in marker.ignore}

    def prefix(self, module: str) -> str:
        """Return the name that the checkpoint has for a module.

        Raises:
            CheckpointError: When its weight is in no shard.
        """
        tensor = self.tensors.get(f"{module}.weight")
        if tensor is None:
            raise CheckpointError(f"the checkpoint holds no {module}.weight")
        return tensor.removesuffix(".weight")

    def require_complete(self) -> None:
        """Refuse a checkpoint that does not fill the model.

        Raises:
            CheckpointError: Keys are missing; the error names the first three.
        """
        if self.missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(self.missing)} tensors of {type(self.model).__name__}",
                got=f"no {', '.join(self.missing[:3])}",
                needed="all of them, under the names that the installed transformers gives them",
            )


def build_meta_model(checkpoint: Checkpoint, *, real_buffers: bool = False) -> MetaModel:
    """Build a checkpoint's model without weights, and match its parameters with the checkpoint's tensors.

    Args:
        checkpoint: The checkpoint.
        real_buffers: Compute buffers (rotary tables) on the CPU, for a model that will be filled and run; else they are
            on the meta device too, and the model takes no memory.
    """
    known, config = model_class(checkpoint)
    empty = _empty_parameters() if real_buffers else torch.device("meta")
    with _explained(f"cannot build {known.__name__} from {checkpoint.path}/config.json"), empty:
        model: nn.Module = known(config)
    return _match(model.eval(), checkpoint)


def model_class(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return the transformers class and the config of a checkpoint.

    Raises:
        CheckpointError: When config.json names no model that the installed transformers knows.
    """
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError("transformers is not installed", remedy='pip install "slidesparse[hf]"') from error
    architectures = checkpoint.config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(
            f"{checkpoint.path}/config.json names no architecture", got=repr(architectures), needed='["SomeModel"]'
        )
    known = getattr(transformers, str(architectures[0]), None)
    if not (isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)):
        raise CheckpointError(
            "architecture of the checkpoint",
            got=architectures[0],
            needed=f"a model that transformers {transformers.__version__} has",
            remedy="upgrade transformers; custom code is not run",
        )
    require_plausible(checkpoint)
    with _explained(f"cannot read {checkpoint.path}/config.json"):
        if "AutoConfig" in (checkpoint.config.get("auto_map") or {}) and not _is_known(checkpoint.config):
            raise UnsupportedError(
                f"{checkpoint.path}/config.json needs code of its own",
                got=f"model_type {checkpoint.config.get('model_type')!r} and an auto_map",
                needed=f"a model type that transformers {transformers.__version__} has",
                remedy="upgrade transformers; custom code is not run",
            )
        local = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(str(checkpoint.path), **local)
        if not set(_attention_of(config)) <= BUILT_IN_ATTENTION:
            config._attn_implementation = None  # transformers then chooses, for all parts of the model
    require_family(checkpoint, known, config)
    return known, config


def _is_known(config: Mapping[str, Any]) -> bool:
    from transformers import CONFIG_MAPPING

    return config.get("model_type") in CONFIG_MAPPING


def _attention_of(config: Any) -> Iterator[str | None]:
    """Yield the attention implementation that a config asks for, then those of the configs inside it."""
    yield getattr(config, "_attn_implementation", None)
    for name in getattr(config, "sub_configs", ()):
        if (part := getattr(config, name, None)) is not None:
            yield from _attention_of(part)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn any error of the block into one line that starts with ``what``: a wrong config can break anything."""
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        raise CheckpointError(what, got=first_line(error)) from error


def _empty_parameters() -> Any:
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise UnsupportedError("accelerate is not installed", remedy='pip install "slidesparse[hf]"') from error
    return init_empty_weights(include_buffers=False)


def _match(model: nn.Module, checkpoint: Checkpoint) -> MetaModel:
    base = getattr(model, "base_model_prefix", "")

    def stored_as(name: str) -> str | None:
        candidates = (name, f"{base}.{name}", name.removeprefix(f"{base}."))
        return next((candidate for candidate in candidates if candidate in checkpoint.files), None)

    found = {name: stored_as(name) for name in model.state_dict(keep_vars=True)}
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    tied = _tied(model)
    parameters = dict(model.named_parameters())
    missing = tuple(name for name in parameters if name not in tensors and name not in tied)
    used = set(tensors.values())
    used |= {f"{tensor}_scale" for tensor in tensors.values() if tensor.endswith(".weight")}
    used |= {tensor for name, _ in model.named_buffers() if (tensor := stored_as(name)) is not None}
    expected = [re.compile(text) for text in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected = [t for t in checkpoint.files if t not in used and not any(text.search(t) for text in expected)]
    return MetaModel(model, tensors, missing, tuple(unexpected))


def _tied(model: nn.Module) -> set[str]:
    """Return the parameters that take another parameter's values: transformers 5 lists them, 4 names patterns."""
    listed = getattr(model, "all_tied_weights_keys", None)
    if listed is not None:
        return set(listed)
    tie = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    return set(getattr(model, "_tied_weights_keys", None) or ()) if tie else set()
