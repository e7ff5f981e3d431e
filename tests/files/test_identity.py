from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.identity import BLOCK, BLOCKS, fingerprint

BIG = 40 * BLOCK


def _folder(path: Path) -> Path:
    """A checkpoint of one large tensor and a small one."""
    path.mkdir()
    torch.manual_seed(0)
    tensors = {"big": torch.randint(-99, 99, (BIG,), dtype=torch.int8), "small": torch.randn(100)}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def _of(path: Path, config: object = None) -> str:
    return fingerprint(Checkpoint(path), config)


def _flip(path: Path, at: int) -> None:
    with open(path / "model.safetensors", "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(start + at)
        byte = file.read(1)
        file.seek(start + at)
        file.write(bytes([byte[0] ^ 1]))


def test_copies_are_the_same_and_so_are_other_times(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", shard_size="60KB")
    before = _of(tmp_path / "m", {"a": 1, "b": 2})
    shutil.copytree(tmp_path / "m", tmp_path / "copy", copy_function=shutil.copyfile)
    for file in (tmp_path / "copy").iterdir():
        os.utime(file, (1, 1))
    assert _of(tmp_path / "copy", {"b": 2, "a": 1}) == before
    assert _of(tmp_path / "copy", {"b": 2, "a": 3}) != before


# The library stores wide types first: the small tensor's 400 bytes, then the large one.
LAST = BIG - BLOCK


@pytest.mark.parametrize(
    "at",
    [0, 399, 400, 400 + BLOCK - 1, *(400 + i * LAST // (BLOCKS - 1) for i in range(BLOCKS)), 400 + BIG - 1],
)
def test_a_changed_byte_of_a_sample_is_noticed(tmp_path: Path, at: int) -> None:
    path = _folder(tmp_path / "m")
    before = _of(path)
    _flip(path, at)
    assert _of(path) != before
    _flip(path, at)
    assert _of(path) == before


def test_a_changed_byte_between_samples_is_not_as_the_page_says(tmp_path: Path) -> None:
    path = _folder(tmp_path / "m")
    before = _of(path)
    _flip(path, 400 + 2 * BLOCK)
    assert _of(path) == before


def test_headers_sizes_and_names_count(tmp_path: Path) -> None:
    path = _folder(tmp_path / "m")
    before = _of(path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "big": tensors["big"].view(-1, 2)}, path / "model.safetensors")
    assert _of(path) != before
    save_file(tensors, path / "model.safetensors", {"made": "again"})
    assert _of(path) != before
    save_file(tensors, path / "model.safetensors")
    assert _of(path) == before
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _of(path) != before


def test_little_is_read_of_large_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse.files import identity

    path, read = _folder(tmp_path / "m"), []
    samples = identity._samples
    monkeypatch.setattr(identity, "_samples", lambda *args: (read.append(len(s)) or s for s in samples(*args)))
    _of(path)
    assert read == [400, *[BLOCK] * BLOCKS]
