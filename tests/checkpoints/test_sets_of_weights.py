"""Folders with other weights, or weights under other names, than those of one model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import by_magnitude, make_checkpoint
from safetensors.torch import load_file, save_file

from slidesparse.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from slidesparse.errors import CheckpointError
from slidesparse.offline.prune import prune_checkpoint

INT8 = by_magnitude("6:8", "int8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    make_checkpoint(folder / "m", num_hidden_layers=1)
    return folder / "m"


def test_another_prefix_is_named(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "m")
    tensors = {f"policy.{name}": tensor for name, tensor in load_file(source / SINGLE_FILE).items()}
    save_file(tensors, tmp_path / "m" / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"got no model\..*, and policy\.model\..*; save the model .* of policy$"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", INT8)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_the_weights_stops(source: Path, tmp_path: Path, name: str) -> None:
    """With PEFT installed transformers adds it to the weights, and otherwise does not."""
    shutil.copytree(source, tmp_path / "m")
    (tmp_path / "m" / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"two sets of weights; got an adapter that is not merged \({name}\)"):
        Checkpoint(tmp_path / "m")


def test_two_sets_of_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    make_checkpoint(tmp_path / "shards", num_hidden_layers=1, shard_size="60KB")
    for file in (tmp_path / "shards").glob("model*"):
        shutil.copy(file, tmp_path / "m")
    says = rf"m holds two sets .* {SINGLE_FILE}, which transformers reads, and {INDEX_FILE}, which vLLM and SGLang read"
    with pytest.raises(CheckpointError, match=says):
        Checkpoint(tmp_path / "m")
    (tmp_path / "m" / INDEX_FILE).unlink()  # servers then read all files
    with pytest.raises(CheckpointError, match=r"and model-00001-of-.*, which vLLM"):
        Checkpoint(tmp_path / "m")
    for file in (tmp_path / "m").glob("model-*"):
        file.unlink()
    Checkpoint(tmp_path / "m")


@pytest.mark.parametrize("name", ["consolidated.safetensors", "pytorch_model.bin", "model.fp32.safetensors"])
def test_other_files_are_one_set_all_the_same(source: Path, tmp_path: Path, name: str) -> None:
    """transformers, vLLM and SGLang do not read them beside safetensors, or hold the same weights under other names."""
    shutil.copytree(source, tmp_path / "m")
    (tmp_path / "m" / name).write_text("other weights")
    assert prune_checkpoint(tmp_path / "m", tmp_path / "s", INT8).not_copied == [name]


def test_an_index_of_the_one_file(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "m")
    files = dict.fromkeys(Checkpoint(source).files, SINGLE_FILE)
    for more in ({}, {"absent": SINGLE_FILE}):
        (tmp_path / "m" / INDEX_FILE).write_text(json.dumps({"weight_map": {**files, **more}}))
        if more:
            with pytest.raises(CheckpointError, match="index names absent"):
                Checkpoint(tmp_path / "m")
        else:
            assert Checkpoint(tmp_path / "m").files == files
