"""Configs that describe models without end: refused before they are built, whatever key says so."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_tokenizer, make_checkpoint
from safetensors.torch import load_file, save_file

import slidesparse
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.meta_model import build_meta_model
from slidesparse.errors import CheckpointError, SlideSparseError
from slidesparse.offline.calibrate.calibration import encode, load_tokenizer
from slidesparse.offline.prune import PruneOptions, prune_checkpoint


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounded") / "m"
    make_checkpoint(folder, num_hidden_layers=1)
    return folder


def with_config(source: Path, folder: Path, config: dict[str, Any]) -> Path:
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


ENDLESS: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "llama", {"num_hidden_layers": 10**6}),
    ("Qwen2VLForConditionalGeneration", "qwen2_vl", {"vision_config": {"depth": 10**6}}),
    ("ConvNextModel", "convnext", {"depths": [10**6] * 4}),
    ("AlbertModel", "albert", {"num_hidden_groups": 10**6}),
    ("AlbertModel", "albert", {"inner_group_num": 10**6}),
    ("FunnelModel", "funnel", {"block_sizes": [10**6] * 3}),
    ("PerceiverModel", "perceiver", {"num_self_attends_per_block": 10**6}),
    ("LlamaForCausalLM", "llama", {"num_hidden_layers": 10**12}),
    ("LlamaForCausalLM", "llama", {"head_dim": 10**9}),
    ("LlamaForCausalLM", "llama", {"unknown": [{"sizes": [[10**12]]}]}),
    ("GPTNeoForCausalLM", "gpt_neo", {"max_position_embeddings": 10**6}),
]


@pytest.mark.parametrize(("name", "model_type", "says"), ENDLESS, ids=lambda value: str(value)[:40])
def test_a_model_without_end_is_refused(
    dense: Path, tmp_path: Path, name: str, model_type: str, says: dict[str, Any]
) -> None:
    config = {"architectures": [name], "model_type": model_type, **says}
    checkpoint = Checkpoint(with_config(dense, tmp_path / "m", config))
    began = time.process_time()
    with pytest.raises(SlideSparseError, match=r"modules|at most"):
        build_meta_model(checkpoint)
    assert time.process_time() - began < 30


def test_the_numbers_of_real_configs_are_taken(dense: Path, tmp_path: Path) -> None:
    config = json.loads((dense / "config.json").read_text())
    config |= {"max_position_embeddings": 10_485_760, "rope_theta": 10**9, "seed": 2**63, "num_parameters": 10**12}
    build_meta_model(Checkpoint(with_config(dense, tmp_path / "m", config))).require_complete()


def test_buffers_are_bounded_before_they_have_values(dense: Path, tmp_path: Path) -> None:
    prune_checkpoint(dense, tmp_path / "s", PruneOptions("6:8", "int8"))
    config = json.loads((tmp_path / "s/config.json").read_text())
    shown = with_config(tmp_path / "s", tmp_path / "m", {**config, "head_dim": 10**7})
    with pytest.raises(CheckpointError, match="shape of"):
        slidesparse.load(shown)


def test_a_name_of_megabytes_is_refused(dense: Path, tmp_path: Path) -> None:
    shutil.copytree(dense, tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    save_file({**tensors, "n" * 10**6: torch.ones(1)}, tmp_path / "m/model.safetensors")
    with pytest.raises(CheckpointError, match="too long a name of a tensor; got 1000000 characters"):
        Checkpoint(tmp_path / "m")


def test_a_file_that_cannot_be_mapped(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap 3 bytes from file: Cannot allocate memory (12)")

    checkpoint = Checkpoint(dense)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", fail)
    with pytest.raises(CheckpointError, match="unable to mmap"):
        checkpoint.tensor("model.norm.weight")


def test_a_tokenizer_whose_regular_expression_never_ends(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    said = json.loads((tmp_path / "tokenizer.json").read_text())
    said["pre_tokenizer"]["pattern"] = {"Regex": "(a+)+$"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="the tokenizer cannot read the text; got PanicException"):
        encode(load_tokenizer(tmp_path), "a" * 100 + "!")
