"""``prune --rotate``: the residual stream gets other axes, the float model stays, and patterns take less away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import add_tokenizer, make_checkpoint, make_source, write_text
from interrupted_reads import interrupt
from small_models import make

from slidesparse.base.ranks import Ranks
from slidesparse.cli import main
from slidesparse.errors import InputError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.meta_model import build_meta_model
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.models.sparsify import run_once
from slidesparse.models.targets import find_targets
from slidesparse.offline.calibrate import rotating
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.calibrate.rotating import RotatedCheckpoint, find_rotation, rotate_checkpoint
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.weights.pattern import Pattern

CPU = torch.device("cpu")
IDS = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(0))


def make_uneven(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A checkpoint ``m`` whose gains and biases are not those of a new model."""
    make(folder / "m", ARCHITECTURES[name], torch.float32, **changes)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "m", dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) / (4 if parameter.dim() == 1 else 50))
    model.to(dtype).save_pretrained(folder / "m")
    return model


def rotated(source: Path, kept: Path, pattern: str = "4:6", steps: int = 10) -> RotatedCheckpoint:
    checkpoint = Checkpoint(source)
    meta = build_meta_model(checkpoint)
    patterns = dict.fromkeys(find_targets(meta.model).linears, Pattern.parse(pattern))
    rotation = find_rotation(meta, checkpoint, patterns, run_once(meta.model))
    return rotate_checkpoint(checkpoint, rotation, patterns, IDS, kept, CPU, steps)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def change(made: RotatedCheckpoint, source: Path) -> list[str]:
    return [name for name in made.files if not torch.equal(made.tensor(name), Checkpoint(source).tensor(name))]


@pytest.mark.parametrize(
    ("name", "changes", "same"),
    [
        (
            "llama",
            {"attention_bias": True, "mlp_bias": True},
            ("q_proj.b", "k_proj.b", "v_proj.b", "e_proj.b", "up_proj.b"),
        ),
        ("llama", {"hidden_size": 96, "head_dim": 24}, ()),
        ("qwen2", {}, ("q_proj.b", "k_proj.b", "v_proj.b")),
        ("qwen3", {}, ("q_norm.w", "k_norm.w")),
        ("mistral", {}, ()),
        ("phi3", {}, ()),
        ("granite", {"residual_multiplier": 0.3, "embedding_multiplier": 5.0, "tie_word_embeddings": False}, ()),
    ],
)
def test_the_float_model_computes_what_it_did(
    name: str, changes: dict[str, Any], same: tuple[str, ...], tmp_path: Path
) -> None:
    """With biases, norms of heads, joined linears, multipliers, and a width that is no power of two."""
    model = make_uneven(tmp_path, name, **changes)
    before = logits(model)
    made = rotated(tmp_path / "m", tmp_path / "kept")
    changed = change(made, tmp_path / "m")
    assert {key for key in made.files if key not in changed} == {
        key for key in made.files if any(end in key for end in same)
    }
    for key in changed:
        model.get_parameter(key).data.copy_(made.tensor(key))
    assert torch.allclose(logits(model), before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))
    assert bool((model.model.norm.weight == 1).all())


@pytest.mark.parametrize(
    ("name", "changes", "got"),
    [
        ("gemma2", {}, "model.layers.0.post_attention_layernorm, which not only linears"),
        ("gemma", {}, "another result of model.norm; needed what it computes, rotated"),
        ("olmo2", {}, "model.layers.0.self_attn.q_norm, which not only linears read"),
        ("cohere", {"tie_word_embeddings": False}, "another result of model.norm"),
        ("gpt-neox", {}, "gpt_neox.layers.0.input_layernorm with a bias; needed RMSNorms with a gain"),
        ("opt", {"tie_word_embeddings": False}, "with a bias"),
        ("mpt", {"n_layers": 6, "tie_word_embeddings": False}, "another result of transformer.norm_f"),
        ("bloom", {}, "transformer.word_embeddings_layernorm, which not only linears read"),
        ("mixtral", {}, "routers that read it"),
    ],
)
def test_other_models_are_refused_in_one_line_and_nothing_is_left(
    name: str, changes: dict[str, Any], got: str, tmp_path: Path
) -> None:
    make_uneven(tmp_path, name, **changes)
    add_tokenizer(tmp_path / "m")
    write_text(tmp_path / "text.txt")
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError, match=f"the stream of .* cannot be rotated; got .*{got}.*leave out --rotate") as no:
        prune_checkpoint(tmp_path / "m", tmp_path / "made", options(tmp_path / "m", dtype="fp32"))
    assert "\n" not in str(no.value)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-tied"])
def test_a_tied_output_embedding_gets_weights_of_its_own(name: str, tmp_path: Path) -> None:
    before = logits(make_uneven(tmp_path, name))
    add_tokenizer(tmp_path / "m")
    write_text(tmp_path / "text.txt")
    layers = {r"re:.*layers\.1\.mlp\.down_proj": "30:32@10%", "re:.*": "dense"}
    given = options(tmp_path / "m", dtype="fp32", layers=layers)
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "made", given)
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    assert not made.config.tie_word_embeddings
    assert made.lm_head.weight is not made.model.embed_tokens.weight
    assert not torch.equal(made.lm_head.weight, made.model.embed_tokens.weight)
    assert float((logits(made) - before).norm() / before.norm()) < 0.1
    assert summary.destination_bytes == summary.source_bytes + 4 * made.lm_head.weight.numel()
    assert (tmp_path / "made/model.safetensors").stat().st_size > summary.destination_bytes


def test_what_only_a_trial_shows_is_refused(tmp_path: Path) -> None:
    """BitNet has a norm between attention and its last linear, of the stream's width and not on the stream."""
    model: Any = make_checkpoint(tmp_path / "m", "bitnet", torch.float32, tie_word_embeddings=False)
    for layer in model.model.layers:
        layer.self_attn.attn_sub_norm.weight.data.uniform_(0.1, 3.0)
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match=r"got another result of model\.layers\.0; needed what it computes, rotated"):
        rotated(tmp_path / "m", tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def options(source: Path, **changes: Any) -> PruneOptions:
    text = Calibration(str(source.parent / "text.txt"), 4, 16)
    given: dict[str, Any] = {"pattern": "4:6", "dtype": "int8", "method": "sparsegpt", "calibration": text}
    return PruneOptions(**{**given, "rotate": 20, **changes})


def test_a_killed_run_goes_on_with_the_same_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    prune_checkpoint(source, tmp_path / "whole", options(source))
    interrupt(monkeypatch, RotatedCheckpoint, at=30)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoint(source, tmp_path / "again", options(source))
    monkeypatch.setattr(rotating, "learn", lambda *_, **__: pytest.fail("the rotation is learned a second time"))
    prune_checkpoint(source, tmp_path / "again", options(source))
    first, again = (Checkpoint(tmp_path / name) for name in ("whole", "again"))
    assert all(torch.equal(first.tensor(name), again.tensor(name)) for name in first.files)


def test_every_tensor_is_written_rotated_and_bf16_rounds_it_once(tmp_path: Path) -> None:
    """With 8:10 on one linear alone, all else is dense: the model is the source but for rounding."""
    model = make_uneven(tmp_path, "llama", torch.bfloat16).to(torch.float32)
    add_tokenizer(tmp_path / "m")
    write_text(tmp_path / "text.txt")
    layers = {r"re:.*layers\.1\.mlp\.down_proj": "8:10", "re:.*": "dense"}
    given = options(tmp_path / "m", dtype="bf16", pattern="8:10", layers=layers)
    prune_checkpoint(tmp_path / "m", tmp_path / "made", given)
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    before = logits(model)
    down = made.model.layers[1].mlp.down_proj.weight
    assert float((down == 0).float().mean()) > 0.19
    assert float((logits(made) - before).norm() / before.norm()) < 0.25
    # Without what was pruned, nothing is left but the rounding of weights.
    for one in (made, model):
        one.model.layers[1].mlp.down_proj.weight.data.zero_()
    before = logits(model)
    change = float((logits(made) - before).norm() / before.norm())
    assert 1e-5 < change < 0.02
    assert bool((made.model.layers[0].input_layernorm.weight == 1).all())
    card = (tmp_path / "made" / "README.md").read_text()
    assert "20 steps of learning a rotation and sparsegpt" in card
    assert "| stream | rotated: adapters made for the source do not fit, nor do draft models that read hidden" in card


def test_what_is_lost_falls(tmp_path: Path) -> None:
    """Of a model whose stream has few strong directions, as trained ones have."""
    source = make_source(tmp_path, "llama", torch.float32)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    scale = torch.logspace(0.5, -1.5, 64)[:, None] * torch.linalg.qr(torch.randn(64, 64))[0]
    model.model.embed_tokens.weight.data.copy_(model.model.embed_tokens.weight @ scale)
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data.copy_(scale.T @ linear.weight)
    model.save_pretrained(source)
    given = {"pattern": "2:4", "dtype": "fp32"}
    plain = prune_checkpoint(source, tmp_path / "plain", options(source, rotate=0, **given))
    turned = prune_checkpoint(source, tmp_path / "turned", options(source, rotate=60, **given))
    assert sum(turned.losses.values()) < 0.9 * sum(plain.losses.values())


def test_what_is_learned_from_is_the_model_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gains folded in, but not as the trial has rotated it."""
    model, learn, seen = make_uneven(tmp_path, "llama"), rotating.learn, list[Any]()

    def spy(start: torch.Tensor, sets: list[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.extend(sets)
        return learn(start, sets, *args, **kwargs)

    monkeypatch.setattr(rotating, "learn", spy)
    rotated(tmp_path / "m", tmp_path / "kept")
    expected = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        expected += [projections * layer.input_layernorm.weight]
        expected += [torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * layer.post_attention_layernorm.weight]
        expected += [attention.o_proj.weight, mlp.down_proj.weight]
    assert len(seen) == len(expected)
    for one, weight in zip(seen, expected, strict=True):
        torch.testing.assert_close(one.weight, weight)


def test_a_rotation_that_gains_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path, "llama", torch.float32)
    monkeypatch.setattr(rotating, "learn", lambda start, *_, **__: torch.eye(len(start)))
    with pytest.raises(InputError, match="gains nothing"):
        rotated(source, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "magnitude", "calibration": None}, "rotating needs calibration text; got --method magnitude"),
        ({"rotate": -1}, "steps of learning a rotation; got -1"),
        ({"smooth": True}, "--rotate and --smooth"),
        ({"layers": {"re:.*": "dense"}}, "rotating; got dense linears alone"),
    ],
)
def test_options_that_do_not_go_together(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    with pytest.raises(InputError, match=words):
        prune_checkpoint(source, tmp_path / "made", options(source, **changes))
    assert not list(tmp_path.glob("made*"))


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the stream is rotated by one process; got 2 processes"):
        prune_checkpoint(tmp_path / "m", tmp_path / "made", options(tmp_path / "m"), ranks=Ranks(0, 2))


def test_a_model_that_gives_nothing_is_refused(tmp_path: Path) -> None:
    model: Any = make_checkpoint(tmp_path / "m", "llama", torch.float32)
    for layer in model.model.layers:
        for linear in find_targets(layer).linears.values():
            linear.weight.data.zero_()
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match="rotating; got linears whose outputs are zero"):
        rotated(tmp_path / "m", tmp_path / "kept")


def test_a_source_in_8_bits_is_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    prune_checkpoint(source, tmp_path / "8", PruneOptions("dense", "int8"))
    config = json.loads((tmp_path / "8/config.json").read_text())
    del config[MARKER_KEY]
    (tmp_path / "8/config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="rotating; got a source in 8 bits"):
        prune_checkpoint(tmp_path / "8", tmp_path / "made", options(source))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    text = ["--calibration", str(tmp_path / "text.txt"), "--samples", "4", "--length", "16"]
    given = [
        "prune",
        str(source),
        str(tmp_path / "made"),
        "--pattern",
        "6:8",
        "--dtype",
        "bf16",
        "--rotate",
        "5",
        *text,
    ]
    assert main([*given, "--method", "wanda"]) == 0
    assert "5 steps of learning a rotation and wanda" in (tmp_path / "made" / "README.md").read_text()
    capsys.readouterr()
