from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.identity import BLOCK, BLOCKS, fingerprint

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


# The library stores wide types first: the small tensor's 400 bytes, then the large one.
LAST = BIG - BLOCK


def test_a_changed_byte_of_a_sample_is_noticed(tmp_path: Path) -> None:
    path = _folder(tmp_path / "m")
    before = _of(path)
    for at in (0, 399, 400, 400 + BLOCK - 1, *(400 + i * LAST // (BLOCKS - 1) for i in range(BLOCKS)), 400 + BIG - 1):
        _flip(path, at)
        assert _of(path) != before
        _flip(path, at)
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
