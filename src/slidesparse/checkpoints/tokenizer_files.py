"""Find the tokenizer among the files copied with a checkpoint: without one it takes no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slidesparse.files.source_files import SourceFiles
from slidesparse.models.causal import vocabulary_of

BEGINNINGS = ("tokenizer", "vocab", "tekken")
ENDS = (".model", ".spm", ".tiktoken")
"""Ends of the names of a tokenizer's files, whichever library wrote them."""

NO_TOKENIZER = (
    "no tokenizer was there to copy, and without one the result takes no text: add that of the model to its folder"
)


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
