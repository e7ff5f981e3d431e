"""What config.json says of the tensors, where they say otherwise: the tensors decide, or the checkpoint is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import by_magnitude, config_of, edited_config
from safetensors.torch import load_file, save_file
from small_models import make
from test_architectures import answer

import slidesparse
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError, InputError
from slidesparse.offline.evaluate import load_any
from slidesparse.offline.prune import prune_checkpoint

HEADS = {"llama": "lm_head", "gemma3": "lm_head", "t5": "lm_head", "bert-mlm": "cls.predictions.decoder"}


def make_tied(folder: Path, name: str, head: str, equal: bool) -> Any:
    """A checkpoint whose config ties its head, and which holds one all the same."""
    made = make(folder, ARCHITECTURES[name], torch.float32, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    embedding = made.get_input_embeddings().weight.detach()
    weights[f"{head}.weight"] = embedding.clone() if equal else embedding.flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return made


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_its_own_is_kept_and_said_to_be_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Servers go by config.json, and took the embedding in its place; --lm-head had no effect."""
    found, head = ARCHITECTURES[name], HEADS[name]
    make_tied(tmp_path / "m", name, head, equal=False)
    dense = prune_checkpoint(tmp_path / "m", tmp_path / "d", by_magnitude("dense", "fp32"))
    assert dense.dense[head] == "output embedding"
    assert f"{head}.weight differs from" in caplog.text
    known = getattr(transformers, found.model)
    right = answer(known.from_pretrained(tmp_path / "m").eval(), found)
    assert torch.allclose(answer(slidesparse.load(tmp_path / "d"), found), right, atol=1e-4)
    assert torch.allclose(answer(load_any(Checkpoint(tmp_path / "m"), torch.device("cpu")), found), right, atol=1e-4)
    done = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "fp32", lm_head=True))
    assert done.patterns[head] == "6:8"
    ours, theirs = slidesparse.load(tmp_path / "s"), known.from_pretrained(tmp_path / "s").eval()
    assert torch.allclose(answer(ours, found), answer(theirs, found), atol=1e-4)
    said = config_of(tmp_path / "s")
    ties = [one["tie_word_embeddings"] for one in (said, said.get("text_config", said))]
    assert ties == [name in ("t5", "bert-mlm")] * 2  # where that key means more than the head


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_stored_twice_is_tied(tmp_path: Path, name: str) -> None:
    make_tied(tmp_path / "m", name, HEADS[name], equal=True)
    done = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    assert done.dense[HEADS[name]] == "shares its weight with the input embedding"
    assert config_of(tmp_path / "s")["tie_word_embeddings"]
    loaded = slidesparse.load(tmp_path / "s")
    assert loaded.get_submodule(HEADS[name]).weight is loaded.get_input_embeddings().weight
    with pytest.raises(InputError, match=r"lm-head.*shares its weight"):
        prune_checkpoint(tmp_path / "m", tmp_path / "h", by_magnitude("6:8", "int8", lm_head=True))


def test_an_untied_head_that_is_not_there(tmp_path: Path) -> None:
    make(tmp_path / "m", ARCHITECTURES["llama"], torch.float32, tie_word_embeddings=True)
    with edited_config(tmp_path / "m") as config:
        config |= {"tie_word_embeddings": False}
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight;.*tie_word_embeddings: true"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))


def test_what_transformers_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    """A router's correction was rounded to the type of the model, and other experts were chosen."""
    name, found = "model.layers.1.mlp.gate.e_score_correction_bias", ARCHITECTURES["deepseek-v3"]
    make(tmp_path / "m", found, torch.bfloat16)
    weights = load_file(tmp_path / "m/model.safetensors")
    weights[name] = torch.tensor([0.1, 0.2, 0.3, 0.7])
    save_file(weights, tmp_path / "m/model.safetensors", {"format": "pt"})
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "bf16"))
    for folder in ("m", "s"):
        known = getattr(transformers, found.model).from_pretrained(tmp_path / folder)
        assert torch.equal(known.state_dict()[name], weights[name])
    assert torch.equal(slidesparse.load(tmp_path / "s").state_dict()[name], weights[name])
