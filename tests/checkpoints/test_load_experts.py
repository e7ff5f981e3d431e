"""Pruned experts of a checkpoint take the place of transformers' own, or stay dense and say why."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from checkpoints import by_magnitude
from small_mixtures import MIXTURES, packed_mixtures
from small_models import make
from torch import nn
from tuning_fakes import pretend_hopper

import slidesparse
from slidesparse.checkpoints import load_experts
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import UnsupportedError
from slidesparse.gemm import expert_times, select
from slidesparse.gemm.grouped import GroupedProduct
from slidesparse.layer.settle import Chooser
from slidesparse.models.experts import Experts, find_experts
from slidesparse.models.packed_mixture import DESCRIBED, why_not_packed
from slidesparse.offline.evaluate import how_experts_ran
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.weights.pattern import Pattern

IDS = torch.arange(12)[None]


def pruned(path: Path, name: str, dtype: str = "int8", pattern: str = "6:8", top_k: int = 2, **options: Any) -> Path:
    if not hasattr(transformers, MIXTURES[name].model):
        pytest.skip(f"this transformers has no {MIXTURES[name].model}")
    model = make(path / "m", MIXTURES[name], num_experts_per_tok=top_k)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:
                parameter.normal_(std=0.2)  # so that experts decide the result
    model.save_pretrained(path / "m")
    prune_checkpoint(path / "m", path / "s", by_magnitude(pattern, dtype, **options))
    return path / "s"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits.float()
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen3.5-moe", "deepseek-v3", "jamba"])
def test_packed_experts_compute_what_dense_ones_do(tmp_path: Path, name: str) -> None:
    path = pruned(tmp_path, name)
    dense, ours = slidesparse.load(path), slidesparse.load(path, backend="reference")
    assert not packed_mixtures(dense)
    assert len(packed_mixtures(ours)) == len(find_experts(dense)) > 0
    assert not find_experts(ours)
    assert not any(value.is_meta for value in (*ours.parameters(), *ours.buffers()))
    a, b = logits(dense), logits(ours)
    assert not torch.equal(a, b)  # inputs of the experts are rounded
    assert (a - b).norm() < 0.05 * a.norm()


@pytest.mark.parametrize(("rounding", "packs"), [("6bit", True), ("absmax", False)])
def test_experts_at_dense_are_packed_in_six_bits_alone(tmp_path: Path, rounding: Any, packs: bool) -> None:
    # All four experts: near a tie a router takes another one by the last bit, which differs between CPUs.
    path = pruned(tmp_path, "qwen3-moe", pattern="dense", rounding=rounding, top_k=4)
    dense, ours = slidesparse.load(path), slidesparse.load(path, backend="reference")
    assert bool(packed_mixtures(ours)) == packs
    assert (logits(dense) - logits(ours)).norm() < 0.05 * logits(dense).norm()


def test_packed_experts_are_not_lost_where_a_model_is_saved(tmp_path: Path) -> None:
    ours = slidesparse.load(pruned(tmp_path, "qwen3-moe"), backend="reference")
    with pytest.raises(UnsupportedError, match=r"packed experts .model\.layers\.0\.mlp\.experts.*folder"):
        ours.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.glob("saved/*.safetensors"))


def test_fp8_experts_and_those_of_another_pattern(tmp_path: Path) -> None:
    path = pruned(tmp_path, "qwen3-moe", "fp8", "4:6")
    ours = slidesparse.load(path, fallback="none")
    (first, *_) = packed_mixtures(ours)
    assert type(first.slide.product) is GroupedProduct
    assert first.slide.gate_up.dtype == torch.float8_e4m3fn
    a, b = logits(slidesparse.load(path)), logits(ours)
    assert (a - b).norm() < 0.1 * a.norm()


@pytest.mark.parametrize(
    ("name", "dtype", "loading", "why"),
    [
        ("mixtral", "int8", {}, "no kernel multiplies by experts on a CPU"),
        ("mixtral", "int8", {"backend": "dense"}, "the backend dense does not multiply by experts"),
        ("mixtral", "bf16", {"backend": "reference"}, "their weights are of a float type"),
        ("llama4-text", "int8", {"backend": "reference"}, "transformers does not describe Llama4TextExperts"),
    ],
)
def test_why_experts_run_dense_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, dtype: str, loading: dict[str, Any], why: str
) -> None:
    caplog.set_level(logging.INFO)
    model = slidesparse.load(pruned(tmp_path, name, dtype), **loading)
    assert not packed_mixtures(model)
    (line,) = [line for line in caplog.messages if "run dense" in line]
    assert line.startswith("slidesparse: the experts of ")
    assert why in line


def test_gate_and_up_of_two_patterns_run_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = pruned(tmp_path, "qwen3-moe", pattern="2:4")
    config = json.loads((path / "config.json").read_text())
    marked = config["slidesparse_config"]["experts"]
    marked["model.layers.0.mlp.experts.*.up_proj"] = "6:8"  # which weights of 2:4 satisfy too
    (path / "config.json").write_text(json.dumps(config))
    assert len(packed_mixtures(slidesparse.load(path, backend="reference"))) == 1
    assert "the experts of model.layers.0.mlp.experts run dense: not all of them were pruned to one" in caplog.text


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, "2 of 2 layers"),
        ({"ignore": (r"re:.*layers\.0\..*experts",)}, "1 of 1 layer"),
        ({"layers": {r"re:.*layers\.0\..*experts": "dense"}}, "1 of 1 layer"),
    ],
)
def test_eval_counts_the_layers_whose_experts_were_pruned(tmp_path: Path, options: dict[str, Any], layers: str) -> None:
    path = pruned(tmp_path, "mixtral", **options)
    dense, packed = (slidesparse.load(path, backend=backend) for backend in ("dense", "reference"))
    told = how_experts_ran(Checkpoint(path), dense)
    assert told == f"pruned experts ran dense in {layers}, with inputs that vLLM rounds and that were not"
    assert how_experts_ran(Checkpoint(path), packed) == "pruned experts ran sparse"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On it the definition multiplies."""
    pretend_hopper(monkeypatch, tmp_path, select)
    monkeypatch.setattr(load_experts, "grouped_product", lambda problem: Grouped())
    # Linears choose by themselves, whatever is asked for: they are not what these tests are about.
    monkeypatch.setattr(
        "slidesparse.checkpoints.load.Chooser", lambda _, fallback, tuner: Chooser("auto", fallback, tuner)
    )


class Grouped(GroupedProduct):
    """A product that is not the definition."""


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("concerned", "loading", "product"),
    [
        ({}, {"fallback": "none"}, GroupedProduct),
        ({}, {"backend": "hopper", "fallback": "none"}, Grouped),  # asked for
        ({"top_k": 1}, {"fallback": "none"}, Grouped),
        ({"bits": 6}, {"fallback": "none"}, Grouped),
        ({"down": Pattern(4, 6)}, {"fallback": "none"}, Grouped),
    ],
)
def test_a_product_that_was_wrong_here_is_not_taken(
    tmp_path: Path, concerned: dict[str, Any], loading: dict[str, Any], product: type
) -> None:
    path, pattern = pruned(tmp_path, "qwen3-moe"), Pattern(6, 8)
    kind = expert_times.ExpertKind(torch.int8, pattern, pattern, 64, 48, 4, 4, 2, torch.device("cpu"))
    assert type(packed_mixtures(slidesparse.load(path, **loading))[0].slide.product) is Grouped
    expert_times.keep_expert_times(replace(kind, **concerned), None, ["hopper"])
    assert type(packed_mixtures(slidesparse.load(path, **loading))[0].slide.product) is product


def test_a_number_past_the_last_expert_stands_for_none(tmp_path: Path) -> None:
    (first, *_) = packed_mixtures(slidesparse.load(pruned(tmp_path, "qwen3-moe"), backend="reference"))
    x, weights = torch.randn(3, 64).bfloat16(), torch.rand(3, 2)
    some, none = torch.tensor([[0, 4], [4, 1], [4, 4]]), torch.tensor([[0, -1], [-1, 1], [-1, -1]])
    assert torch.equal(first(x, some, weights), first.slide(x, weights, none))
    assert not first(x, some, weights)[2].any()


TWO_EXPERTS = Experts("mlp.experts", 2, {"gate_up_proj": (2, 8, 4), "down_proj": (2, 4, 4)})


def described(**changed: Any) -> Any:
    plain = {name: needed for name, (needed, _) in DESCRIBED.items()}
    gate = SimpleNamespace(__module__="transformers.integrations.moe")
    module = SimpleNamespace(**{**plain, "_apply_gate": gate, "act_fn": nn.SiLU(), **changed})
    return module


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"has_bias": True}, "they have a bias"),
        ({"has_gate": False}, "they have no gate"),
        (
            {"_apply_gate": SimpleNamespace(__module__="transformers.models.x")},
            "the gate of SimpleNamespace is its own",
        ),
        ({"act_fn": nn.GELU()}, "their activation is GELU, not SiLU"),
    ],
)
def test_why_a_module_keeps_its_experts(changed: dict[str, Any], why: str | None) -> None:
    assert why_not_packed(described(**changed), TWO_EXPERTS) == why
    others = Experts("mlp.experts", 2, {"w1": (2, 4, 4), "w2": (2, 4, 4)})
    assert "in another way than in gate_up_proj and down_proj" in str(why_not_packed(described(), others))
