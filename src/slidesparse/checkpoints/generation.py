"""The settings of generation of a checkpoint."""

from __future__ import annotations

from typing import Any

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError, SlideSparseError, first_line
from slidesparse.files.json_files import read_json

GENERATION_FILE = "generation_config.json"


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
