"""Checkpoints that hold more than a model, or a model under the names of what was around it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint, same_tensors, write_text
from safetensors.torch import load_file, save_file

from slidesparse.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from slidesparse.errors import CheckpointError, SlideSparseWarning
from slidesparse.offline.evaluate import evaluate
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import prune_checkpoint

INT8 = by_magnitude("6:8", "int8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrapped")
    make_checkpoint(folder / "m", num_hidden_layers=1)
    add_tokenizer(folder / "m")
    write_text(folder / "text.txt", words=100)
    prune_checkpoint(folder / "m", folder / "s", INT8)
    return folder / "m"


def renamed(source: Path, folder: Path, rename: Callable[[str], str]) -> Path:
    shutil.copytree(source, folder)
    tensors = {rename(name): tensor for name, tensor in load_file(folder / SINGLE_FILE).items()}
    save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})
    return folder


WRAPPED: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DDP": lambda name: f"module.{name}",
    "DDP around torch.compile": lambda name: f"module._orig_mod.{name}",
    "PEFT": lambda name: f"base_model.model.{name.replace('_proj.', '_proj.base_layer.')}",
    "FSDP": lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
    "a compiled layer": lambda name: name.replace("self_attn.", "self_attn._orig_mod."),
    "checkpointing": lambda name: f"module.{name.replace('layers.0.', 'layers.0._checkpoint_wrapped_module.')}",
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrappers_are_read_through(source: Path, tmp_path: Path, wrapper: str) -> None:
    folder = renamed(source, tmp_path / "m", WRAPPED[wrapper])
    with pytest.warns(SlideSparseWarning, match=r"read without those of wrappers, .* as model\."):
        prune_checkpoint(folder, tmp_path / "s", INT8)
    assert same_tensors(tmp_path / "s", source.parent / "s")


@pytest.mark.parametrize("wrapper", ["PEFT", "DDP around torch.compile", "FSDP"])
@pytest.mark.filterwarnings("ignore::slidesparse.errors.SlideSparseWarning")
def test_transformers_reads_the_same_through_wrappers(source: Path, tmp_path: Path, wrapper: str) -> None:
    folder = renamed(source, tmp_path / "m", WRAPPED[wrapper])
    found, wanted = (evaluate(one, text=source.parent / "text.txt").perplexity for one in (folder, source))
    assert found == wanted


@pytest.mark.filterwarnings("ignore::slidesparse.errors.SlideSparseWarning")
def test_shards_and_names_that_are_there_twice(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1, shard_size="60KB")
    plain = Checkpoint(tmp_path / "m")
    for shard in plain.shards:
        tensors = {f"module.{name}": tensor for name, tensor in load_file(tmp_path / "m" / shard).items()}
        save_file(tensors, tmp_path / "m" / shard, {"format": "pt"})
    index = json.loads((tmp_path / "m" / INDEX_FILE).read_text())
    index["weight_map"] = {f"module.{name}": file for name, file in index["weight_map"].items()}
    (tmp_path / "m" / INDEX_FILE).write_text(json.dumps(index))
    assert Checkpoint(tmp_path / "m").shards == plain.shards
    tensors = load_file(tmp_path / "m" / shard)
    name = next(iter(tensors))
    save_file({**tensors, f"{name.replace('.', '._orig_mod.', 1)}": tensors[name].clone()}, tmp_path / "m" / shard)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is in two shards or twice"):
        Checkpoint(tmp_path / "m")


def test_a_part_may_be_called_as_a_wrapper_is(source: Path, tmp_path: Path) -> None:
    folder = renamed(source, tmp_path / "m", lambda name: f"module.{name}" if "norm" in name else name)
    assert "module.model.norm.weight" in Checkpoint(folder).files


def test_another_prefix_is_named(source: Path, tmp_path: Path) -> None:
    folder = renamed(source, tmp_path / "m", lambda name: f"policy.{name}")
    with pytest.raises(CheckpointError, match=r"got no model\..*, and policy\.model\..*; save the model .* of policy$"):
        prune_checkpoint(folder, tmp_path / "s", INT8)


# -- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["none", "PEFT"])
@pytest.mark.parametrize("kind", ["lora_A", "lora_magnitude_vector", "ia3_l", "modules_to_save"])
@pytest.mark.filterwarnings("ignore::slidesparse.errors.SlideSparseWarning")
def test_tensors_of_an_adapter_stop_every_command(source: Path, tmp_path: Path, wrapper: str, kind: str) -> None:
    folder = renamed(source, tmp_path / "m", WRAPPED.get(wrapper, str))
    tensors = load_file(folder / SINGLE_FILE)
    name = f"model.layers.0.self_attn.q_proj.{kind}.default.weight"
    tensors[name if wrapper == "none" else f"base_model.model.{name}"] = torch.ones(4, 64)
    save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})
    for run in (
        lambda: prune_checkpoint(folder, tmp_path / "s", INT8),
        lambda: inspect_checkpoint(folder),
        lambda: evaluate(folder, text=source.parent / "text.txt"),
    ):
        with pytest.raises(CheckpointError, match=rf"an adapter that is not merged \(.*{kind}.*; merge it"):
            run()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_the_weights_stops(source: Path, tmp_path: Path, name: str) -> None:
    """With PEFT installed transformers adds it to the weights, and otherwise does not."""
    shutil.copytree(source, tmp_path / "m")
    (tmp_path / "m" / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"two sets of weights; got an adapter that is not merged \({name}\)"):
        Checkpoint(tmp_path / "m")


# -- two sets ------------------------------------------------------------------------------------------------------


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
