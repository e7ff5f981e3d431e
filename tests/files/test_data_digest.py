"""The digest by which damage is noticed: by definition, of every type, and fast enough to be computed at each load."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slidesparse.files.data_digest import BLOCK, RunningDigest, data_digest
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import write_tensors


def by_definition(data: bytes) -> str:
    sums = [zlib.crc32(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]
    return hashlib.blake2b(b"".join(one.to_bytes(4, "little") for one in sums), digest_size=16).hexdigest()


@pytest.mark.parametrize("size", [0, BLOCK, 5 * BLOCK + 3])
def test_by_definition(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert data_digest(data) == by_definition(data.numpy().tobytes())


def test_it_is_of_the_bytes_alone() -> None:
    value = torch.randn(6, 4)
    assert data_digest(value) == data_digest(value.view(torch.int32)) == data_digest(value.flatten())
    assert data_digest(value.T) == data_digest(value.T.contiguous()) != data_digest(value)
    assert data_digest(value.to(torch.bfloat16)) == data_digest(value.to(torch.bfloat16).view(torch.int16))


def test_a_file_with_digests_is_an_ordinary_one(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "ä": torch.arange(7, dtype=torch.int8), "none": torch.empty(0, 4)}
    write_tensors(tmp_path / "x", tensors, {"about": "this"})
    reader = TensorReader(tmp_path / "x")
    assert reader.metadata["about"] == "this"
    for name, tensor in load_file(tmp_path / "x").items():
        assert torch.equal(tensor, tensors[name])
        assert torch.equal(reader.verified(name), tensors[name])


@pytest.mark.parametrize("sizes", [(), (0, BLOCK - 1, 2, BLOCK), (2 * BLOCK + 7, BLOCK - 7, 9)])
def test_a_digest_of_parts_is_that_of_the_whole(sizes: tuple[int, ...]) -> None:
    parts = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    running = RunningDigest()
    for part in parts:
        running.add(part)
    assert running.result() == data_digest(torch.cat([torch.empty(0, dtype=torch.uint8), *parts]))
