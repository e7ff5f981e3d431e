"""Find tensors once for a run that may be killed: a file keeps them, and a run that goes on reads them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import write_tensors


def kept_tensors(path: Path, find: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors that a file holds; where there is none yet, what ``find`` returns is written to it first.

    Args:
        path: The file, whose folder is made.
        find: Returns tensors by name, of types of :data:`~slidesparse.files.stored.STORED_NAMES`.

    Raises:
        CheckpointError: The file holds something else than was written.
    """
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        write_tensors(path, find())
    reader = TensorReader(path)
    return {name: reader.verified(name) for name in reader.stored}
