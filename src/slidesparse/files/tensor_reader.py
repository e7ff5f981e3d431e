"""Read a safetensors file, one tensor at a time.

The file is opened for each tensor, so that its pages can be dropped again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slidesparse.base.typed_json import decode, parse_json
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.data_digest import data_digest
from slidesparse.files.stored import DIGESTS, Stored

LFS_POINTER = b"version https://git-lfs"
"""First bytes of git-lfs's placeholder for a large file."""

AGAIN = "fetch it or make it again"


class TensorReader:
    """Reads one safetensors file, tensor by tensor.

    Attributes:
        path: The file.
        stored: Tensor name -> type and shape.
        metadata: The header's strings.
        digests: Tensor -> digest of its data; empty for a file without digests.

    Raises:
        CheckpointError: The file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        if not os.path.isfile(path):
            raise CheckpointError(f"{path} is missing", remedy=AGAIN)
        self.path = path
        with _opened(path) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            self.stored = {name: Stored(s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
            self.metadata: dict[str, str] = file.metadata() or {}
        try:
            digests = parse_json(self.metadata.get(DIGESTS, "{}"), DIGESTS)
            self.digests: dict[str, str] = decode(dict[str, str], digests, DIGESTS)
        except InputError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor; on a CPU it is mapped, not copied."""
        with _opened(self.path, device) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def part(self, name: str, index: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read only one index of a tensor's first dimension."""
        with _opened(self.path, device) as file:
            tensor: torch.Tensor = file.get_slice(name)[index]
            return tensor

    def verified(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor of a file with digests; a CheckpointError where its data differ from those written."""
        tensor = self.tensor(name)
        if self.digests.get(name) != data_digest(tensor):
            raise CheckpointError(
                f"{self.path} is damaged",
                got=f"other data of {name} than were written",
                remedy="remove it, and run again what wrote it",
            )
        return tensor.to(device)

    def digest(self, name: str) -> str:
        """Return the digest of the data of one tensor."""
        return data_digest(self.tensor(name))


@contextmanager
def _opened(path: Path, device: str | torch.device = "cpu") -> Iterator[Any]:
    """Open a file; the library's errors in the block become a CheckpointError that names the file."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:  # torch's, of one that cannot be mapped
        raise _why_unreadable(path, error) from error


def _why_unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for an unreadable file, with the actual reason, which the library may confuse."""
    if not os.access(path, os.R_OK):
        return CheckpointError(f"{path} cannot be read", got="no permission")
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return CheckpointError(
                f"{path} holds no weights", got="a pointer of git-lfs", remedy="fetch them with: git lfs pull"
            )
    return CheckpointError(f"{path} is damaged or truncated", got=str(error), remedy=AGAIN)
