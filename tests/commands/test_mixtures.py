"""Experts are pruned in every form in which checkpoints store them, and all commands say the same of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from checkpoints import by_magnitude, contents, make_w8a8, same_tensors, tensors
from small_mixtures import MIXTURES
from small_models import make

import slidesparse
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.marker import Marker
from slidesparse.errors import InputError, PatternViolation, UnsupportedError
from slidesparse.files.stored import Stored
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.layer.linear import SlideLinear
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.offline.dry_run import dry_run
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import PruneOptions, prune_checkpoint

STORED = {"mixtral": "one tensor an expert", "gpt-oss": "one tensor for all experts, transposed"}
TRANSPOSED = ("gpt-oss", "llama4", "llama4-text")
NAMES = "gate_proj", "up_proj", "down_proj"
CUT = {
    "llama4-text": ("model.layers.{}.feed_forward.experts", *NAMES),
    "llama4": ("language_model.model.layers.{}.feed_forward.experts", *NAMES),
    "qwen3-vl-moe": ("model.language_model.layers.{}.mlp.experts", *NAMES),
}
"""Mixtures with one tensor for all experts of a layer -> where vLLM's loader looks for each, and for its matrices."""
TREATED = {name: one for name, one in MIXTURES.items() if one.refused is None}
ONE_TENSOR_AN_EXPERT = [name for name, one in TREATED.items() if one.not_quantised is None and name not in CUT]


def masked(weight: torch.Tensor, columns: int = -1) -> torch.Tensor:
    """A weight at 6:8 along a dimension, by the words of the definition: the two smallest of every group are zero."""
    rows = weight.movedim(columns, -1)
    groups = rows.reshape(*rows.shape[:-1], -1, 8)
    smallest = groups.abs().argsort(-1)[..., :2]
    return groups.scatter(-1, smallest, 0).reshape(rows.shape).movedim(-1, columns)


def replace_tensors(path: Path, kept: dict[str, torch.Tensor]) -> None:
    """Let a checkpoint have these of its tensors alone, perhaps with other values."""
    stored = {name: Checkpoint(path).stored(name) for name in kept}
    copies = {name: value.clone() for name, value in kept.items()}  # they may lie in the file that is written over
    with TensorWriter(path / "model.safetensors", stored) as writer:
        for name, value in copies.items():
            writer.write(name, value)


# -- pruned as they are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREATED)
def test_transformers_loads_the_masked_experts(tmp_path: Path, name: str) -> None:
    """Bit for bit the model whose linears and experts were masked in memory; all else is untouched, routers too."""
    model = make(tmp_path / "m", ARCHITECTURES[name], torch.float32)
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "fp32"))
    expected = model.state_dict()
    for layer in summary.patterns:
        expected[f"{layer}.weight"] = masked(expected[f"{layer}.weight"])
    for layer in summary.experts:
        expected[layer] = masked(expected[layer], -2 if name in TRANSPOSED else -1)
    found = type(model).from_pretrained(tmp_path / "s", dtype="auto").state_dict()
    assert {layer.rpartition(".")[2] for layer in summary.experts} == {"gate_up_proj", "down_proj"}
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    ours = slidesparse.load(tmp_path / "s").state_dict()
    assert all(torch.equal(ours[layer], expected[layer]) for layer in summary.experts)
    source = Checkpoint(tmp_path / "m")
    pruned = Checkpoint(tmp_path / "s")
    assert {tensor: source.stored(tensor) for tensor in source.files} == {t: pruned.stored(t) for t in pruned.files}


def shared_form(path: Path, model: Any) -> None:
    """Write a model's state as it is in memory, with one tensor for all experts of a layer."""
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    forms = {name: Stored("F32", tuple(value.shape)) for name, value in state.items()}
    with TensorWriter(path / "model.safetensors", forms) as writer:
        for name, value in state.items():
            writer.write(name, value)


def test_experts_in_one_tensor_where_transformers_writes_one_each(tmp_path: Path) -> None:
    """Qwen3.5 has them so on the hub; transformers reads both forms and writes the other."""
    model = make(tmp_path / "m", ARCHITECTURES["qwen3.5-moe"], torch.float32)
    prune_checkpoint(tmp_path / "m", tmp_path / "one each", by_magnitude("6:8", "fp8"))
    shared_form(tmp_path / "m", model)
    prune_checkpoint(tmp_path / "m", tmp_path / "cut", by_magnitude("6:8", "fp8"))
    first, second = tensors(tmp_path / "one each"), tensors(tmp_path / "cut")
    assert first.keys() == second.keys()
    assert all(torch.equal(value.float(), second[key].float()) for key, value in first.items())
    theirs = type(model).from_pretrained(tmp_path / "cut", dtype="auto").state_dict()
    ours = slidesparse.load(tmp_path / "cut").state_dict()
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "fp32"))
    found = type(model).from_pretrained(tmp_path / "s", dtype="auto").state_dict()
    assert len(summary.experts) == 4
    for layer in summary.experts:
        expected = masked(model.state_dict()[layer])
        assert torch.equal(found[layer], expected)
        assert torch.allclose(theirs[layer].float(), expected, rtol=0.07, atol=1e-3)
        assert torch.allclose(ours[layer].float(), theirs[layer].float(), rtol=1e-2, atol=1e-4)


# -- quantised ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_TENSOR_AN_EXPERT)
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantised_experts_have_scales_of_their_own(tmp_path: Path, name: str, dtype: str) -> None:
    make(tmp_path / "m", ARCHITECTURES[name], torch.float32)  # in BF16 weights of a group may be equal
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", dtype))
    source, found = tensors(tmp_path / "m"), tensors(tmp_path / "s")
    marker = Marker.require(Checkpoint(tmp_path / "s").config, "s")
    treated = [key for key in source if ".experts." in key]
    assert len(treated) == 12 * len(summary.experts) // 2
    assert {re.sub(r"experts\.\d", "experts.*", key.removesuffix(".weight")) for key in treated} == {*marker.experts}
    for key in treated:
        weight = masked(source[key])
        largest = weight.abs().amax(1, keepdim=True)
        limit = torch.full_like(largest, 127 if dtype == "int8" else 448)
        assert torch.equal(found[f"{key}_scale"], largest / limit)
        int8, fp8 = (weight * (limit / largest)).round(), (weight / (largest / limit)).to(torch.float8_e4m3fn)
        assert torch.equal(found[key].float(), int8 if dtype == "int8" else fp8.float())
    ends = (".gate.weight", ".gate.wg.weight", "router.weight", "router.layer.weight")
    routers = [key for key in source if key.endswith(ends)]
    assert routers
    assert all(torch.equal(source[key], found[key]) for key in routers)


@pytest.mark.parametrize("name", CUT)
def test_experts_of_one_tensor_are_cut_as_vllm_names_them(tmp_path: Path, name: str) -> None:
    model = make(tmp_path / "m", ARCHITECTURES[name], torch.float32)
    would = dry_run(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    assert would.experts["6:8"].destination_bytes < would.experts["6:8"].source_bytes / 3.7
    told = [summary.describe(), would.describe(), (tmp_path / "s/README.md").read_text()]
    unread = [re.search("transformers cannot load it in 8 bits", text) is not None for text in told]
    assert unread == [name == "qwen3-vl-moe"] * 3
    found, expected = tensors(tmp_path / "s"), set()
    place, gate, up, down = CUT[name]
    for layer in summary.experts:
        weight = model.state_dict()[layer]
        weight = masked(weight.transpose(1, 2) if name in TRANSPOSED else weight)
        assert len(weight) == 4
        begin = place.format(re.findall(r"\d", layer)[0])
        for expert, one in enumerate(weight):
            cut = {down: one} if layer.endswith("down_proj") else dict(zip((gate, up), one.chunk(2), strict=True))
            for leaf, part in cut.items():
                key = f"{begin}.{expert}.{leaf}.weight"
                largest = part.abs().amax(1, keepdim=True)
                limit = torch.full_like(largest, 127)
                assert torch.equal(found[f"{key}_scale"], largest / limit)
                assert torch.equal(found[key].float(), (part * (limit / largest)).round())
                expected |= {key, f"{key}_scale"}
    assert {key for key in found if ".experts." in key} == expected
    assert not any("input_linear" in key or "gate_up_proj" in key for key in found if "shared" not in key)
    marked = {
        re.sub(r"experts\.\d", "experts.*", key.removesuffix(".weight")) for key in expected if "scale" not in key
    }
    assert {*Marker.require(Checkpoint(tmp_path / "s").config, "s").experts} == marked
    assert inspect_checkpoint(tmp_path / "s").ok
    ours = slidesparse.load(tmp_path / "s").state_dict()
    for layer in summary.experts:
        assert ours[layer].shape == model.state_dict()[layer].shape
        dense = masked(model.state_dict()[layer], -2 if name in TRANSPOSED else -1)
        assert torch.allclose(ours[layer], dense, atol=float(dense.abs().max()) / 250)


def test_a_quantised_mixture_keeps_its_scales(tmp_path: Path) -> None:
    make(tmp_path / "m", ARCHITECTURES["mixtral"])
    make_w8a8(tmp_path / "m", tmp_path / "q", pattern="14:16")
    summary = prune_checkpoint(tmp_path / "q", tmp_path / "s", by_magnitude("6:8"))
    before, after = tensors(tmp_path / "q"), tensors(tmp_path / "s")
    key = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    assert summary.experts["model.layers.1.mlp.experts.gate_up_proj"] == "6:8"
    assert torch.equal(before[f"{key}_scale"], after[f"{key}_scale"])
    kept = after[key] != 0
    assert torch.equal(before[key][kept], after[key][kept])
    assert int(kept.reshape(-1, 8).sum(1).max()) == 6
    assert inspect_checkpoint(tmp_path / "s").ok


# -- one at a time, and again after a kill -----------------------------------------------------------------------------


# -- choices -----------------------------------------------------------------------------------------------------------


def test_experts_can_be_left_alone_or_get_another_pattern(tmp_path: Path) -> None:
    make(tmp_path / "m", ARCHITECTURES["mixtral"])
    source = tensors(tmp_path / "m")
    with pytest.raises(InputError, match="no linear layer to treat"):
        prune_checkpoint(tmp_path / "m", tmp_path / "n", by_magnitude("6:8", "int8", ignore=("re:.*self_attn",)))
    rounding = ("re:.*experts", "re:.*mlp.gate$")  # the second names routers, which stay dense anyway
    left = prune_checkpoint(tmp_path / "m", tmp_path / "l", by_magnitude("6:8", "int8", ignore=rounding))
    assert not left.experts
    assert "left dense: 2 x model.layers.*.mlp.experts.gate_up_proj (on the ignore list)" in left.describe()
    found = tensors(tmp_path / "l")
    assert all(torch.equal(found[key], source[key]) for key in source if ".experts." in key)
    config = Checkpoint(tmp_path / "l").config
    names = [f"model.layers.{i}.{place}.gate" for place in ("mlp", "block_sparse_moe") for i in range(2)]
    assert sorted(config["quantization_config"]["ignore"]) == sorted(["lm_head", *names, r"re:.*\.experts\..*"])
    assert config[MARKER_KEY]["version"] == 1
    inspection = inspect_checkpoint(tmp_path / "l")
    assert inspection.ok
    routers = dict.fromkeys(names[:2], "a router, which chooses among the experts")  # each is there once
    assert inspection.dense == {"lm_head": "output embedding", **routers}
    assert slidesparse.load(tmp_path / "l")
    one = r"re:model\.layers\.1\..*experts"
    half = prune_checkpoint(tmp_path / "m", tmp_path / "h", by_magnitude("6:8", "int8", ignore=(one,)))
    assert [*half.experts] == [f"model.layers.0.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")]
    ignore = Checkpoint(tmp_path / "h").config["quantization_config"]["ignore"]
    assert ignore[-2:] == [rf"re:.*\.1\.{place}\.experts\..*" for place in ("mlp", "block_sparse_moe")]
    assert inspect_checkpoint(tmp_path / "h").ok
    other = by_magnitude("6:8", "fp8", layers={"re:.*experts": "2:4"})
    assert set(prune_checkpoint(tmp_path / "m", tmp_path / "o", other).experts.values()) == {"2:4"}
    assert {(layer.marked, layer.tightest) for layer in inspect_checkpoint(tmp_path / "o").expert_layers} == {
        ("2:4", "2:4")
    }


def test_a_part_of_the_experts_is_not_cut(tmp_path: Path) -> None:
    """vLLM reads the experts of a Llama 4 or Qwen3.5 in one form."""
    make(tmp_path / "m", ARCHITECTURES["llama4"])
    options = by_magnitude("6:8", "int8", ignore=(r"re:.*layers\.1\..*experts",))
    with pytest.raises(
        InputError, match=r"are left alone, and others are quantised to one tensor an expert; got .*s\.1\."
    ):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (by_magnitude("6:8", "int8", rounding="ternary"), "ternary rounding is not for experts"),
        (by_magnitude("6:8", "int8", ignore=("re:.*experts.down_proj",)), "some are quantised; got .*down_proj"),
        (by_magnitude("6:8", "fp16"), "pruning without quantising keeps the type"),
        (by_magnitude("6:8", "int8", ignore=("re:.*exports",)), "matches no linear layer"),
    ],
)
def test_what_experts_cannot_is_refused_in_one_line(tmp_path: Path, options: PruneOptions, told: str) -> None:
    make(tmp_path / "m", ARCHITECTURES["mixtral"])
    with pytest.raises(InputError, match=told):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_experts_of_which_nobody_knows_how_they_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "m", ARCHITECTURES["mixtral"])
    monkeypatch.setattr("slidesparse.models.experts._is_transposed", lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"along which dimension the experts of .*experts multiply.*--ignore"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    inspection = inspect_checkpoint(tmp_path / "m")
    assert inspection.expert_layers == []
    assert "experts in an unknown layout: 2 x model.layers.*.mlp.experts: 4 experts" in inspection.describe()
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8", ignore=("re:.*experts",)))
    assert slidesparse.load(tmp_path / "s")


# -- what commands say -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORED)
def test_experts_that_are_pruned_keep_their_patterns(tmp_path: Path, name: str) -> None:
    """Those of a layer that kept more would lose weights by magnitude, and nobody would be told."""
    make(tmp_path / "m", ARCHITECTURES[name], torch.float32)
    layers = {r"re:.*layers\.1\..*experts": "6:8"}
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("2:4", "fp32", layers=layers))
    prune_checkpoint(tmp_path / "s", tmp_path / "t", by_magnitude("2:4", "fp32"))
    found = [{one.name: one.marked for one in inspect_checkpoint(tmp_path / at).expert_layers} for at in "st"]
    assert found[0] == found[1] == {one: "6:8" if "layers.1." in one else "2:4" for one in found[0]}
    assert same_tensors(tmp_path / "s", tmp_path / "t")
    alone = by_magnitude("2:4", "fp32", ignore=("re:.*experts",))
    prune_checkpoint(tmp_path / "m", tmp_path / "alone", alone)
    changed = by_magnitude("2:4", "fp32", layers={"re:.*experts": "2:4"})
    for source, marked in (("s", "6:8"), ("alone", "dense")):
        with pytest.raises(InputError, match=rf"pattern of .*experts.*; got 2:4; needed {marked}, as .* is pruned"):
            prune_checkpoint(tmp_path / source, tmp_path / "u", changed)
    prune_checkpoint(tmp_path / "alone", tmp_path / "v", alone)
    prune_checkpoint(tmp_path / "alone", tmp_path / "unasked", by_magnitude("2:4", "fp32"))
    assert contents(tmp_path / "v") == contents(tmp_path / "unasked")


@pytest.mark.parametrize("name", STORED)
def test_a_model_in_memory_keeps_its_experts(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make(tmp_path / "m", ARCHITECTURES[name])
    before = model.get_parameter("model.layers.0.mlp.experts.down_proj").detach().clone()
    slidesparse.sparsify_(model, "6:8", "int8")
    assert torch.equal(model.get_parameter("model.layers.0.mlp.experts.down_proj"), before)
    assert any(isinstance(module, SlideLinear) for module in model.modules())
    assert "experts stay dense in memory; slidesparse prune treats them in a checkpoint" in caplog.text
    model.save_pretrained(tmp_path / "s")
    assert r"re:.*\.experts\..*" in Checkpoint(tmp_path / "s").config["quantization_config"]["ignore"]
    loaded = slidesparse.load(tmp_path / "s")
    assert torch.equal(loaded.get_parameter("model.layers.0.mlp.experts.down_proj"), before)
    inspection = inspect_checkpoint(tmp_path / "s")
    assert inspection.ok
    assert {layer.marked for layer in inspection.expert_layers} == {None}


@pytest.mark.parametrize("name", STORED)
def test_experts_that_break_their_mark_are_found(tmp_path: Path, name: str) -> None:
    make(tmp_path / "m", ARCHITECTURES[name])
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "bf16"))
    dense, found = tensors(tmp_path / "m"), tensors(tmp_path / "s")
    key = next(key for key in reversed(found) if ".experts." in key and "bias" not in key)
    replace_tensors(tmp_path / "s", found | {key: dense[key]})
    inspection = inspect_checkpoint(tmp_path / "s")
    assert not inspection.ok
    assert "PROBLEM: " in inspection.describe()
    assert key in inspection.describe()
    with pytest.raises(PatternViolation, match=key.replace(".", r"\.")):
        slidesparse.load(tmp_path / "s")


@pytest.mark.parametrize(
    ("name", "lost", "told"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w2.weight_scale", "the checkpoint holds no {lost}"),
        ("qwen3-vl-moe", ".0.mlp.experts.2.up_proj.", r"shape of .*\.experts\.gate_up_proj; got \[2, .*; needed \[4,"),
    ],
)
def test_an_expert_that_is_missing_is_named(tmp_path: Path, name: str, lost: str, told: str) -> None:
    make(tmp_path / "m", ARCHITECTURES[name])
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    replace_tensors(tmp_path / "s", {n: t for n, t in tensors(tmp_path / "s").items() if lost not in n})
    with pytest.raises(slidesparse.errors.CheckpointError, match=told.replace("{lost}", lost)):
        slidesparse.load(tmp_path / "s")
