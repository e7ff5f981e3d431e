"""Write a safetensors file, one tensor at a time.

The safetensors library needs all tensors of a file in memory, and a shard may be larger than that. The format is eight
bytes of header length, a JSON header, the data. All shapes are known in advance, so tensors can follow in any order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any

import torch

from slidesparse.base.whole_file import NEW_FILE
from slidesparse.files.data_digest import RunningDigest, data_digest
from slidesparse.files.stored import DIGESTS, ITEM_BYTES, STORED_NAMES, Stored


class TensorWriter:
    """Writes one safetensors file, tensor by tensor, in any order.

    The file gets its name only when it is complete and on disk; until then it is ``NAME.<random>.tmp``, a new file and
    never a link to another. A link under the file's own name is replaced, not followed.

    Args:
        path: The file.
        tensors: Name -> type and shape of every tensor of the file.
        metadata: Strings for the header's ``__metadata__``.

    Attributes:
        digests: Written tensor -> digest of its data.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None) -> None:
        self.path, self.missing, self.tensors = path, set(tensors), tensors
        self.metadata = {"format": "pt", **(metadata or {})}
        self.digests: dict[str, str] = {}
        # The library's own order: wide types first, so that every tensor is aligned to its type.
        order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
        self.offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name in order:
            begin, end = end, end + tensors[name].n_bytes
            self.offsets[name] = begin, end
        self.header = self._header()
        self.temporary = path.with_name(f"{path.name}.{token_hex(8)}.tmp")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor of the announced type and shape."""
        stored = self.tensors[name]
        n_bytes = tensor.numel() * tensor.element_size()
        same_type = STORED_NAMES.get(tensor.dtype, stored.dtype) == stored.dtype
        if n_bytes != stored.n_bytes or tuple(tensor.shape) != stored.shape or not same_type:
            raise ValueError(f"{name} was announced as {stored}, not as {tensor.dtype} {tuple(tensor.shape)}")
        tensor = tensor.contiguous()
        self.file.seek(len(self.header) + self.offsets[name][0])
        if n_bytes:
            self.file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        self.digests[name] = data_digest(tensor)
        self.missing.discard(name)

    def write_parts(self, name: str, parts: Iterable[torch.Tensor]) -> None:
        """Write one tensor from its parts, one for each index of its first dimension."""
        digest, (begin, end) = RunningDigest(), (len(self.header) + at for at in self.offsets[name])
        self.file.seek(begin)
        for part in parts:
            part = part.contiguous()
            self.file.write(part.view(-1).view(torch.uint8).numpy().data)
            digest.add(part)
        if self.file.tell() != end:
            raise ValueError(f"{name} was announced as {self.tensors[name]}, and has other parts")
        self.digests[name] = digest.result()
        self.missing.discard(name)

    def _header(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": self.metadata}
        for name, offsets in self.offsets.items():
            stored = self.tensors[name]
            header[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": list(offsets)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def __enter__(self) -> TensorWriter:
        self.file = os.fdopen(os.open(self.temporary, NEW_FILE, 0o666), "wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            try:
                self.file.close()  # writes what is left, which may fail
            finally:
                self.temporary.unlink(missing_ok=True)  # gone already when it has its name

    def _finish(self) -> None:
        if self.missing:
            raise ValueError(f"not written to {self.path}: {sorted(self.missing)}")
        self.file.seek(0)
        self.file.write(self.header)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.temporary.rename(self.path)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors that are in memory into a file, with digests for :meth:`TensorReader.verified`."""
    stored = {name: Stored(STORED_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    digests = json.dumps({name: data_digest(tensor.cpu()) for name, tensor in tensors.items()})
    with TensorWriter(path, stored, {**(metadata or {}), DIGESTS: digests}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor.cpu())
