"""The mixers of Mamba's first version stay dense in 8 bits, since vLLM reads no scales for them, and say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, on_meta
from checkpoints import by_magnitude
from small_models import make

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import InputError
from slidesparse.models.float_linears import IN_FLOATS, LINEARS, linears_of_float_mixers
from slidesparse.offline.dry_run import dry_run
from slidesparse.offline.prune import prune_checkpoint

MIXER = {f"model.layers.0.mamba.{leaf}" for leaf in LINEARS}


@pytest.fixture
def jamba(tmp_path: Path) -> Path:
    make(tmp_path / "jamba", ARCHITECTURES["jamba"], torch.bfloat16)
    return tmp_path / "jamba"


OTHERS = ["mamba2", "bamba", "falcon-h1", "zamba2", "nemotron-h", "llama"]


@pytest.mark.parametrize("name", ["mamba", "falcon-mamba", "jamba", *OTHERS])
def test_first_mixers_are_found_and_others_are_not(name: str) -> None:
    found = {name.rpartition(".")[2] for name in linears_of_float_mixers(on_meta(name))}
    assert found == (set() if name in OTHERS else set(LINEARS))


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_they_stay_dense_in_8_bits(jamba: Path, dtype: str) -> None:
    out, options = jamba.parent / "out", by_magnitude("6:8", dtype)
    said = dry_run(jamba, out, options)
    done = prune_checkpoint(jamba, out, options)
    assert not MIXER & set(done.patterns)
    assert "model.layers.1.self_attn.q_proj" in done.patterns
    assert said.left[IN_FLOATS].count == len(MIXER)
    assert {name for name, why in done.dense.items() if why == IN_FLOATS} == MIXER
    assert IN_FLOATS in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    assert set(config["quantization_config"]["ignore"]) >= MIXER
    checkpoint, before = Checkpoint(out), Checkpoint(jamba)
    for name in MIXER:
        assert f"{name}.weight_scale" not in checkpoint.files
        assert torch.equal(checkpoint.tensor(f"{name}.weight"), before.tensor(f"{name}.weight"))


def test_they_are_pruned_in_floats(jamba: Path) -> None:
    done = prune_checkpoint(jamba, jamba.parent / "out", by_magnitude("6:8", "bf16"))
    assert MIXER & set(done.patterns) == MIXER - {"model.layers.0.mamba.dt_proj"}


def test_where_nothing_else_is_left_the_remedy_is_named(tmp_path: Path) -> None:
    make(tmp_path / "m", ARCHITECTURES["mamba"], torch.bfloat16)
    with pytest.raises(InputError, match=r"8 linears of first Mamba mixers.*--dtype bf16, fp16 or fp32"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "fp8"))
    with pytest.raises(InputError, match="matches no linear layer"):  # which is wrong for any type
        prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8", ignore=("re:.*down_proj",)))
    assert not (tmp_path / "s").exists()
