from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import by_magnitude, make_checkpoint
from safetensors.torch import load_file, save_file

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.cli import main
from slidesparse.errors import CheckpointError
from slidesparse.files.stored import STORED_NAMES, Stored
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.offline.prune import prune_checkpoint


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "b.int8": torch.randint(-128, 128, (3, 5), dtype=torch.int8),
        "a.fp8": torch.randn(7, 3).to(torch.float8_e4m3fn),
        "c.bf16": torch.randn(2, 3, 4, dtype=torch.bfloat16),
        "d.scale": torch.randn(4, 1),
        "e.empty": torch.empty(0, 4, dtype=torch.float16),
        "f.scalar": torch.tensor(3.5),
    }


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, Stored]:
    return {name: Stored(STORED_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}


def test_writer_makes_the_bytes_that_the_library_makes(tmp_path: Path) -> None:
    tensors = some_tensors()
    with TensorWriter(tmp_path / "ours", stored(tensors)) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_forgotten_tensor_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not written"), TensorWriter(tmp_path / "x", stored(some_tensors())) as w:
        pass
    assert list(tmp_path.iterdir()) == []
    assert w.file.closed
    with pytest.raises(ValueError, match="announced"), TensorWriter(tmp_path / "x", {"a": Stored("I8", (2, 3))}) as w:
        w.write("a", torch.zeros(3, 2, dtype=torch.int8))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_nothing_is_left_when_the_disk_is_full(tmp_path: Path) -> None:
    def write_to_a_full_disk() -> None:
        with TensorWriter(tmp_path / "x", {"a": Stored("I8", (8,))}) as writer:
            os.dup2(os.open("/dev/full", os.O_WRONLY), writer.file.fileno())
            writer.write("a", torch.zeros(8, dtype=torch.int8))
            raise RuntimeError("stop")  # the buffer is written when the file is closed

    with pytest.raises((OSError, RuntimeError)):
        write_to_a_full_disk()
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with TensorWriter(tmp_path / "x", {"a": Stored("I8", (8,))}) as writer:
        writer.write("a", torch.zeros(8, dtype=torch.int8))
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_sharded_checkpoint_is_read(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", shard_size="60KB")
    checkpoint = Checkpoint(tmp_path / "m")
    assert len(checkpoint.shards) > 2
    state = model.state_dict()
    assert checkpoint.files.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(checkpoint.tensor(name), tensor)


ADAPTER, GGUF = "adapter_config.json", "model-q4.gguf"


@pytest.mark.parametrize(
    ("removed", "added", "told"),
    [
        (["config.json"], ADAPTER, "m is no model; got an adapter .*"),
        (["model.safetensors"], ADAPTER, "m is no model; got an adapter"),
        (["config.json", "model.safetensors"], GGUF, "m cannot be read; got GGUF"),
        (["model.safetensors"], "notes.txt", r"m has no model\.safetensors .*; fetch the weights"),
        (["model.safetensors"], "model.fp16.safetensors", r"no model.* but model\.fp16\.safetensors; .* or rename"),
        (["config.json"], "notes.txt", r"config\.json is missing"),
        (["model.safetensors"], "pytorch_model.bin", r"convert the weights to safetensors.*save_pretrained\(\)"),
        ([], "config.json", "config.json cannot be read"),
        ([], "model.safetensors", "holds no weights"),
    ],
)
def test_what_people_take_for_a_checkpoint(tmp_path: Path, removed: list[str], added: str, told: str) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    for name in removed:
        (tmp_path / "m" / name).unlink()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "m" / added).write_text(pointer if added == "model.safetensors" else "{ not json")
    with pytest.raises(CheckpointError, match=told):
        Checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.safetensors", "no checkpoint folder at .*; got a file.*; give its folder"),
        ("q4.gguf", r"q4\.gguf cannot be read; got GGUF"),
        ("../nothing", "no checkpoint folder"),
    ],
)
def test_what_is_no_folder(tmp_path: Path, name: str, told: str) -> None:
    for file in ("model.safetensors", "q4.gguf"):
        (tmp_path / file).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=told):
        Checkpoint(tmp_path / name)


@pytest.mark.parametrize("content", ['{"max_length": ', "[]"])
def test_generation_settings_that_loading_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    (tmp_path / "m/generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert main(["inspect", str(tmp_path / "m")]) == 1
    assert "generation_config.json" in capsys.readouterr().out


def second(folder: Path) -> Path:
    return next(folder.glob("model-00002*"))


def index_naming(name: Callable[[str], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] = {tensor: name(shard) for tensor, shard in index["weight_map"].items()}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def put_twice(folder: Path) -> None:
    first = next(iter(load_file(next(folder.glob("model-00001*")))))
    save_file({**load_file(second(folder)), first: torch.zeros(1)}, second(folder))


def name_absent(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["not.there"] = index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: second(folder).unlink(), "model-00002.* is missing"),
        (lambda folder: os.truncate(second(folder), 1000), "model-00002.* is damaged or truncated"),
        (name_absent, r"index names not\.there"),
        (put_twice, "is in two shards"),
        *((index_naming(lambda shard, at=at: f"{at}{shard}"), "shard name") for at in ("../m/", "/tmp/", "sub/")),
        *((index_naming(lambda _, one=one: one), "shard name") for one in ("model.bin", ["a"])),
    ],
)
def test_damaged_shards(tmp_path: Path, damage: Callable[[Path], object], told: str) -> None:
    make_checkpoint(tmp_path / "m", shard_size="60KB")
    damage(tmp_path / "m")
    with pytest.raises(CheckpointError, match=told):
        Checkpoint(tmp_path / "m")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library calls it missing."""
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    (tmp_path / "m/model.safetensors").write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        Checkpoint(tmp_path / "m")


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 3 bytes from file: Cannot allocate memory (12)")

    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    checkpoint = Checkpoint(tmp_path / "m")
    monkeypatch.setattr(torch.UntypedStorage, "from_file", fail)
    with pytest.raises(CheckpointError, match="unable to mmap"):
        checkpoint.tensor("model.norm.weight")
