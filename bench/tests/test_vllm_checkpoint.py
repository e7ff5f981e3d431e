"""Checkpoints of random weights, as servers load them."""

from __future__ import annotations

from pathlib import Path

import torch

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.weights.pattern import Pattern
from slidesparse_bench.engine.vllm_checkpoint import model_config, write_checkpoint

SMALL = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def test_a_random_checkpoint_is_what_it_says(tmp_path: Path) -> None:
    config = model_config("Llama-3.2-1B", 1) | SMALL
    write_checkpoint(tmp_path / "c", config, torch.float8_e4m3fn, Pattern.parse("4:6"), torch.device("cpu"))
    found = inspect_checkpoint(tmp_path / "c")
    assert found.ok
    assert "7" in found.describe()  # seven linears


def test_a_random_mixture_is_what_it_says(tmp_path: Path) -> None:
    config = model_config("Qwen3-30B-A3B", 1) | {**SMALL, "num_experts": 3, "moe_intermediate_size": 16, "head_dim": 16}
    write_checkpoint(tmp_path / "c", config, torch.int8, Pattern.parse("6:8"), torch.device("cpu"))
    found = inspect_checkpoint(tmp_path / "c")
    assert found.ok, found.describe()
    stored = Checkpoint(tmp_path / "c")
    experts = [name for name in stored.files if ".experts." in name]
    assert len(experts) == 3 * 3 * 2  # gate, up and down, with their scales
    assert stored.tensor("model.layers.0.mlp.gate.weight").shape == (3, config["hidden_size"])
    assert stored.tensor("model.layers.0.mlp.experts.2.down_proj.weight").shape == (config["hidden_size"], 16)
