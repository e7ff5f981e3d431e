"""``slidesparse pack``: write the canonical packed form into the folder of the weights that it was made from.

Packing at load takes seconds; where even that is too long, or many processes load one model, the packed form is written
once into the checkpoint's folder as one safetensors file and mapped into memory by :func:`slidesparse.load`. For a
layer ``X`` it holds these fields of :class:`slidesparse.weights.packed.PackedWeight`:

- ``X.values`` [out, n * keep], in the weight's type, and ``X.code`` [out, n], U8 or I16;
- ``X.dense`` [out, n * 4] alone, where the layer is dense.

It has no safetensors suffix, since other programs load every such file of a folder. The header names the version of
this layout and a fingerprint of the weights (:mod:`slidesparse.checkpoints.identity`), which holds wherever the
folder is copied to: a file of another version, or of weights that have changed since, is an error, never a silent
detour. It has the digest of every tensor too (:mod:`slidesparse.files.data_digest`), which reads are compared with.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from slidesparse.base.progress import progress_bar
from slidesparse.checkpoints.check_tensors import not_finite, refuse_faults
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.identity import SCHEME, fingerprint
from slidesparse.checkpoints.marker import Marker
from slidesparse.checkpoints.meta_model import build_meta_model
from slidesparse.errors import CheckpointError
from slidesparse.files.source_files import PACKED_FILE as FILE_NAME
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.files.write_errors import locked, require_space, write_errors
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import pack
from slidesparse.weights.pattern import DENSE, Pattern

PACKED_VERSION = "2"


def write_packed(path: str | Path, *, progress: bool | None = None) -> Path:
    """Pack every treated layer of a pruned checkpoint into ``slidesparse.packed`` in its folder.

    Returns:
        The file.

    Raises:
        CheckpointError: The folder is no such checkpoint, holds a packed form already, another run is packing it, or
            there is no space for it. Nothing is left of a file that could not be written.
        PatternViolation: A weight does not satisfy its mark.
    """
    checkpoint = Checkpoint(path)
    marker = Marker.require(checkpoint.config, path)
    file = checkpoint.path / FILE_NAME
    with locked(checkpoint.path, "packing"):
        if os.path.lexists(file) and not file.is_symlink():  # a link gives way to a file
            raise CheckpointError(f"{file} exists", remedy="remove it to pack again")
        for leftover in checkpoint.path.glob(f"{FILE_NAME}*.tmp"):  # of killed runs
            if leftover.is_symlink() or not leftover.is_dir():
                leftover.unlink(missing_ok=True)
        with write_errors(file, f"free some space and run again: slidesparse pack {path}"):
            _write(checkpoint, marker, file, progress)
    return file


def _write(checkpoint: Checkpoint, marker: Marker, file: Path, progress: bool | None) -> None:
    meta = build_meta_model(checkpoint)
    linears = meta.linears(marker)
    refuse_faults(meta, checkpoint)
    for bad in not_finite(meta, checkpoint, linears):
        raise CheckpointError(f"{bad} holds NaN or Inf", needed="finite numbers")
    prefixes = {name: meta.prefix(name) for name in linears}
    layouts: dict[str, Stored] = {}
    for name, prefix in prefixes.items():
        layouts |= _layout(name, checkpoint.stored(f"{prefix}.weight"), marker.pattern_of(name))
    require_space(file, sum(stored.n_bytes for stored in layouts.values()))
    metadata = {
        "slidesparse_packed_version": PACKED_VERSION,
        "fingerprint": fingerprint(checkpoint, checkpoint.config[MARKER_KEY]),
    }
    with (
        TensorWriter(file, layouts, metadata, with_digests=True) as writer,
        progress_bar("pack", len(prefixes), unit="layers", show=progress) as advance,
    ):
        for name, prefix in prefixes.items():
            weight = checkpoint.tensor(f"{prefix}.weight")
            packed = pack(weight, marker.pattern_of(name), name=name)
            for part, tensor in _parts(name, packed).items():
                writer.write(part, tensor)
            advance(1)


class PackedFile:
    """Reads packed weights from a file; a CheckpointError where it is damaged, of another version or other weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        path, again = checkpoint.path / FILE_NAME, f"remove the file and run: slidesparse pack {checkpoint.path}"
        try:
            self.reader = TensorReader(path)
        except CheckpointError as error:
            raise CheckpointError.of(error, again) from error
        found, packed_from = (
            self.reader.metadata.get(key, "") for key in ("slidesparse_packed_version", "fingerprint")
        )
        if found != PACKED_VERSION or not packed_from.startswith(f"{SCHEME}:"):
            raise CheckpointError(f"{path} is of another version of slidesparse", got=found or None, remedy=again)
        if packed_from != fingerprint(checkpoint, checkpoint.config.get(MARKER_KEY)):
            raise CheckpointError(f"{path} is not of these weight files", remedy=again)

    def verify(self) -> None:
        """Read all data, and raise a CheckpointError where they are other ones than were written."""
        for name in self.reader.stored:
            self.reader.verified(name, "cpu")

    def read(
        self, name: str, pattern: Pattern, weight: Stored, scale: torch.Tensor | None, device: str | torch.device
    ) -> PackedWeight:
        """Read the packed weight of layer ``name``; the checkpoint has it as ``weight`` [out, in].

        Raises:
            CheckpointError: The file holds no such layer, or other tensors of it than the pattern needs, or other data
                than were written.
        """
        shape, stored = (weight.shape[0], weight.shape[1]), self.reader.stored
        found = {part: one for part, one in stored.items() if part.rpartition(".")[0] == name}
        if not found:
            raise CheckpointError(f"{self.reader.path} holds no {name}")
        _check(found, name, weight, pattern)
        values, *code = (self.reader.verified(f"{name}.{kind}", device) for kind in _kinds(pattern))
        scale = None if scale is None else scale.flatten().to(torch.float32)
        return PackedWeight(pattern, shape, 0, values, code[0] if code else None, scale)


def _check(found: dict[str, Stored], name: str, weight: Stored, pattern: Pattern) -> None:
    """Refuse parts that are not those of a layer: kernels read them by address, and past the end of one too short."""
    needed = _layout(name, weight, pattern)
    for part in (*needed, *found):
        if found.get(part) != needed.get(part):
            raise CheckpointError(
                f"packed {part}",
                got=_text(found.get(part)),
                needed=_text(needed.get(part)),
                remedy="remove the packed file and pack again",
            )


def _kinds(pattern: Pattern) -> tuple[str, ...]:
    """Return how the parts of a layer are called."""
    return ("dense",) if pattern == DENSE else ("values", "code")


def _parts(name: str, packed: PackedWeight) -> dict[str, torch.Tensor]:
    tensors = [packed.values] if packed.code is None else [packed.values, packed.code]
    return {f"{name}.{kind}": one for kind, one in zip(_kinds(packed.pattern), tensors, strict=True)}


def _layout(name: str, weight: Stored, pattern: Pattern) -> dict[str, Stored]:
    """Return the type and shape of every part of a layer, from a weight without rows."""
    dtype = next(dtype for dtype, stored in STORED_NAMES.items() if stored == weight.dtype)
    no_rows = pack(torch.empty(0, weight.shape[1], dtype=dtype), pattern, name=name)
    return {
        part: Stored(STORED_NAMES[one.dtype], (weight.shape[0], *one.shape[1:]))
        for part, one in _parts(name, no_rows).items()
    }


def _text(stored: Stored | None) -> str:
    return "none" if stored is None else f"{stored.dtype} {list(stored.shape)}"
