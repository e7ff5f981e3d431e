"""``slidesparse pack``: write the canonical packed form into the folder of the weights that it was made from.

Packing at load takes seconds; where even that is too long, or many processes load one model, the packed form is written
once into the checkpoint's folder as one safetensors file and mapped into memory by :func:`slidesparse.load`. For a
layer ``X`` it holds these fields of :class:`slidesparse.weights.packed.Segment`:

- ``X.values`` [out, n * keep], in the weight's type, and ``X.code`` [out, n], U8 or I16: the slid segment;
- ``X.dense`` [out, m * group] and ``X.groups`` I32 [n], the slid groups: only where some groups stay dense.

It has no safetensors suffix, since other programs load every such file of a folder. The header names the version of
this layout and a fingerprint of the weights (:mod:`slidesparse.files.identity`), which holds wherever the folder is
copied to: a file of another version, or of weights that have changed since, is an error, never a silent detour. It has
the digest of every tensor too (:mod:`slidesparse.files.data_digest`), with which data are compared when they are read.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from slidesparse.base.progress import progress_bar
from slidesparse.errors import CheckpointError
from slidesparse.files.check_packed import KINDS, check_packed_layer
from slidesparse.files.check_tensors import check_values, refuse_faults
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.identity import SCHEME, fingerprint
from slidesparse.files.marker import Marker
from slidesparse.files.meta_model import build_meta_model
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.files.write_errors import locked, require_space, write_errors
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.weights.packed import PackedWeight, Segment
from slidesparse.weights.packing import pack
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import check_pattern

FILE_NAME = "slidesparse.weights.packed"
PACKED_VERSION = "2"


def write_packed(path: str | Path, *, progress: bool | None = None) -> Path:
    """Pack every treated layer of a pruned checkpoint into ``slidesparse.weights.packed`` in its folder.

    Args:
        path: A folder that ``slidesparse prune`` wrote.
        progress: Show a progress bar; None: on a terminal only.

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
        _remove_leftovers(checkpoint.path)
        with write_errors(file, f"free some space and run again: slidesparse pack {path}"):
            _write(checkpoint, marker, file, progress)
    return file


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed runs; the folder must be locked."""
    for leftover in folder.glob(f"{FILE_NAME}*.tmp"):
        if leftover.is_symlink() or not leftover.is_dir():
            leftover.unlink(missing_ok=True)


def _write(checkpoint: Checkpoint, marker: Marker, file: Path, progress: bool | None) -> None:
    meta = build_meta_model(checkpoint)
    linears = meta.linears(marker)
    refuse_faults(meta, checkpoint)
    check_values(meta, checkpoint, linears)
    prefixes = {name: meta.prefix(name) for name in linears}
    groups: dict[str, torch.Tensor] = {}
    layouts: dict[str, Stored] = {}
    for name, prefix in prefixes.items():  # shapes first: a partial pattern's depend on the zeros
        weight = checkpoint.tensor(f"{prefix}.weight")
        groups[name] = check_pattern(weight, marker.pattern_of(name), name=name)
        no_rows = pack(weight[:0], marker.pattern_of(name), groups=groups[name])
        layouts |= {part: _stored(tensor, len(weight)) for part, tensor in _parts(name, no_rows).items()}
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
            packed = pack(weight, marker.pattern_of(name), groups=groups[name], name=name)
            for part, tensor in _parts(name, packed).items():
                writer.write(part, tensor)
            advance(1)


class PackedFile:
    """Reads packed weights from a checkpoint's packed file.

    Raises:
        CheckpointError: The file is damaged, of another version, or was made from other weights.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        path, again = checkpoint.path / FILE_NAME, f"remove the file and run: slidesparse pack {checkpoint.path}"
        try:
            self.reader = TensorReader(path)
        except CheckpointError as error:
            raise CheckpointError.of(error, again) from error
        found = self.reader.metadata.get("slidesparse_packed_version")
        if found != PACKED_VERSION:
            raise CheckpointError(
                f"version of {path}", got=found, needed=PACKED_VERSION, remedy="remove the file and pack again"
            )
        packed_from = self.reader.metadata.get("fingerprint", "")
        if not packed_from.startswith(f"{SCHEME}:"):
            raise CheckpointError(
                f"{path} says in another way which weights it is of",
                got="a file of another version of slidesparse",
                remedy=again,
            )
        if packed_from != fingerprint(checkpoint, checkpoint.config.get(MARKER_KEY)):
            raise CheckpointError(f"{path} is not of these weight files", remedy=again)

    def verify(self) -> None:
        """Read all data.

        Raises:
            CheckpointError: Other data than were written.
        """
        for name in self.reader.stored:
            self.reader.verified(name, "cpu")

    def read(
        self,
        name: str,
        pattern: Pattern,
        weight: Stored,
        scale: torch.Tensor | None,
        device: str | torch.device,
    ) -> PackedWeight:
        """Read the packed weight of layer ``name``; the checkpoint has it as ``weight`` [out, in].

        Raises:
            CheckpointError: The file holds no such layer, or other tensors of it than the pattern needs, or other data
                than were written.
        """
        found = {kind: self.reader.stored[f"{name}.{kind}"] for kind in KINDS if f"{name}.{kind}" in self.reader.stored}
        if not found:
            raise CheckpointError(f"{self.reader.path} holds no {name}")
        shape = weight.shape[0], weight.shape[1]

        def part(kind: str) -> torch.Tensor | None:
            return self.reader.verified(f"{name}.{kind}", device) if f"{name}.{kind}" in self.reader.stored else None

        values, code, dense, groups = part("values"), part("code"), part("dense"), part("groups")
        check_packed_layer(found, groups, pattern, weight, name)
        everything = torch.arange(pattern.groups(shape[1]), device=device)
        slid = groups.long() if groups is not None else everything if values is not None else everything[:0]
        segments = []
        if dense is not None:
            segments.append(Segment("dense", everything[~torch.isin(everything, slid)], dense))
        if values is not None:
            segments.append(Segment("2:4", slid, values, code))
        scale = None if scale is None else scale.flatten().to(torch.float32)
        return PackedWeight(pattern, shape, 0, tuple(segments), scale)


def _parts(name: str, packed: PackedWeight) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor] = {}
    for segment in packed.segments:
        if segment.code is None:
            parts[f"{name}.dense"] = segment.values
            continue
        parts[f"{name}.values"], parts[f"{name}.code"] = segment.values, segment.code
    if len(packed.segments) == 2:
        parts[f"{name}.groups"] = packed.segments[1].groups.to(torch.int32)
    return parts


def _stored(tensor: torch.Tensor, rows: int) -> Stored:
    """Return the type and shape of a part that has ``rows`` rows, from the part of a weight without rows."""
    shape = (rows, *tensor.shape[1:]) if tensor.dim() == 2 else tuple(tensor.shape)
    return Stored(STORED_NAMES[tensor.dtype], shape)
