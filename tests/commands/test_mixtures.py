"""All commands say the same of a mixture of experts, however the checkpoint stores the experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import add_tokenizer, write_text
from small_models import make

import slidesparse
from slidesparse.cli import main
from slidesparse.commands.inspect import inspect_checkpoint
from slidesparse.commands.plan import PlanOptions, plan_checkpoint
from slidesparse.commands.prune import PruneOptions, prune_checkpoint
from slidesparse.errors import UnsupportedError
from slidesparse.files.calibration import Calibration
from slidesparse.models.choose_patterns import Target

STORED = {"mixtral": "one tensor an expert", "gpt-oss": "one tensor for all experts"}


@pytest.mark.parametrize("name", STORED)
def test_prune_plan_and_sparsify_refuse_it_alike(tmp_path: Path, name: str) -> None:
    model = make(tmp_path / "m", ARCHITECTURES[name], torch.float32)
    add_tokenizer(tmp_path / "m")
    calibration = Calibration(str(write_text(tmp_path / "text.txt")), 4, 16)
    said = []
    before = sorted(path.name for path in tmp_path.iterdir())
    for method, text in (("magnitude", None), ("wanda", calibration)):
        with pytest.raises(UnsupportedError) as error:
            prune_checkpoint(
                tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "int8", method=method, calibration=text)
            )
        said.append(str(error.value))
    with pytest.raises(UnsupportedError) as error:
        plan_checkpoint(tmp_path / "m", tmp_path / "plan.json", PlanOptions(Target(speedup=1.1), calibration))
    said.append(str(error.value))
    with pytest.raises(UnsupportedError) as error:
        slidesparse.sparsify_(model, "6:8")
    said.append(str(error.value))
    assert len(set(said)) == 1
    assert "2 x model.layers.*.mlp.experts: 4 experts" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # no plan, no measurements, nothing unfinished


@pytest.mark.parametrize("name", STORED)
def test_inspect_lists_the_experts(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "m", ARCHITECTURES[name])
    capsys.readouterr()
    inspection = inspect_checkpoint(tmp_path / "m")
    assert [one.count for one in inspection.experts] == [4, 4]
    assert {layer.name.split(".")[3] for layer in inspection.layers} == {"self_attn"}
    assert main(["inspect", str(tmp_path / "m")]) == 0
    assert "not treated: 2 x model.layers.*.mlp.experts: 4 experts, gate_up_proj [4, " in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "m"), "--json"]) == 0
    experts = json.loads(capsys.readouterr().out)["experts"]
    assert [one["name"] for one in experts] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert experts[0]["weights"]["down_proj"][0] == 4


def test_a_model_without_linears_says_what_it_has(tmp_path: Path) -> None:
    make(tmp_path / "m", ARCHITECTURES["gpt2"])
    with pytest.raises(
        slidesparse.InputError, match=r"no linear layer to treat; .*2 x transformer\.h\.\*\.attn\.c_attn \("
    ):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "int8"))
    known = transformers.GPT2LMHeadModel
    with pytest.raises(slidesparse.InputError, match="Conv1D, whose weight is stored"):
        slidesparse.sparsify_(known(known.config_class(**ARCHITECTURES["gpt2"].config)), "6:8")
