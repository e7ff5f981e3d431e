"""Linears for which vLLM reads no scales: output embeddings, and the mixers of Mamba's first version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, on_meta
from checkpoints import by_magnitude
from small_models import TEXT, Architecture, make
from test_architectures import similarity

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import InputError
from slidesparse.models.float_linears import HEAD_IN_FLOATS, HEAD_OF_TASK, IN_FLOATS, LINEARS, linears_of_float_mixers
from slidesparse.models.sparsify import sparsify_
from slidesparse.models.targets import OUTPUT
from slidesparse.offline.dry_run import dry_run
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import prune_checkpoint

MIXER = {f"model.layers.0.mamba.{leaf}" for leaf in LINEARS}
OTHERS = ["mamba2", "bamba", "falcon-h1", "zamba2", "nemotron-h", "llama"]

# -- mixers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "falcon-mamba", "jamba", *OTHERS])
def test_first_mixers_are_found_and_others_are_not(name: str) -> None:
    found = {name.rpartition(".")[2] for name in linears_of_float_mixers(on_meta(name))}
    assert found == (set() if name in OTHERS else set(LINEARS))


def test_they_stay_dense_in_8_bits(tmp_path: Path) -> None:
    make(tmp_path / "m", ARCHITECTURES["jamba"], torch.bfloat16)
    options = by_magnitude("6:8", "int8")
    said = dry_run(tmp_path / "m", tmp_path / "s", options)
    done = prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    assert not MIXER & set(done.patterns)
    assert "model.layers.1.self_attn.q_proj" in done.patterns
    assert said.left[IN_FLOATS].count == len(MIXER)
    assert {name for name, why in done.dense.items() if why == IN_FLOATS} == MIXER
    assert IN_FLOATS in (tmp_path / "s/README.md").read_text()
    config = json.loads((tmp_path / "s/config.json").read_text())
    assert set(config["quantization_config"]["ignore"]) >= MIXER
    checkpoint, before = Checkpoint(tmp_path / "s"), Checkpoint(tmp_path / "m")
    for name in MIXER:
        assert f"{name}.weight_scale" not in checkpoint.files
        assert torch.equal(checkpoint.tensor(f"{name}.weight"), before.tensor(f"{name}.weight"))


def test_where_nothing_else_is_left_the_remedy_is_named(tmp_path: Path) -> None:
    make(tmp_path / "m", ARCHITECTURES["mamba"], torch.bfloat16, tie_word_embeddings=False)
    for lm_head in (False, True):  # with it, the output embedding alone was pruned
        with pytest.raises(InputError, match=r"8 linears of first Mamba mixers.*--dtype bf16, fp16 or fp32"):
            prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "fp8", lm_head=lm_head))
    with pytest.raises(InputError, match="matches no linear layer"):  # which is wrong for any type
        prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8", ignore=("re:.*down_proj",)))
    assert not (tmp_path / "s").exists()


# -- output embeddings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jamba", "bamba", "qwen3.5", "qwen3-next"])
def test_a_head_cannot_be_asked_for_in_8_bits(tmp_path: Path, name: str) -> None:
    """They stayed dense, and the option had no effect."""
    make(tmp_path / "m", ARCHITECTURES[name], torch.bfloat16, tie_word_embeddings=False)
    for run in (dry_run, prune_checkpoint):
        with pytest.raises(InputError, match=f"lm-head.*{HEAD_IN_FLOATS}"):
            run(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8", lm_head=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_both_are_pruned_in_floats(tmp_path: Path) -> None:
    make(tmp_path / "m", ARCHITECTURES["jamba"], torch.bfloat16)
    done = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "bf16", lm_head=True))
    assert (done.patterns["lm_head"], done.dense_head) == ("6:8", "lm_head")
    assert MIXER & set(done.patterns) == MIXER - {"model.layers.0.mamba.dt_proj"}


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen2.5-vl", "gemma3", "mistral3", "qwen2-audio"])
def test_that_of_a_multimodal_model_belongs_to_its_language_part(tmp_path: Path, name: str) -> None:
    """It was left as a joint between parts, and --lm-head had no effect."""
    make(tmp_path / "m", ARCHITECTURES[name], torch.bfloat16, tie_word_embeddings=False)
    done = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8", lm_head=True))
    assert done.patterns["lm_head"] == "6:8"
    assert similarity(tmp_path / "s", ARCHITECTURES[name]) > 0.95
    assert inspect_checkpoint(tmp_path / "s").ok


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("gemma3", {}, "shares its weight"),
        ("llama", {"ignore": ("lm_head",)}, "on the ignore list"),
        ("bert", {}, "there is none"),
        ("llava", {"part": "vision"}, "in the language part; --part language or all"),
    ],
)
def test_one_that_stays_dense_cannot_be_asked_for(tmp_path: Path, name: str, options: dict[str, Any], why: str) -> None:
    make(tmp_path / "m", ARCHITECTURES[name], torch.float32)
    with pytest.raises(InputError, match=f"options without effect; got --lm-head, .* stays dense: {why}"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8", lm_head=True, **options))


# -- in memory -----------------------------------------------------------------------------------------------------


def test_a_model_in_memory_keeps_what_vllm_holds_in_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it is saved as is served."""
    model = make(tmp_path / "m", ARCHITECTURES["jamba"], torch.bfloat16)
    sparsify_(model, "6:8", "int8", lm_head=True)
    model.save_pretrained(tmp_path / "s")
    done = prune_checkpoint(tmp_path / "m", tmp_path / "p", by_magnitude("6:8", "int8"))
    saved, pruned = (
        {name for name in Checkpoint(tmp_path / folder).files if name.endswith("weight_scale")} for folder in "sp"
    )
    assert saved == {name for name in pruned if ".experts." not in name}  # which stay dense in memory
    assert {OUTPUT, IN_FLOATS} <= set(done.dense.values())
    for why in (HEAD_IN_FLOATS, IN_FLOATS):
        assert why in caplog.text


@pytest.mark.parametrize("name", ["llama", "bert-classifier"])
def test_heads_of_scores_stay_in_floats_whatever_their_size(tmp_path: Path, name: str) -> None:
    """vLLM builds them without scales."""
    family = Architecture("LlamaForSequenceClassification", TEXT) if name == "llama" else ARCHITECTURES[name]
    make(tmp_path / "m", family, torch.bfloat16, num_labels=64)
    head = "score" if name == "llama" else "classifier"
    done = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    assert done.dense[head] == HEAD_OF_TASK
    assert prune_checkpoint(tmp_path / "m", tmp_path / "f", by_magnitude("6:8", "bf16")).patterns[head] == "6:8"
