"""Read ``generation_config.json``, the settings with which a model writes text."""

from __future__ import annotations

from typing import Any

from slidesparse.errors import CheckpointError, SlideSparseError, UnsupportedError, first_line
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.json_files import read_json

GENERATION_FILE = "generation_config.json"


def generation_settings(checkpoint: Checkpoint) -> Any | None:
    """Return a checkpoint's settings as transformers has them, or None where it has none.

    Raises:
        CheckpointError: The file cannot be read, or transformers does not take what it says.
        UnsupportedError: transformers is not installed.
    """
    try:
        from transformers import GenerationConfig
    except ImportError as error:
        raise UnsupportedError("transformers is not installed", remedy='pip install "slidesparse[hf]"') from error
    path = checkpoint.path / GENERATION_FILE
    if not path.exists():
        return None
    try:
        return GenerationConfig.from_dict(read_json(path))
    except SlideSparseError:
        raise
    except Exception as error:  # wrong settings can raise anything in a library
        raise CheckpointError(f"{path} cannot be used", got=first_line(error), remedy="correct or remove it") from error
