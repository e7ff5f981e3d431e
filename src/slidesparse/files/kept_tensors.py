"""Find tensors once for a run that may be killed: a file keeps them, and a run that goes on reads them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import TensorWriter


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
        found = find()
        stored = {name: Stored(STORED_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in found.items()}
        with TensorWriter(path, stored, {}, with_digests=True) as writer:
            for name, tensor in found.items():
                writer.write(name, tensor.cpu())
    reader = TensorReader(path)
    return {name: reader.verified(name) for name in reader.stored}
