"""``eval`` refuses what perplexity is not defined for, and what transformers would complete with noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import add_tokenizer, make_checkpoint, write_text
from safetensors.torch import load_file, save_file

from slidesparse.cli import main
from slidesparse.errors import CheckpointError
from slidesparse.offline.evaluate import evaluate

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "BertForMaskedLM": transformers.BertConfig(**SMALL, vocab_size=96, max_position_embeddings=64),
    "T5ForConditionalGeneration": transformers.T5Config(
        vocab_size=96, d_model=64, d_ff=128, d_kv=32, num_layers=1, num_heads=2
    ),
    "ViTModel": transformers.ViTConfig(**SMALL, image_size=32, patch_size=16),
}


def make_folder(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    getattr(transformers, name)(MODELS[name]).save_pretrained(folder / "m")
    add_tokenizer(folder / "m")
    write_text(folder / "text.txt", words=60)
    return folder / "m"


@pytest.mark.parametrize("name", list(MODELS))
def test_other_models_have_no_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = make_folder(tmp_path, name)
    capsys.readouterr()
    assert main(["eval", str(folder), "--text", str(tmp_path / "text.txt"), "--device", "cpu"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"{name} has no causal loss" in told.err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "text.txt"]


def test_nan_that_the_text_does_not_touch(tmp_path: Path) -> None:
    """The token that nobody reads is of the checkpoint too."""
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    add_tokenizer(tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    tensors["model.embed_tokens.weight"][90] = float("nan")
    save_file(tensors, tmp_path / "m/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight holds NaN"):
        evaluate(tmp_path / "m", text=write_text(tmp_path / "text.txt", words=20))
