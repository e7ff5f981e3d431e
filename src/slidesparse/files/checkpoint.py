"""Safetensors checkpoints on disk: read one tensor at a time, write one tensor at a time.

Reading goes through the safetensors library, with a file opened for each tensor so that its pages can be dropped again.
Writing does not: the library wants all tensors of a file in memory, and a shard may be larger than that. The format is
eight bytes of header length, a JSON header, the data; since all shapes are known before, the header goes first and the
tensors follow in any order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slidesparse.base.paths import usable_path
from slidesparse.base.typed_json import decode, load_json, parse_json
from slidesparse.base.whole_file import NEW_FILE, kind_of, replace_file, require_no_holes, require_regular
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.data_digest import DIGITS, RunningDigest, data_digest, text_digest
from slidesparse.files.early_flush import EarlyFlush

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

TEXTS = (".json", ".jinja", ".jsonl", ".model", ".tiktoken", ".txt")
"""Ends of the names of files that libraries read whole."""

DIGESTS = "slidesparse_digests"
"""Key of a header's ``__metadata__``: JSON with the digest of every tensor's data, and of the header itself."""

HEADER = "__metadata__"
"""The name of the header among the digests, which no tensor can have."""

LFS_POINTER = b"version https://git-lfs"
"""First bytes of a file that git has in the place of a large one."""

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
STORED_NAMES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}


@dataclass(frozen=True)
class Stored:
    """Type (safetensors' name) and shape of a tensor on disk."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the data."""
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError("type of a stored tensor", got=self.dtype, needed=f"one of {', '.join(ITEM_BYTES)}")
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Checkpoint:
    """A Hugging Face checkpoint in a local folder.

    Attributes:
        path: The folder.
        config: config.json.
        shards: File name -> tensor name -> type and shape, in file order.
        files: Tensor name -> file name.

    Raises:
        CheckpointError: The folder, config.json, the index or a shard is missing, damaged or inconsistent.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = usable_path(path, "checkpoint folder")
        try:
            is_folder = self.path.is_dir()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read", got=error.strerror) from error
        if not is_folder:
            raise CheckpointError(
                f"no checkpoint folder at {self.path}",
                needed="a local folder",
            )
        _refuse_endless_files(self.path)
        self.config = read_json(self.path / "config.json")
        index_path = self.path / INDEX_FILE
        promised: dict[str, str] = {}
        if (self.path / SINGLE_FILE).exists():
            names = [SINGLE_FILE]
        elif index_path.exists():
            promised = read_json(index_path).get("weight_map") or {}
            if not isinstance(promised, dict) or not promised:
                raise CheckpointError(f"{index_path} has no weight_map")
            for name in promised.values():  # shards are written under these names: no other folder
                if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                    raise CheckpointError(f"shard name in {index_path}", got=repr(name), needed="NAME.safetensors")
            names = sorted(set(promised.values()))
        else:
            raise CheckpointError(
                f"{self.path} has no {SINGLE_FILE} and no {INDEX_FILE}",
                remedy="convert the weights to safetensors first",
            )
        self.readers = {name: TensorReader(self.path / name) for name in names}
        self.shards = {name: reader.stored for name, reader in self.readers.items()}
        self.files: dict[str, str] = {}
        for name, tensors in self.shards.items():
            for tensor in tensors:
                if tensor in self.files:
                    raise CheckpointError(f"{tensor} is in two shards", got=f"{self.files[tensor]} and {name}")
                self.files[tensor] = name
        for tensor, name in promised.items():
            if tensor not in self.shards[name]:
                raise CheckpointError(f"the index names {tensor} in {name}, which does not hold it")

    def stored(self, name: str) -> Stored:
        """Return the type and shape of a tensor."""
        return self.shards[self._file(name)][name]

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor."""
        return self.readers[self._file(name)].tensor(name, device)

    def part(self, name: str, index: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one part of a tensor: what it holds at an index of its first dimension."""
        return self.readers[self._file(name)].part(name, index, device)

    def _file(self, name: str) -> str:
        if name not in self.files:
            raise CheckpointError(f"{self.path} holds no {name}")
        return self.files[name]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.n_bytes for shard in self.shards.values() for stored in shard.values())


def _refuse_endless_files(folder: Path) -> None:
    """Refuse a folder with pipes, devices, or texts that promise far more than they hold.

    A library that looks for a tokenizer would wait for a pipe, and read the others until memory ends.

    Raises:
        CheckpointError: There is one, or the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not os.path.exists(entry.path):
                    continue  # a link that leads nowhere
                status = entry.stat()
                if (kind := kind_of(status.st_mode)) in ("a pipe", "a device"):
                    raise CheckpointError(f"{entry.path} cannot be read", got=kind, needed="a file")
                if kind == "a file" and entry.name.endswith(TEXTS):
                    require_no_holes(Path(entry.path))
    except InputError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read", got=error.strerror) from error


class TensorReader:
    """Reads one safetensors file, tensor by tensor.

    Attributes:
        path: The file.
        stored: Tensor name -> type and shape.
        metadata: The header's strings.
        digests: Tensor -> digest of its data, of a file that was written with digests; else empty.

    Raises:
        CheckpointError: The file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            require_regular(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except InputError as error:
            raise CheckpointError(str(error)) from error
        self.path = path
        with _opened(path) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            self.stored = {name: Stored(s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
            self.metadata: dict[str, str] = file.metadata() or {}
        try:
            digests = parse_json(self.metadata.get(DIGESTS, "{}"), DIGESTS)
            self.digests: dict[str, str] = decode(dict[str, str], digests, DIGESTS)
        except InputError as error:
            raise CheckpointError(f"{path} is damaged", got=error) from error
        if self.digests and self.digests.get(HEADER) != _header_digest(self.metadata, self.stored):
            raise CheckpointError(
                f"{path} is damaged",
                got="another header than was written",
                remedy="remove it, and run again what wrote it",
            )

    def tensor(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor; on a CPU it is mapped, not copied."""
        with _opened(self.path, device) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def part(self, name: str, index: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read what a tensor holds at an index of its first dimension, and nothing else of it."""
        with _opened(self.path, device) as file:
            tensor: torch.Tensor = file.get_slice(name)[index]
            return tensor

    def verified(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """Read one tensor of a file that was written with digests, and compare its data with its digest.

        Raises:
            CheckpointError: The data are others than those that were written, or their digest is missing.
        """
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


class _opened:
    """``safe_open`` with damage reported as a CheckpointError that names the file."""

    def __init__(self, path: Path, device: str | torch.device = "cpu") -> None:
        self.path, self.device = path, str(device)

    def __enter__(self) -> Any:
        try:
            self.file = safe_open(self.path, framework="pt", device=self.device)
            return self.file.__enter__()
        except (SafetensorError, OSError, MemoryError) as error:  # of a file with large holes
            raise _why_unreadable(self.path, error) from error

    def __exit__(self, *exception: Any) -> None:
        self.file.__exit__(*exception)


def _why_unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return an error for a file that the library cannot read, which takes one reason for another."""
    if not os.access(path, os.R_OK):
        return CheckpointError(f"{path} cannot be read", got="no permission")
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return CheckpointError(
                f"{path} holds no weights", got="a pointer of git-lfs", remedy="fetch them with: git lfs pull"
            )
    return CheckpointError(f"{path} is damaged or truncated", got=str(error))


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
        self.early.wrote(n_bytes)
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
            self.early.wrote(part.nbytes)
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
            metadata[DIGESTS] = json.dumps({HEADER: _header_digest(metadata, self.tensors), **digests})
        header: dict[str, Any] = {HEADER: metadata}
        for name, offsets in self.offsets.items():
            stored = self.tensors[name]
            header[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": list(offsets)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def __enter__(self) -> TensorWriter:
        self.file = os.fdopen(os.open(self.temporary, NEW_FILE, 0o666), "wb")
        self.early = EarlyFlush(self.file.fileno())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.early.close()
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


def _header_digest(metadata: Mapping[str, str], tensors: Mapping[str, Stored]) -> str:
    """Return the digest of what a header says besides digests; the library checks the places of the tensors."""
    said = sorted((key, value) for key, value in metadata.items() if key != DIGESTS)
    layout = sorted((name, stored.dtype, list(stored.shape)) for name, stored in tensors.items())
    return text_digest(json.dumps([said, layout]))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing or holds anything else.
    """
    try:
        value = load_json(path, non_finite=True)  # configs of Mamba models hold Infinity
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except InputError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}", got=type(value).__name__, needed="a JSON object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object as :func:`slidesparse.base.whole_file.replace_file` does, and wait until it is on disk."""
    replace_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
