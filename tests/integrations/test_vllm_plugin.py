"""The plugin inside vLLM's real Python: its configuration, its model loader, its parallel layers; no GPU, no kernels.

The reference backend multiplies, exactly for INT8, so a layer of vLLM's must give the bits of the formula.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import by_magnitude
from vllm_models import REFERENCE, configured, loaded, loaded_by

import slidesparse as ss
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import CheckpointError, PatternViolation, UnsupportedError
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.integrations.names import NamedLayer
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.options import Options
from slidesparse.integrations.vllm.releases import describe_tested, parse_version
from slidesparse.integrations.vllm.status import Outcome
from slidesparse.models.config_keys import MARKER_KEY, quantization_config
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import quantize_rows, quantize_weight

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

KINDS = ("weight", "weight_scale")


def edited(path: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other entries in config.json; None takes one away."""
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def marked(path: Path, folder: Path, pattern: str, layers: Mapping[str, str] | None = None) -> Path:
    """A copy of a checkpoint with another marker; ``layers`` are those of the first decoder layer that differ."""
    named = {f"model.layers.0.{name}": other for name, other in (layers or {}).items()}
    marker = {"version": 1, "pattern": pattern, "ignore": ["lm_head"], "layers": named}
    return edited(path, folder, **{MARKER_KEY: marker})


def oracle(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A quantised linear by its formula: x bf16 [M, K], weight int8 [out, K], scale [out]."""
    values, scale_x = quantize_rows(x, torch.int8)
    return apply_scales(product(values, weight), scale_x, scale.flatten(), None, torch.bfloat16)


# -- which checkpoints ---------------------------------------------------------------------------------------------


def test_a_marker_that_cannot_be_read_stops_before_anything_is_loaded(checkpoints: Any, tmp_path: Path) -> None:
    marker = {"version": 3, "pattern": "6:8", "ignore": [], "layers": {}}
    with pytest.raises(CheckpointError, match=r"version of slidesparse_config.*upgrade"):
        configured(edited(checkpoints("6:8"), tmp_path / "broken", **{MARKER_KEY: marker}))


def test_what_cannot_work_is_refused_early(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.interface import DeviceCapability

    from slidesparse.integrations.vllm import config

    platform = type(config.current_platform)
    monkeypatch.setattr(platform, "get_device_capability", lambda *_, **__: DeviceCapability(7, 5))
    with pytest.raises(UnsupportedError, match=r"on this GPU; got.*7.5.*--quantization compressed-tensors"):
        configured(checkpoints("6:8"))
    monkeypatch.setattr(config.metadata, "version", lambda name: "0.19.1")
    with pytest.raises(UnsupportedError, match=r"with this vLLM; got 0.19.1.*pip install"):
        configured(checkpoints("6:8"))


@pytest.mark.parametrize(("version", "warned"), [("0.33rc1", False), ("0.1.dev123+g0a1b2c3", True)])
def test_a_version_that_was_not_tried_is_a_line_in_the_log(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warned: bool
) -> None:
    from slidesparse.integrations.vllm import config

    monkeypatch.setattr(config.metadata, "version", lambda name: version)
    assert configured(checkpoints("6:8")).quantization == "slidesparse"
    told = f"slidesparse was tested with vLLM {describe_tested()}; this is {version}"
    assert caplog.messages.count(told) == warned


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    from vllm.plugins import load_plugins_by_group

    from slidesparse.integrations.vllm import register

    if not metadata.entry_points(group="vllm.general_plugins", name="slidesparse"):
        pytest.skip("slidesparse is on the path without being installed")
    assert load_plugins_by_group("vllm.general_plugins")["slidesparse"] is register


def test_registering_again_changes_nothing() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    from slidesparse.integrations.vllm import register

    before = get_quantization_config("slidesparse")
    register()
    assert get_quantization_config("slidesparse") is before
    assert QUANTIZATION_METHODS.count("slidesparse") == 1


# -- whole models through vLLM's loader ----------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_layers_that_vllm_loaded_give_the_bits_of_the_formula(checkpoints: Any, pattern: str) -> None:
    path = checkpoints(pattern)
    layer = loaded(configured(path), REFERENCE).model.layers[0]
    tensors = Checkpoint(path)
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(0)).bfloat16()

    def stored(*names: str) -> tuple[torch.Tensor, torch.Tensor]:
        prefix = "model.layers.0"
        weight, scale = (
            torch.cat([tensors.tensor(f"{prefix}.{name}.{what}") for name in names])
            for what in ("weight", "weight_scale")
        )
        return weight, scale

    fused = layer.mlp.gate_up_proj(x)[0]
    assert torch.equal(fused, oracle(x, *stored("mlp.gate_proj", "mlp.up_proj")))
    q, bias = stored("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.self_attn.qkv_proj.bias
    values, scale_x = quantize_rows(x, torch.int8)
    with_bias = apply_scales(product(values, q[0]), scale_x, q[1].flatten(), bias, torch.bfloat16)
    assert torch.equal(layer.self_attn.qkv_proj(x)[0], with_bias)
    assert torch.equal(layer.self_attn.o_proj(x)[0], oracle(x, *stored("self_attn.o_proj")))
    assert not hasattr(layer.mlp.down_proj, "weight")  # the dense weight is gone
    assert layer.mlp.down_proj.requires_unquantized_input
    assert layer.mlp.down_proj.slide.pattern == Pattern.parse(pattern)


def test_activations_come_as_they_are_to_packed_layers_alone(vllm_config: Any) -> None:
    """The attribute is what vLLM 0.33 asks before it quantises an activation for the linear after it."""
    vllm_config.additional_config = REFERENCE
    config, ones = registered()(), torch.ones(32, 64)
    sparse = replicated(config, "down_proj", ones * ss.prune_mask(ones, "6:8"))
    dense = replicated(config, "o_proj", ones)
    assert hasattr(sparse, "slide")
    assert not hasattr(dense, "slide")
    assert [getattr(layer, "requires_unquantized_input", False) for layer in (sparse, dense)] == [True, False]
    if (parse_version(metadata.version("vllm")) or (1, 0)) >= (0, 33):
        from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key

        for layer in (sparse, dense):
            layer._input_quant_key = "a kernel's"
        assert [get_input_quant_key(layer) for layer in (sparse, dense)] == [None, "a kernel's"]


def test_blocks_are_given_back_when_the_dense_weight_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from slidesparse.integrations.vllm import scheme

    layer, shape = torch.nn.Module(), (48, 40)
    weight = torch.randint(1, 99, shape) * ss.prune_mask(torch.ones(shape), "6:8")
    layer.weight = torch.nn.Parameter(weight.to(torch.int8), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.ones(48, 1), requires_grad=False)
    where, alive = layer.weight.data_ptr(), list[int]()

    def give_back(_: torch.device) -> None:
        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.dtype == torch.int8]
        alive.append(sum(one.shape == shape and one.data_ptr() == where for one in tensors))

    monkeypatch.setattr(scheme, "give_blocks_back", give_back)
    state = ModelState(Options(backend="reference"))
    assert scheme.pack_layer(layer, NamedLayer("up", Pattern(6, 8)), 40, state)
    before_the_packed_weight, after = alive
    assert before_the_packed_weight > 0
    assert after == 0
    assert layer.slide.unpack().shape == shape


def test_a_float_checkpoint_runs_with_the_flag(checkpoints: Any) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    path = checkpoints("6:8", torch.bfloat16)
    layer = loaded(configured(path, quantization="slidesparse"), REFERENCE).model.layers[0]
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = Checkpoint(path).tensor("model.layers.0.mlp.down_proj.weight")
    expected = torch.nn.functional.linear(x.float(), weight.float()).bfloat16()
    torch.testing.assert_close(layer.mlp.down_proj(x)[0], expected)
    assert layer.mlp.down_proj.slide.weight_dtype == torch.bfloat16
    # vLLM's models ask for the class before they read a layer's weight in kernels of their own.
    assert not hasattr(layer.mlp.down_proj, "weight")
    assert not isinstance(layer.mlp.down_proj.quant_method, UnquantizedLinearMethod)


@pytest.mark.parametrize("reads", [True, False])
def test_a_weight_that_vllm_reads_in_a_kernel_of_its_own_stays(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reads: bool
) -> None:
    """A layer of DeepSeek-V3's that decided so when it was built; the real one needs 7168 columns and a GPU."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    monkeypatch.setattr(RowParallelLinear, "_use_min_latency_gemm", reads, raising=False)
    model = configured(checkpoints("6:8", torch.bfloat16), quantization="slidesparse", enforce_eager=True)
    layer = loaded(model, REFERENCE).model.layers[0]
    assert hasattr(layer.mlp.down_proj, "weight") == reads
    assert hasattr(layer.mlp.gate_up_proj, "slide")
    said = "mlp.down_proj: dense, left to vLLM, which reads its weight in a kernel of its own"
    assert any(said in line for line in caplog.messages) == reads


def test_without_a_marker_the_pattern_is_found(checkpoints: Any, tmp_path: Path) -> None:
    plain = edited(checkpoints("4:6"), tmp_path / "plain", **{MARKER_KEY: None})
    layer = loaded(configured(plain, quantization="slidesparse"), REFERENCE).model.layers[0]
    assert layer.self_attn.o_proj.slide.pattern == Pattern(4, 6)


@pytest.mark.usefixtures("no_dense_kernels")
def test_auto_leaves_to_vllm_what_it_cannot_run_faster(checkpoints: Any, caplog: pytest.LogCaptureFixture) -> None:
    layer = loaded(configured(checkpoints("6:8"), enforce_eager=True), {}).model.layers[0]
    assert not hasattr(layer.mlp.down_proj, "slide")
    assert "slidesparse: 0 of 4 layers run sparse" in caplog.messages
    assert any("mlp.down_proj: dense, 6:8; hopper: it needs a CUDA device" in line for line in caplog.messages)
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "slidesparse:" in r.msg)
    assert "none of the 4 layers that could run sparse does (6:8; hopper: it needs a CUDA device" in warning


@pytest.mark.usefixtures("no_dense_kernels")
def test_a_layer_that_a_plan_leaves_dense_is_joined_like_the_others(
    checkpoints: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By whatever backend the others run: between two sparse linears vLLM's own would cost two kernels more."""
    left = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "dense")
    path = marked(checkpoints("6:8"), tmp_path / "planned", "6:8", left)
    stored = Checkpoint(path)
    layer = loaded(configured(path), REFERENCE).model.layers[0]
    assert layer.mlp.gate_up_proj.slide.choice.backends == ("dense",)
    assert layer.mlp.down_proj.slide.choice.backends == ("reference",)
    assert "slidesparse: 3 of 4 layers run sparse" in caplog.text
    told = "mlp.gate_up_proj: dense, as the checkpoint says; fused with the norm or activation before it"
    assert any(told in line for line in caplog.messages)
    parts = [stored.tensor(f"model.layers.0.mlp.{name}_proj.{kind}") for kind in KINDS for name in ("gate", "up")]
    x = torch.randn(5, parts[0].shape[1]).bfloat16()
    assert torch.equal(layer.mlp.gate_up_proj(x)[0], oracle(x, torch.cat(parts[:2]), torch.cat(parts[2:])))


def test_a_weight_that_belies_its_marker_is_an_error(checkpoints: Any, tmp_path: Path) -> None:
    lying = marked(checkpoints("6:8"), tmp_path / "lying", "2:4")
    with pytest.raises(PatternViolation, match=r"model\.layers\.0\.\w+\.\w+ violates 2:4 at row"):
        loaded(configured(lying), REFERENCE)


@pytest.mark.usefixtures("no_dense_kernels")
def test_a_float_checkpoint_without_any_pattern_is_an_error(checkpoints: Any) -> None:
    dense = configured(checkpoints("dense", torch.bfloat16), quantization="slidesparse", enforce_eager=True)
    with pytest.raises(UnsupportedError, match="no layer of this checkpoint satisfies any pattern"):
        loaded(dense, REFERENCE)


@pytest.mark.parametrize("quantization", ["slidesparse", "compressed-tensors"])
@pytest.mark.usefixtures("no_dense_kernels")
def test_a_pruned_output_embedding_is_loaded(checkpoints: Any, tmp_path: Path, quantization: str) -> None:
    """vLLM's output embedding is no linear: it takes a scale only where the quantisation names the layer."""
    source = checkpoints("dense", torch.bfloat16)
    prune_checkpoint(source, tmp_path / "sparse", by_magnitude("6:8", "int8", lm_head=True))
    head = loaded(configured(tmp_path / "sparse", quantization=quantization), REFERENCE).lm_head
    stored = [Checkpoint(tmp_path / "sparse").tensor(f"lm_head.{name}") for name in ("weight", "weight_scale")]
    if quantization == "compressed-tensors":
        assert torch.equal(head.weight, stored[0])
        assert torch.equal(head.weight_scale, stored[1])
        return
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(head.quant_method.apply(head, x), oracle(x, *stored))
    # Where it stays dense it is left to vLLM: no graph holds it, so nothing would be joined with it.
    model = loaded(configured(tmp_path / "sparse"), {})
    assert hasattr(model.model.layers[0].mlp.down_proj, "slide")
    assert not hasattr(model.lm_head, "slide")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.usefixtures("no_dense_kernels")
def test_a_draft_model_keeps_what_its_checkpoint_says_of_single_layers(
    checkpoints: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    """vLLM puts a word of its own before the names of all layers of a draft model."""
    from vllm.config import VllmConfig

    exceptions = {"mlp.down_proj": "2:4", "self_attn.o_proj": "dense"}
    path = marked(checkpoints("2:4", dtype), tmp_path / "planned", "6:8", exceptions)
    model = configured(path, quantization="slidesparse", enforce_eager=True)
    config = VllmConfig(model_config=model, additional_config=REFERENCE)
    layer = loaded_by(config, prefix="draft_model").model.layers[0]
    assert layer.mlp.down_proj.slide.pattern == Pattern(2, 4)
    assert layer.mlp.gate_up_proj.slide.pattern == Pattern(6, 8)
    assert not hasattr(layer.self_attn.o_proj, "slide")


def test_models_that_ask_for_compressed_tensors_meet_it() -> None:
    """vLLM's Gemma 4 loads a vision tower quantised by that name alone, where 64 does not divide its sizes."""
    assert registered().from_config(quantization_config(torch.int8, [])).get_name() == "compressed-tensors"


def test_a_layer_that_was_left_to_vllm_is_left_to_it_again(vllm_config: Any) -> None:
    """Graphs of vLLM's own kernel may have been captured, whatever pattern the new weight has."""
    vllm_config.additional_config = REFERENCE
    config = registered()()
    layer = replicated(config, "o_proj", torch.ones(32, 64))
    sparse = torch.ones(32, 64) * ss.prune_mask(torch.ones(32, 64), "6:8")
    outcomes = config.prepare_model().status.outcomes
    outcomes["other"] = outcomes.pop("o_proj")
    layer.weight.data.copy_(sparse)
    layer.quant_method.process_weights_after_loading(layer)
    assert not hasattr(layer, "slide")
    assert layer.quant_method.converted is False


def replicated(config: Any, name: str, weight: torch.Tensor) -> Any:
    """An unquantised layer of vLLM's, loaded; one with a pattern was loaded before it."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    out, columns = weight.shape
    settings = {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16}
    config.prepare_model().status.outcomes["before"] = Outcome(True, True, "6:8")
    layer = ReplicatedLinear(columns, out, prefix=name, **settings)
    layer.weight.weight_loader(layer.weight, weight.bfloat16())
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("marked", [False, True])
def test_latent_attention_finds_its_weight(vllm_config: Any, marked: bool) -> None:
    """Also of a checkpoint that an older release pruned, whose marker names the layer."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    vllm_config.additional_config = REFERENCE
    marker = {"version": 1, "pattern": "6:8", "ignore": [], "layers": {}} if marked else None
    config = config_of(marker)
    weight = torch.rand(64, 32) + 1
    weight *= ss.prune_mask(weight, "6:8")
    name = "model.layers.0.self_attn.kv_b_proj"
    layer = replicated(config, name, weight)
    assert torch.equal(get_and_maybe_dequant_weights(layer), weight.bfloat16())
    assert "latent attention" in config.prepare_model().status.outcomes[name].text
    assert hasattr(replicated(config, "model.layers.0.self_attn.o_proj", weight), "slide")


# -- shards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_cuts_groups_gives_the_bits_of_the_formula(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
    columns, half, pattern = 76, 38, "6:8"  # 38 is no multiple of 8
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, columns, generator=generator)
    values, scale = quantize_weight(weight * ss.prune_mask(weight, pattern), torch.int8)
    vllm_config.additional_config = REFERENCE
    marker = {"version": 1, "pattern": pattern, "ignore": [], "layers": {}}
    config = config_of(marker, quantization_config(torch.int8, []))
    layer = linear.RowParallelLinear(
        columns, 24, bias=False, quant_config=config, prefix="o_proj", params_dtype=torch.bfloat16, reduce_results=False
    )
    layer.weight.weight_loader(layer.weight, values)
    layer.weight_scale.weight_loader(layer.weight_scale, scale.reshape(-1, 1))
    layer.quant_method.process_weights_after_loading(layer)
    shard = slice(rank * half, (rank + 1) * half)
    x = torch.randn(3, half, generator=generator).bfloat16()
    assert torch.equal(layer(x)[0], oracle(x, values[:, shard], scale))


def config_of(marker: Any, quantised: dict[str, Any] | None = None) -> Any:
    """What vLLM makes of a checkpoint's marker and ``quantization_config``."""
    config = registered()() if quantised is None else registered().from_config(quantised)
    config.maybe_update_config("", hf_config=SimpleNamespace(**{MARKER_KEY: marker}))
    return config


def registered() -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config("slidesparse")
