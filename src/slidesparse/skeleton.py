"""The empty model behind a checkpoint: its modules without its weights, and which tensor belongs to which module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from slidesparse.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError, UnsupportedError
from slidesparse.marker import Marker


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError("transformers is not installed", remedy='pip install "slidesparse[hf]"') from error
    return transformers


def model_class(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The transformers class and config of a checkpoint.

    Raises:
        CheckpointError: When config.json names no architecture that the installed transformers knows.
    """
    transformers = _transformers()
    architectures = checkpoint.config.get("architectures")
    if not architectures:
        raise CheckpointError(f"{checkpoint.path}/config.json names no architecture", needed='"architectures": ["..."]')
    known = getattr(transformers, architectures[0], None)
    if known is None:
        raise CheckpointError(
            "architecture of the checkpoint",
            got=architectures[0],
            needed=f"one that transformers {transformers.__version__} has",
            remedy="upgrade transformers; custom code is not run",
        )
    config = transformers.AutoConfig.from_pretrained(str(checkpoint.path), local_files_only=True)
    return known, config


def skeleton(checkpoint: Checkpoint) -> nn.Module:
    """The checkpoint's model on the meta device: modules, names and shapes, no memory."""
    known, config = model_class(checkpoint)
    with torch.device("meta"):
        model: nn.Module = known(config)
    return model.eval()


def treated_linears(checkpoint: Checkpoint, marker: Marker) -> tuple[nn.Module, dict[str, nn.Linear]]:
    """The empty model of a pruned checkpoint, and its linears that are not on the ignore list."""
    model = skeleton(checkpoint)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in marker.ignore}
    return model, linears


def tensor_prefixes(model: nn.Module, checkpoint: Checkpoint, modules: Iterable[str]) -> dict[str, str]:
    """Module name -> the name under which the checkpoint stores it (``encoder.x`` may be ``bert.encoder.x`` there).

    Raises:
        CheckpointError: When a module's weight is in no shard.
    """
    base = getattr(model, "base_model_prefix", "")
    prefixes = {}
    for module in modules:
        candidates = (module, f"{base}.{module}", module.removeprefix(f"{base}."))
        stored = next((name for name in candidates if f"{name}.weight" in checkpoint.files), None)
        if stored is None:
            raise CheckpointError(
                f"the checkpoint holds no {module}.weight", remedy=f"leave it out with --ignore {module}"
            )
        prefixes[module] = stored
    return prefixes
