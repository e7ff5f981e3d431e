"""Calibration of a multimodal model walks its language model alone, as if it were the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import add_tokenizer, make_checkpoint, write_text
from small_models import TEXT, make

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import InputError
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse.weights.support import value_bits


def source(path: Path, name: str) -> Calibration:
    make(path / name, ARCHITECTURES[name], torch.float32)
    add_tokenizer(path / name)
    return Calibration(str(write_text(path / "text.txt")), 4, 16)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_as_the_language_model_by_itself(tmp_path: Path, method: str) -> None:
    text = source(tmp_path, "llava")
    whole = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava")
    alone = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.save_pretrained(tmp_path / "llama")
    add_tokenizer(tmp_path / "llama")
    options = PruneOptions("4:6", "int8", method=method, calibration=text)
    for name in ("llava", "llama"):
        prune_checkpoint(tmp_path / name, tmp_path / f"{name}-s", options)
    ours, theirs = Checkpoint(tmp_path / "llava-s"), Checkpoint(tmp_path / "llama-s")
    treated = [name for name in theirs.files if name.endswith("weight_scale")]
    assert len(treated) == 14
    for scale in treated:
        for name in (scale, scale.removesuffix("_scale")):
            assert torch.equal(ours.tensor(f"language_model.{name}"), theirs.tensor(name))


@pytest.mark.parametrize("step", [{}, {"match_steps": 1}], ids=str)
def test_an_output_embedding_is_treated_beside_calibrated_layers_where_it_is_not_pruned(
    tmp_path: Path, step: dict[str, Any]
) -> None:
    """It is outside of the layers, and at ``dense`` no method looks at it."""
    make_checkpoint(tmp_path / "m", "llama", torch.float32)
    add_tokenizer(tmp_path / "m")
    text = Calibration(str(write_text(tmp_path / "text.txt")), 4, 16)
    options = PruneOptions("6:8", "int8", method="sparsegpt", calibration=text, rounding="6bit", lm_head=True, **step)
    told = "outside of it: lm_head; put them on the ignore list .--ignore., or leave them at dense .--layer NAME=dense."
    with pytest.raises(InputError, match=told):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    prune_checkpoint(tmp_path / "m", tmp_path / "s", replace(options, layers={"lm_head": "dense"}))
    made = Checkpoint(tmp_path / "s")
    bits = [value_bits(made.tensor(f"{name}.weight")) for name in ("lm_head", "model.layers.0.mlp.down_proj")]
    assert bits == [8, 6]
