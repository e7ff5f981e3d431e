"""Write a safetensors file, one tensor at a time.

The safetensors library wants all tensors of a file in memory, and a shard may be larger than that. The format is eight
bytes of header length, a JSON header, the data. All shapes are known before, so the header goes first and the tensors
follow in any order.
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
from slidesparse.files.data_digest import DIGITS, RunningDigest, data_digest
from slidesparse.files.stored import DIGESTS, HEADER, ITEM_BYTES, STORED_NAMES, Stored, header_digest


class TensorWriter:
    """Writes one safetensors file, tensor by tensor, in any order.

    The file gets its name only when it is complete and on disk; until then it is ``NAME.<random>.tmp``, a new file and
    never a link to another. A link under the file's own name is replaced, not followed.

    Args:
        path: The file.
        tensors: Name -> type and shape of everything that will be written.
        metadata: Strings for the header's ``__metadata__``.
        with_digests: Write :attr:`digests` into the header, for :meth:`TensorReader.verified`.

    Attributes:
        digests: Tensor -> digest of its data, of those written so far.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Stored],
        metadata: Mapping[str, str] | None = None,
        *,
        with_digests: bool = False,
    ) -> None:
        self.path, self.missing, self.tensors = path, set(tensors), tensors
        self.metadata, self.with_digests = {"format": "pt", **(metadata or {})}, with_digests
        self.digests: dict[str, str] = {}
        # The library's own order: wide types first, so that every tensor is aligned to its type.
        order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
        self.offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name in order:
            begin, end = end, end + tensors[name].n_bytes
            self.offsets[name] = begin, end
        self.start = len(self._header())  # of the data
        self.temporary = path.with_name(f"{path.name}.{token_hex(8)}.tmp")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, which must have the type and shape announced."""
        stored = self.tensors[name]
        n_bytes = tensor.numel() * tensor.element_size()
        same_type = STORED_NAMES.get(tensor.dtype, stored.dtype) == stored.dtype
        if n_bytes != stored.n_bytes or tuple(tensor.shape) != stored.shape or not same_type:
            raise ValueError(f"{name} was announced as {stored}, not as {tensor.dtype} {tuple(tensor.shape)}")
        tensor = tensor.contiguous()
        self.file.seek(self.start + self.offsets[name][0])
        if n_bytes:
            self.file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        self.digests[name] = data_digest(tensor)
        self.missing.discard(name)

    def write_parts(self, name: str, parts: Iterable[torch.Tensor]) -> None:
        """Write one tensor, which comes in parts of its type: what it holds at each index of its first dimension."""
        stored, digest, count = self.tensors[name], RunningDigest(), 0
        self.file.seek(self.start + self.offsets[name][0])
        for part in parts:
            if tuple(part.shape) != stored.shape[1:] or STORED_NAMES.get(part.dtype) != stored.dtype:
                raise ValueError(f"{name} was announced as {stored}, and has a part {part.dtype} {tuple(part.shape)}")
            part = part.contiguous()
            self.file.write(part.view(-1).view(torch.uint8).numpy().data)
            digest.add(part)
            count += 1
        if count != stored.shape[0]:
            raise ValueError(f"{name} was announced with {stored.shape[0]} parts, and has {count}")
        self.digests[name] = digest.result()
        self.missing.discard(name)

    def _header(self) -> bytes:
        """Return the header, of one length whether the digests are known yet or not."""
        metadata = dict(self.metadata)
        if self.with_digests:
            digests = {name: self.digests.get(name, "0" * DIGITS) for name in self.offsets}
            metadata[DIGESTS] = json.dumps({HEADER: header_digest(metadata, self.tensors), **digests})
        header: dict[str, Any] = {HEADER: metadata}
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
        self.file.write(self._header())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.temporary.rename(self.path)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors that are in memory into a file, with their digests."""
    stored = {name: Stored(STORED_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorWriter(path, stored, metadata, with_digests=True) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor.cpu())
