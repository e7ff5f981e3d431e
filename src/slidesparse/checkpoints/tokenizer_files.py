"""Find the tokenizer among the files copied with a checkpoint: without one it takes no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slidesparse.base.typed_json import MARKS, WITHOUT_MARK
from slidesparse.errors import CheckpointError, first_line
from slidesparse.files.source_files import SourceFiles
from slidesparse.files.tensor_reader import AGAIN, LFS_POINTER
from slidesparse.models.causal import vocabulary_of

BEGINNINGS = ("tokenizer", "vocab", "tekken")
ENDS = (".model", ".spm", ".tiktoken")
"""Ends of the names of a tokenizer's files, whichever library wrote them."""

NO_TOKENIZER = (
    "no tokenizer was there to copy, and without one the result takes no text: add that of the model to its folder"
)

READ_AS_JSON = ("tokenizer.json", "tokenizer_config.json")


def require_fetched(files: SourceFiles) -> None:
    """Raise a CheckpointError for a tokenizer that git-lfs has not fetched yet, or whose JSON was cut off."""
    for file in files.copied:
        if len(file.name.parts) > 1 or not _is_of_a_tokenizer(file.name.name):
            continue
        is_json, what = file.name.name in READ_AS_JSON, f"{file.name} holds no tokenizer"
        with open(file.path, "rb") as opened:
            content = opened.read(-1 if is_json else len(LFS_POINTER))
        if content.startswith(LFS_POINTER):
            raise CheckpointError(what, got="a pointer of git-lfs", remedy="fetch it with: git lfs pull")
        if content.startswith(MARKS):  # which Python's json reads, and tokenizers does not
            raise CheckpointError(what, got="a byte-order mark", remedy=WITHOUT_MARK)
        try:
            json.loads(content if is_json else "0")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(what, got=first_line(error), needed="JSON", remedy=AGAIN) from error


def lacks_tokenizer(files: SourceFiles, config: Any) -> bool:
    """Return whether a model has a vocabulary but no files of a tokenizer."""
    names = [*(file.name for file in files.copied), *map(Path, files.links)]
    has_one = any(len(path.parts) == 1 and _is_of_a_tokenizer(path.name) for path in names)
    return not has_one and vocabulary_of(config) > 0


def has_tokenizer_files(folder: Path) -> bool:
    """Return whether a readable folder has any file of a tokenizer."""
    return any(_is_of_a_tokenizer(file.name) for file in folder.iterdir())


def _is_of_a_tokenizer(name: str) -> bool:
    return name.startswith(BEGINNINGS) or name.endswith(ENDS)
