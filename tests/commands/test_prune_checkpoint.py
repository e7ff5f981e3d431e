"""``slidesparse prune``: what comes out, and that nothing is lost when things go wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SMALL, by_magnitude, contents, edited_config, make_checkpoint, make_w8a8, prune_words, tokens
from safetensors.torch import load_file, save_file

import slidesparse
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError, InputError, PatternViolation
from slidesparse.files.json_files import write_json
from slidesparse.files.stored import Stored
from slidesparse.files.tensor_writer import TensorWriter
from slidesparse.layer.linear import SlideLinear
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse.weights.quant import dequantize
from slidesparse.weights.support import check_pattern, value_bits

INT8 = by_magnitude("6:8", "int8")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits.float()


# -- what comes out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_every_family_is_pruned_quantised_and_loaded(tmp_path: Path, name: str, dtype: str) -> None:
    make_checkpoint(tmp_path / "m", name, shard_size="60KB")
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", dtype))
    out = Checkpoint(tmp_path / "s")
    for layer in summary.patterns:
        weight = out.tensor(f"{layer}.weight")
        check_pattern(weight, "6:8", name=layer)
        scale = out.tensor(f"{layer}.weight_scale")
        source = Checkpoint(tmp_path / "m").tensor(f"{layer}.weight").float()
        kept = weight.float() != 0
        # Half a step of INT8; e4m3 has a 3-bit mantissa, so half a step is 1/16 of the value.
        limit = scale.expand_as(source) * 0.5001 if dtype == "int8" else source.abs() / 16 + scale
        assert bool(((dequantize(weight, scale) - source).abs() <= limit)[kept].all())
    sparse, dense = (slidesparse.load(tmp_path / "s", backend=backend) for backend in ("reference", "dense"))
    if dtype == "int8":
        assert torch.equal(logits(sparse), logits(dense))
    else:
        torch.testing.assert_close(logits(sparse), logits(dense), rtol=0.05, atol=0.05)


def test_against_vllm_formulas_in_numpy(tmp_path: Path) -> None:
    """One layer of the loaded model, computed with vLLM's formulas from the stored numbers."""
    make_checkpoint(tmp_path / "m", "qwen2", torch.float32)
    prune_checkpoint(tmp_path / "m", tmp_path / "s", INT8)
    stored = Checkpoint(tmp_path / "s")
    name = "model.layers.0.self_attn.q_proj"
    layer = slidesparse.load(tmp_path / "s", backend="reference").get_submodule(name)
    x = torch.randn(9, SMALL["hidden_size"], generator=torch.Generator().manual_seed(5))
    absmax = np.abs(x.numpy()).max(1, keepdims=True)
    q = np.rint(x.numpy() * (np.float32(127) / absmax)).astype(np.int64)
    accumulator = q @ stored.tensor(f"{name}.weight").numpy().astype(np.int64).T
    scale_w = stored.tensor(f"{name}.weight_scale").numpy().reshape(1, -1)
    bias = stored.tensor(f"{name}.bias").numpy()
    expected = (absmax / np.float32(127)) * (scale_w * accumulator.astype(np.float32)) + bias
    assert np.array_equal(layer(x).numpy(), expected)


def test_exceptions_and_ignore_and_dense_layers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    layers = {"re:.*down_proj": "8:10", "model.layers.0.self_attn.o_proj": "dense"}
    options = by_magnitude("6:8", "int8", layers=layers, ignore=("re:.*layers.1.self_attn.*",))
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    marker = json.loads((tmp_path / "s/config.json").read_text())[MARKER_KEY]
    assert marker["layers"] == {
        "model.layers.0.self_attn.o_proj": "dense",
        "model.layers.0.mlp.down_proj": "8:10",
        "model.layers.1.mlp.down_proj": "8:10",
    }
    ignored = [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"]
    assert sorted(marker["ignore"]) == sorted([*ignored, "lm_head"]) == sorted(summary.dense)
    out = Checkpoint(tmp_path / "s")
    for name in ignored:
        assert torch.equal(out.tensor(f"{name}.weight"), Checkpoint(tmp_path / "m").tensor(f"{name}.weight"))
    check_pattern(out.tensor("model.layers.0.mlp.down_proj.weight"), "8:10")
    dense = out.tensor("model.layers.0.self_attn.o_proj.weight")
    assert dense.dtype == torch.int8
    with pytest.raises(PatternViolation):
        check_pattern(dense, "6:8")
    loaded = slidesparse.load(tmp_path / "s")
    assert str(loaded.model.layers[0].self_attn.o_proj.pattern) == "dense"
    assert type(loaded.model.layers[1].self_attn.q_proj) is torch.nn.Linear


def test_pruning_without_quantising_keeps_the_kept_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", dtype=torch.float16)
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "fp16"))
    source, out = Checkpoint(tmp_path / "m"), Checkpoint(tmp_path / "s")
    name = "model.layers.0.mlp.up_proj.weight"
    dense, sparse = source.tensor(name), out.tensor(name)
    assert torch.equal(sparse, torch.where(sparse != 0, dense, 0))
    assert (sparse == 0).float().mean() == 0.25
    assert "quantization_config" not in out.config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "s", dtype=torch.float16).eval()
    torch.testing.assert_close(logits(slidesparse.load(tmp_path / "s")), logits(theirs), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_quantised_source_keeps_its_numbers(tmp_path: Path, dtype: str) -> None:
    """W8A8 in, W8A8 out: kept weights and scales are those of the source, to the bit."""
    make_checkpoint(tmp_path / "m")
    make_w8a8(tmp_path / "m", tmp_path / "w8a8", dtype)
    prune_checkpoint(tmp_path / "w8a8", tmp_path / "s", by_magnitude("4:6"))
    source, out = Checkpoint(tmp_path / "w8a8"), Checkpoint(tmp_path / "s")
    assert out.config["quantization_config"] == source.config["quantization_config"]
    name = "model.layers.1.mlp.down_proj"
    dense, sparse = source.tensor(f"{name}.weight").float(), out.tensor(f"{name}.weight").float()
    check_pattern(out.tensor(f"{name}.weight"), "4:6")
    assert torch.equal(sparse, torch.where(sparse != 0, dense, 0.0))
    assert torch.equal(source.tensor(f"{name}.weight_scale"), out.tensor(f"{name}.weight_scale"))
    slidesparse.load(tmp_path / "s")


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_six_bits_are_int8_that_everything_loads(tmp_path: Path, pattern: str) -> None:
    make_checkpoint(tmp_path / "m", "llama")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude(pattern, "int8", rounding="6bit"))
    prune_checkpoint(tmp_path / "m", tmp_path / "e", by_magnitude(pattern, "int8"))
    six, eight = Checkpoint(tmp_path / "s"), Checkpoint(tmp_path / "e")
    assert six.config["quantization_config"] == eight.config["quantization_config"]
    name = "model.layers.0.self_attn.q_proj"
    values, scale = six.tensor(f"{name}.weight"), six.tensor(f"{name}.weight_scale")
    assert value_bits(values) == 6
    check_pattern(values, pattern)
    exact = dequantize(eight.tensor(f"{name}.weight"), eight.tensor(f"{name}.weight_scale"))
    assert bool(((dequantize(values, scale) - exact).abs() <= 2.5 * scale).all())  # half a step of each
    told = {path: inspect_checkpoint(tmp_path / path) for path in ("s", "e")}
    assert [{layer.bits for layer in one.layers} for one in told.values()] == [{6}, {8}]
    line = "14 layers of six bits a value: a Hopper GPU keeps 0.8 of the 2:4 MB, or 0.75 of a dense layer's"
    assert [line in one.describe() for one in told.values()] == [True, False]
    slidesparse.load(tmp_path / "s")


def test_bitnet_master_becomes_ternary(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", "bitnet")
    with pytest.raises(InputError, match="--rounding ternary"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", INT8)
    prune_checkpoint(tmp_path / "m", tmp_path / "s", replace(INT8, rounding="ternary"))
    source, out = Checkpoint(tmp_path / "m"), Checkpoint(tmp_path / "s")
    name = "model.layers.0.self_attn.q_proj"
    weight, scale = out.tensor(f"{name}.weight"), out.tensor(f"{name}.weight_scale")
    assert set(weight.unique().tolist()) == {-4, 0, 4}
    check_pattern(weight, "6:8")
    master = source.tensor(f"{name}.weight").float()
    assert torch.equal(scale, master.abs().mean().expand(len(weight), 1) / 4)
    ternary = 4 * (master / master.abs().mean()).round().clamp(-1, 1)
    assert torch.equal(weight.float()[weight != 0], ternary[weight != 0])
    assert out.config["quantization_config"]["quant_method"] == "compressed-tensors"
    slidesparse.load(tmp_path / "s")


def test_layers_of_a_quantised_source_that_are_left_alone_stay_quantised(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "float")
    source = make_w8a8(tmp_path / "float", tmp_path / "w8a8")
    name = "model.layers.0.self_attn.o_proj"  # which no server joins with others
    prune_checkpoint(source, tmp_path / "s", by_magnitude("6:8", ignore=(name,)))
    assert json.loads((tmp_path / "s/config.json").read_text())[MARKER_KEY]["layers"] == {name: "dense"}
    assert torch.equal(Checkpoint(source).tensor(f"{name}.weight"), Checkpoint(tmp_path / "s").tensor(f"{name}.weight"))
    assert torch.isfinite(slidesparse.load(tmp_path / "s")(tokens()).logits).all()


def test_flat_scales_of_a_square_layer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "float")
    source = make_w8a8(tmp_path / "float", tmp_path / "w8a8")
    name = "model.layers.0.self_attn.q_proj"
    spoil(source, f"{name}.weight_scale", Checkpoint(source).tensor(f"{name}.weight_scale").flatten())
    prune_checkpoint(source, tmp_path / "s", by_magnitude("6:8"))
    dense, sparse = (Checkpoint(path).tensor(f"{name}.weight") for path in (source, tmp_path / "s"))
    assert torch.equal(sparse, torch.where(sparse != 0, dense, 0))
    assert torch.isfinite(slidesparse.load(tmp_path / "s")(tokens()).logits).all()


def test_ignore_entries_of_a_quantised_source_may_match_nothing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "float")
    source = make_w8a8(tmp_path / "float", tmp_path / "w8a8")
    with edited_config(source) as config:
        config["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate$"]
        config["compression_config"] = config.pop("quantization_config")  # the key of old files
    prune_checkpoint(source, tmp_path / "s", by_magnitude("6:8"))
    assert torch.isfinite(slidesparse.load(tmp_path / "s")(tokens()).logits).all()


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"pattern": "2:4"}, "use --pattern 4:6"),
        ({"lm_head": True}, "leave out --lm-head"),
        ({"layers": {"re:.*o_proj": "4:6"}}, "leave out --layer re:.*o_proj=4:6"),
        ({"ignore": (), "layers": {"re:.*down_proj": "4:6"}}, "leave out --layer re:.*down_proj=4:6"),
        (
            {"layers": {"model.layers.0.self_attn.o_proj": "4:6"}},
            "leave out --layer model.layers.0.self_attn.o_proj=4:6",
        ),
    ],
)
def test_what_is_pruned_in_floats_keeps_its_patterns(tmp_path: Path, changes: dict[str, Any], remedy: str) -> None:
    """What was left dense, or kept more, would lose weights by magnitude, and nobody would be told."""
    make_checkpoint(tmp_path / "m")
    options = {"pattern": "4:6", "ignore": ("re:.*down_proj",), "layers": {"re:.*o_proj": "6:8"}}
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude(dtype="bf16", **options))
    prune_checkpoint(tmp_path / "s", tmp_path / "t", by_magnitude(dtype="int8", **options))
    told = prune_checkpoint(tmp_path / "s", tmp_path / "kept", by_magnitude("4:6", "int8"))
    assert {name.rpartition(".")[2] for name, pattern in told.patterns.items() if pattern == "6:8"} == {"o_proj"}
    assert contents(tmp_path / "t") == contents(tmp_path / "kept")
    with pytest.raises(InputError, match=rf"pattern of .*; got .* is pruned; {re.escape(remedy)}$"):
        prune_checkpoint(tmp_path / "s", tmp_path / "u", by_magnitude(dtype="int8", **{**options, **changes}))


@pytest.mark.parametrize("rounding", ["absmax", "6bit"])
def test_what_is_pruned_in_floats_is_rounded_once(tmp_path: Path, rounding: Any) -> None:
    """One shot takes long, and whoever trains a model on has its mark too; the result is that of the plain weights."""
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("4:6", "bf16"))
    rounded = by_magnitude("4:6", "int8", rounding=rounding)
    prune_checkpoint(tmp_path / "s", tmp_path / "t", rounded)
    pruned, after = (Checkpoint(tmp_path / name).tensor("model.layers.0.mlp.up_proj.weight") for name in "st")
    assert bool((after[pruned == 0] == 0).all())
    assert float((after == 0).float().mean()) < 0.4
    with pytest.raises(CheckpointError, match=r"t is pruned and quantised already; .* pruned in a float type$"):
        prune_checkpoint(tmp_path / "t", tmp_path / "u", rounded)
    with edited_config(tmp_path / "s") as config:
        del config["slidesparse_config"]
    prune_checkpoint(tmp_path / "s", tmp_path / "plain", rounded)
    assert (tmp_path / "t/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (by_magnitude("6:8", "int8", rounding="4bit"), "absmax or ternary or 6bit"),  # type: ignore[arg-type] # a user's
        (by_magnitude("6:8", "int8", layers={"o_proj": "4:6"}), "matches no treated layer"),
        (by_magnitude("4:6@50%", "int8"), "not a pattern; got '4:6@50%'; needed"),
    ],
)
def test_bad_options(tmp_path: Path, options: PruneOptions, words: str) -> None:
    make_checkpoint(tmp_path / "m")
    with pytest.raises(InputError, match=words):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


# -- when it is interrupted ----------------------------------------------------------------------------------------


def test_disk_full_in_the_middle_then_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "m", shard_size="60KB")
    before = contents(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "whole", INT8)
    write, written = TensorWriter.write, []

    def full(self: TensorWriter, name: str, tensor: torch.Tensor) -> None:
        written.append(self.path.name)
        if len(set(written)) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(TensorWriter, "write", full)
        with pytest.raises(CheckpointError, match="is full"):
            prune_checkpoint(tmp_path / "m", tmp_path / "s", INT8)
    assert not (tmp_path / "s").exists()
    with pytest.raises(CheckpointError, match="another run"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", replace(INT8, pattern="4:6"))
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", INT8)
    assert len(summary.resumed) == 2
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")
    assert contents(tmp_path / "m") == before
    assert not (tmp_path / "s.partial").exists()


# -- loading what is not right -------------------------------------------------------------------------------------


def spoil(path: Path, name: str, value: torch.Tensor) -> None:
    """Replace one tensor of a single-file checkpoint."""
    tensors = load_file(path / "model.safetensors")
    tensors[name] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_a_weight_that_violates_its_mark(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", INT8)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = Checkpoint(tmp_path / "s").tensor(name)
    weight[7, 16:24] = 1
    spoil(tmp_path / "s", name, weight)
    with pytest.raises(PatternViolation, match=f"{name} violates 6:8 at row 7, group 2 .*got 8 non-zeros"):
        slidesparse.load(tmp_path / "s")


def test_load_needs_a_marker(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointError, match="slidesparse prune"):
        slidesparse.load(tmp_path / "m")


def test_generation_settings_are_loaded(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    (tmp_path / "m/generation_config.json").write_text('{"eos_token_id": [2, 7, 9]}')
    prune_checkpoint(tmp_path / "m", tmp_path / "s", replace(INT8, lm_head=True))
    model = slidesparse.load(tmp_path / "s")
    assert model.generation_config.eos_token_id == [2, 7, 9]
    assert isinstance(model.lm_head, SlideLinear)
    check_pattern(Checkpoint(tmp_path / "s").tensor("lm_head.weight"), "6:8")
    for wrong in ("[" * 100_000, '{"cache_implementation": "none such"}'):
        (tmp_path / "s/generation_config.json").write_text(wrong)
        with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be"):
            slidesparse.load(tmp_path / "s")


# -- memory --------------------------------------------------------------------------------------------------------

GROWTH = 300_000_000
"""Bytes. Pruning takes some 200 MB, however large the checkpoint, besides the 440 MB of torch and transformers."""


@pytest.mark.slow
def test_memory_grows_by_less_than_the_checkpoint(tmp_path: Path) -> None:
    """A checkpoint larger than the limit goes through, in a process that may not grow by its size."""
    path = tmp_path / "m"
    path.mkdir()
    config = transformers.LlamaConfig(
        **{**SMALL, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    )
    config.architectures = ["LlamaForCausalLM"]
    write_json(path / "config.json", config.to_dict())
    with torch.device("meta"):
        parameters = transformers.LlamaForCausalLM(config).named_parameters()
        stored = {name: Stored("BF16", tuple(p.shape)) for name, p in parameters}
    noise = torch.randn(4096 * 1024).to(torch.bfloat16)
    with TensorWriter(path / "model.safetensors", stored) as writer:
        for name, entry in stored.items():
            writer.write(name, noise[: entry.n_bytes // 2].view(entry.shape))
    assert Checkpoint(path).n_bytes > 1.2 * GROWTH
    # VmHWM is this program's own peak in kB; ru_maxrss would begin with that of the process that started it.
    code = """
import re, sys
from slidesparse.cli import main
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import prune_checkpoint
from transformers import LlamaForCausalLM
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
failed = main()
print(peak() - before, file=sys.stderr)
sys.exit(failed)
"""
    arguments = prune_words(path, tmp_path / "s", "--dtype", "int8")
    run = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    assert int(run.stderr.splitlines()[-1]) * 1024 < GROWTH


def test_latent_attention_keeps_the_weight_that_servers_read(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4},
        first_k_dense_replace=2,  # no experts
        **{"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    )
    transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    name = "model.layers.0.self_attn.kv_b_proj"
    assert summary.dense[name] == "latent attention reads its weight without calling it"
    written = Checkpoint(tmp_path / "s").config
    assert name in written[MARKER_KEY]["ignore"]
    assert name in written["quantization_config"]["ignore"]
    stored = load_file(tmp_path / "s/model.safetensors")
    assert torch.equal(stored[f"{name}.weight"], load_file(tmp_path / "m/model.safetensors")[f"{name}.weight"])
    assert stored["model.layers.0.self_attn.o_proj.weight"].dtype == torch.int8
    slidesparse.load(tmp_path / "s", backend="reference")(tokens())
