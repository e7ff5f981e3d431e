"""Fingerprint of a checkpoint's weights, wherever the folder is now.

Names and times of a folder do not identify weights: a copy, a download or a container layer has other times and the
same weights. Reading all weights would take 5 to 60 seconds for 15 GB at every start. So every tensor is sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from slidesparse.base.typed_json import parse_json
from slidesparse.checkpoints.checkpoint import Checkpoint

SCHEME = "sampled-1"
"""Version of the sampling, first word of a fingerprint, so that a mismatch can be explained."""

BLOCK = 16 * 1024
"""Bytes of a sample. Four of each of the 339 tensors of a 7B model are 20 MB."""
BLOCKS = 4


def fingerprint(checkpoint: Checkpoint, config: Any) -> str:
    """Return a text that identifies the weights of a checkpoint, independent of path and time.

    The digest covers the name, the size and the header (names, types, shapes and offsets of the tensors) of every
    weight file, and samples of each tensor: all of it up to 64 KiB (norms, biases, most scales), else four blocks of
    16 KiB: the first, the last and two at a third and two thirds. So a tensor that was computed again, from other data
    or by another method, is noticed. **Not noticed** is a change within one tensor outside all four blocks, such as a
    few weights edited by hand, or a bit that a disk lost.

    Returns:
        ``sampled-1:`` and the hexadecimal BLAKE2b digest, 32 bytes.
    """
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=32)
    for name in sorted(checkpoint.shards):
        path = checkpoint.path / name
        with open(path, "rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(json.dumps([name, path.stat().st_size, len(header)]).encode() + header)
            for sample in _samples(file, parse_json(header, f"header of {path}"), 8 + len(header)):
                digest.update(sample)
    return f"{SCHEME}:{digest.hexdigest()}"


def _samples(file: BinaryIO, header: dict[str, Any], start: int) -> Iterator[bytes]:
    """Read the samples of all tensors, in the order of the file."""
    places = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    for begin, end in places:
        last = end - begin - BLOCK
        whole = last <= (BLOCKS - 1) * BLOCK
        offsets = [0] if whole else [i * last // (BLOCKS - 1) for i in range(BLOCKS)]
        for offset in offsets:
            file.seek(start + begin + offset)
            yield file.read(end - begin if whole else BLOCK)
