"""Pruned mixtures of experts through vLLM's own loader: attention is packed, experts stay vLLM's, with every scale."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_mixtures import pruned_mixture
from tuning_fakes import ExpertTuner
from vllm_models import REFERENCE, configured, loaded, loaded_by, quantised_anew

from slidesparse import PatternViolation, UnsupportedError
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.integrations import experts as common
from slidesparse.integrations.names import NamedExperts
from slidesparse.integrations.vllm import experts
from slidesparse.integrations.vllm.experts import is_alone, loaded_experts, why_not, why_tokens_stay
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.models.config_keys import MARKER_KEY

pytestmark = pytest.mark.usefixtures("vllm_on_cpu", "without_expert_kernels")

SMALL: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64},
    **{"tie_word_embeddings": False, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
}
MODELS = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4},
    "Llama4ForCausalLM": {"num_local_experts": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1},
}
SHARED = {"Llama4ForCausalLM": [f"feed_forward.shared_expert.{leaf}" for leaf in ("down_proj", "gate_up_proj")]}
"""Linears of a layer that every token goes through, besides its attention."""


def pruned(path: Path, name: str, dtype: str, ignore: tuple[str, ...] = ()) -> Path:
    return pruned_mixture(path, name, SMALL | MODELS[name], dtype, ignore)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A pruned Qwen3 in INT8."""
    return pruned(tmp_path, "Qwen3MoeForCausalLM", "int8")


CASES = [
    ("MixtralForCausalLM", "int8", ()),
    *(("Qwen3MoeForCausalLM", dtype, ()) for dtype in ("int8", "fp8", "bf16")),
    ("Qwen3MoeForCausalLM", "int8", ("re:.*experts",)),
    ("Llama4ForCausalLM", "int8", ()),  # cut from tensors of all experts
]


def int8_method() -> Any:
    """vLLM's method for INT8 experts."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_moe

    module = import_module(f"{compressed_tensors_moe.__name__}.compressed_tensors_moe_w8a8_int8")
    return module.CompressedTensorsW8A8Int8MoEMethod


@pytest.fixture
def without_expert_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's methods for experts be made and loaded on a CPU; which kernel runs them is not asked here."""
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe as quantised
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    methods: list[Any] = [UnquantizedFusedMoEMethod]
    for kind in ("int8", "fp8"):
        module = import_module(f"{quantised.__name__}.compressed_tensors_moe_w8a8_{kind}")
        monkeypatch.setattr(module, f"select_{kind}_moe_backend", lambda *_, **__: (None, None))
        methods.append(getattr(module, f"CompressedTensorsW8A8{kind.title()}MoEMethod"))
    for method in methods:
        monkeypatch.setattr(method, "process_weights_after_loading", lambda *_: None)


def expected(path: Path, layer: int) -> dict[str, torch.Tensor]:
    """The experts of a layer as vLLM holds them, put together from the checkpoint by their names."""
    checkpoint = Checkpoint(path)
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in checkpoint.files:
        if f"layers.{layer}." not in name:
            continue
        if (place := re.search(r"experts\.(\d)\.(\w+)\.(weight\w*)$", name)) is not None:
            kind = "w2" if place[2] in ("w2", "down_proj") else "w13"
            second = place[2] in ("w3", "up_proj")
            parts = found.setdefault(f"{kind}_{place[3]}", {}).setdefault(place[1], [])
            parts.insert(len(parts) if second else 0, checkpoint.tensor(name))
    return {key: torch.stack([torch.cat(each[str(e)]) for e in range(4)]) for key, each in found.items()}


@pytest.mark.parametrize(("name", "dtype", "ignore"), CASES)
def test_attention_is_packed_and_experts_are_loaded(
    tmp_path: Path, name: str, dtype: str, ignore: tuple[str, ...]
) -> None:
    path = pruned(tmp_path, name, dtype, ignore)
    try:
        model = loaded(configured(path, quantization="slidesparse"), REFERENCE)
    except ValueError as error:
        if dtype == "fp8" and "Failed to find a kernel" in str(error):
            pytest.skip("this release has no FP8 linears for a CPU")
        raise
    packed = sorted(layer for layer, module in model.named_modules() if hasattr(module, "slide"))
    leaves = [*SHARED.get(name, []), "self_attn.o_proj", "self_attn.qkv_proj"]
    assert packed == [f"model.layers.{i}.{leaf}" for i in range(2) for leaf in leaves]
    state = model.state_dict()
    for layer in range(2):
        wanted = expected(path, layer)
        quantised = dtype != "bf16" and not ignore
        kinds = ("weight", "weight_scale") if quantised else ("weight",)
        assert wanted.keys() == {f"{matrix}_{kind}" for matrix in ("w13", "w2") for kind in kinds}
        for leaf, value in wanted.items():
            (found,) = (v for k, v in state.items() if f"layers.{layer}." in k and k.endswith(f".{leaf}"))
            assert torch.equal(found.reshape(value.shape).float(), value.float()), leaf
            assert found.dtype == value.dtype


SPARSE = {"slidesparse": {**REFERENCE["slidesparse"], "experts": "sparse"}}


def experts_of(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "w13_weight_scale")}


def assert_dense(model: Any, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """The experts of both layers are vLLM's, and the log says why."""
    assert [hasattr(layer, "w13_weight") for layer in experts_of(model).values()] == [True, True]
    assert f"mlp.experts: dense, {why} (2 layers)" in caplog.text


def test_experts_are_packed_on_request_and_compute_what_they_did(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(configured(path, quantization="slidesparse"), SPARSE)
    found = experts_of(model)
    assert len(found) == 2
    torch.manual_seed(1)
    x, chosen, weights = torch.randn(9, 128).bfloat16(), torch.rand(9, 4).argsort(1)[:, :2], torch.rand(9, 2)
    for index, layer in enumerate(found.values()):
        assert not hasattr(layer, "w13_weight")
        method = layer.quant_method
        assert type(method).__name__ == "CompressedTensorsW8A8Int8MoEMethod"
        assert method.maybe_make_prepare_finalize(routing_tables=None) is None
        with pytest.raises(UnsupportedError, match=r"loaded again into packed experts \(model.layers"):
            method.process_weights_after_loading(layer)
        y = method.apply(layer, x, weights, chosen.int(), None, None)
        dense = expected(path, index)
        weight = {k: dense[f"{k}_weight"].float() * dense[f"{k}_weight_scale"].float() for k in ("w13", "w2")}
        exact = torch.zeros(9, 128)
        for token, pair in enumerate(chosen.tolist()):
            for k, expert in enumerate(pair):
                gate, up = (weight["w13"][expert] @ x[token].float()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                exact[token] += weights[token, k] * (weight["w2"][expert] @ inner)
        assert (y.float() - exact).norm() < 0.03 * exact.norm()
        if index == 0:  # expert parallel: an expert that is elsewhere counts nothing
            elsewhere = SimpleNamespace(expert_map=torch.full((4,), -1, dtype=torch.int32))
            assert not method.apply(elsewhere, x, weights, chosen.int(), None, None).any()
    assert "6 of 6 layers run sparse" in caplog.text
    said = "mlp.experts: sparse, 4 experts, 6:8: grouped products for any number of tokens; asked for (2 layers)"
    assert said in caplog.text


@pytest.mark.parametrize("sparse", [True, False])
def test_auto_goes_by_the_times_of_both_forms(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sparse: bool
) -> None:
    def three_tokens(kind: Any) -> tuple[torch.Tensor, ...]:
        chosen = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
        return torch.ones(3, kind.hidden).bfloat16(), torch.full((3, 2), 0.5), chosen

    tuner, create = ExpertTuner(sparse, three_tokens), ModelState.create
    made = []

    def with_tuner(config: Any) -> Any:
        made.append(create(config))
        made[-1].tuner = tuner
        return made[-1]

    monkeypatch.setattr(ModelState, "create", with_tuner)
    monkeypatch.setattr(common, "choose_experts", tuner.choose)
    method = int8_method()
    kernel = SimpleNamespace(fused_experts=SimpleNamespace(consumes_expert_mask=False))
    processed = []

    def process(self: Any, layer: Any) -> None:
        assert hasattr(layer, "w13_weight")
        self.moe_kernel = kernel
        processed.append(layer)

    monkeypatch.setattr(method, "process_weights_after_loading", process)
    shared: list[torch.Tensor | None] = [None, torch.ones(1)]
    workspace = import_module("vllm.v1.worker.workspace")  # the real one: models that are imported from now on need it
    monkeypatch.setattr(workspace, "_manager", SimpleNamespace(_current_workspaces=shared))

    def apply(self: Any, layer: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
        shared[0] = torch.ones(9)  # as vLLM's experts do
        return x

    monkeypatch.setattr(method, "apply", apply)
    model = loaded(configured(path, quantization="slidesparse"), REFERENCE)
    assert shared == [None, torch.ones(1)]
    (seen,) = tuner.seen.items()
    assert (seen[0].experts, seen[0].everywhere, seen[0].top_k) == (4, 4, 2)
    assert (seen[0].hidden, seen[0].inner, str(seen[0].pattern)) == (128, 64, "6:8")
    assert {name: y.shape for name, y in seen[1].items()} == dict.fromkeys(("dense", "hopper"), (3, 128))
    layers = list(experts_of(model).values())
    assert [hasattr(layer, "w13_weight") for layer in layers] == [not sparse] * 2
    assert [layer.quant_method.slide is not None for layer in layers] == [sparse] * 2
    assert [layer.quant_method.moe_kernel for layer in layers] == [None if sparse else kernel] * 2
    # Without a kernel of its own, vLLM brings the tokens of other GPUs to the method.
    assert [layer.quant_method.supports_internal_mk for layer in layers] == [not sparse] * 2
    assert len(processed) == (1 if sparse else 2)  # the layer that was measured, or each of them once
    word = "sparse" if sparse else "dense"
    told = f"mlp.experts: {word}, 4 experts, 6:8: hopper takes 0.50 of dense's time; measured here (2 layers)"
    assert told in caplog.text


@pytest.mark.parametrize("alone", [True, False])
def test_what_was_never_measured_stays_dense(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    if not alone:  # times of such experts without data parallelism say nothing
        choice = common.ExpertChoice(True, "hopper takes 0.50 of dense's time; measured here")
        monkeypatch.setattr(common, "choose_experts", lambda *_: choice)
    monkeypatch.setattr(experts, "is_alone", lambda layer: alone)
    model = loaded(configured(path, quantization="slidesparse"), REFERENCE)
    assert all(hasattr(layer, "w13_weight") for layer in experts_of(model).values())
    why = "experts like them have not been measured on this GPU" if alone else "with data parallelism they cannot be"
    assert f"mlp.experts: dense, 4 experts, 6:8: {why}" in caplog.text


@pytest.mark.usefixtures("no_dense_kernels")
@pytest.mark.parametrize("marked", [True, False])
def test_a_checkpoint_of_which_only_experts_were_pruned_is_served_where_they_stay_dense(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    """Nobody looked for a pattern in what cannot be packed, so nobody may say that there is none."""
    monkeypatch.setattr(experts, "why_not", lambda layer: "they have a bias")
    left = without_pattern(path, "self_attn")
    with_marker(path, **({"ignore": ["lm_head", *left]} if marked else {}))
    model = loaded(configured(path, quantization="slidesparse"), SPARSE)
    assert_dense(model, caplog, "experts: they have a bias")
    assert "slidesparse: nothing is sparse" in caplog.text


def with_balancing(path: Path, additional: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration with --enable-eplb, of experts that vLLM can move; it refuses the option itself on a CPU."""
    from vllm.config import VllmConfig

    monkeypatch.setattr(int8_method(), "supports_eplb", True)
    config = VllmConfig(model_config=configured(path, quantization="slidesparse"), additional_config=additional)
    config.parallel_config.enable_eplb = True
    return config


def test_experts_that_vllm_moves_between_gpus_are_left_to_it(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM said that it cannot move experts which it can move, and ended."""
    model = loaded_by(with_balancing(path, REFERENCE, monkeypatch))
    assert "slidesparse: 4 of 6 layers run sparse" in caplog.text
    assert_dense(model, caplog, "experts: left to vLLM: --enable-eplb moves them between GPUs")
    with pytest.raises(UnsupportedError, match="--enable-eplb"):
        loaded_by(with_balancing(path, SPARSE, monkeypatch))


def test_experts_that_vllm_quantises_anew_are_left_to_it(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were waited for, so the log never said what became of any layer."""
    import vllm.model_executor.layers.quantization.online.fp8 as anew

    monkeypatch.setattr(anew.Fp8PerTensorOnlineMoEMethod, "process_weights_after_loading", lambda *_: None)
    loaded_by(quantised_anew(path, {"moe": "fp8_per_tensor"}, REFERENCE))
    assert "slidesparse: 4 of 6 layers run sparse" in caplog.text
    assert "mlp.experts: dense, experts: left to vLLM: moe of --quantization-config" in caplog.text
    with pytest.raises(UnsupportedError, match="--quantization-config"):
        loaded_by(quantised_anew(path, {"moe": "fp8_per_tensor"}, SPARSE))


def test_memory_that_does_not_suffice_ends_nothing_that_nobody_asked_for(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    choice = common.ExpertChoice(True, "hopper takes 0.50 of dense's time; measured here")
    monkeypatch.setattr(common, "choose_experts", lambda *_: choice)
    monkeypatch.setattr(common, "pack_experts", full)
    model = loaded(configured(path, quantization="slidesparse"), REFERENCE)
    assert_dense(model, caplog, "4 experts, 6:8: not enough memory to pack them")
    assert "4 experts 128x128 6:8 stay dense: out of memory while they were packed" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        loaded(configured(path, quantization="slidesparse"), SPARSE)


def test_experts_that_stayed_dense_stay_so_when_they_are_loaded_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs and kernels know the form of the first weights."""
    model = loaded(configured(path, quantization="slidesparse"), REFERENCE)
    told = len(caplog.messages)
    for layer in experts_of(model).values():
        layer.quant_method.slide_model.options = replace(layer.quant_method.slide_model.options, experts="sparse")
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.quant_method.slide is None
        assert hasattr(layer, "w13_weight")
    assert caplog.messages[told:] == []


def without_pattern(path: Path, part: str) -> list[str]:
    """Fill the quantised layers of a part of a checkpoint with ones, and return their names."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    names = [name for name, tensor in tensors.items() if part in name and tensor.dtype == torch.int8]
    save_file(tensors | {name: torch.ones_like(tensors[name]) for name in names}, file, {"format": "pt"})
    return [name.removesuffix(".weight") for name in names]


def with_marker(path: Path, **changes: Any) -> None:
    """Change a checkpoint's marker; take it away where nothing is named."""
    config = path / "config.json"
    settings = json.loads(config.read_text())
    marker = settings.pop(MARKER_KEY) | changes
    config.write_text(json.dumps(settings | ({MARKER_KEY: marker} if changes else {})))


def test_experts_without_a_pattern_stay_vllms_own(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    without_pattern(path, "experts")
    with_marker(path)
    model = loaded(configured(path, quantization="slidesparse"), SPARSE)
    assert_dense(model, caplog, "experts: their weights satisfy no pattern")


def test_experts_that_break_the_pattern_of_the_marker_are_refused(path: Path) -> None:
    without_pattern(path, "experts")
    with pytest.raises(PatternViolation, match=r"model\.layers\.0\.mlp\.experts\.w13_weight violates 6:8"):
        loaded(configured(path, quantization="slidesparse"), REFERENCE)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen3MoeForCausalLM", "mlp.experts: sparse, 4 experts, 6:8"),
        ("MixtralForCausalLM", "block_sparse_moe.experts: sparse, 4 experts, 6:8"),
        ("Llama4ForCausalLM", "feed_forward.experts: dense, experts: the router's weights apply to their input"),
    ],
)
def test_experts_are_not_searched_for_the_pattern_that_the_marker_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setattr(common, "find_pattern", None)
    loaded(configured(pruned(tmp_path, name, "int8"), quantization="slidesparse"), SPARSE)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("state", "dtype", "said"),
    [
        ({"batch_invariant": True}, torch.float8_e4m3fn, "only INT8 products are the same in every batch"),
        ({"batch_invariant": True}, torch.int8, "asked the layer"),
        ({"adapters": True}, torch.int8, "LoRA adapters read vLLM's own weights"),
    ],
)
def test_experts_that_a_model_leaves_to_vllm(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, bool], dtype: torch.dtype, said: str
) -> None:
    monkeypatch.setattr(experts, "why_not", lambda layer: "asked the layer")
    method = experts.PackingMethod()
    method.slide_model, method.slide_named = ModelState(**state), NamedExperts("experts", None)  # type: ignore[arg-type]
    parallel = SimpleNamespace(moe_parallel_config=SimpleNamespace(dp_size=1))
    layer = SimpleNamespace(w13_weight=torch.ones(2, 8, 4).to(dtype), moe_config=parallel)
    assert said in str(method.slide_find(layer))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"activation": "gelu"}, "their activation is gelu, not silu"),
        ({"moe_config": SimpleNamespace(swiglu_limit=7.0)}, "their SiLU has swiglu_limit 7.0"),
        ({"moe_config": SimpleNamespace(swiglu_limit=None, swiglu_alpha=1.0, swiglu_beta=0.0)}, None),
        ({"swiglu_alpha": 1.7}, "their SiLU has swiglu_alpha 1.7"),
        ({"apply_router_weight_on_input": True}, "the router's weights apply to their input"),
        ({"w13_bias": torch.zeros(1)}, "they have a bias"),
        ({"w13_input_scale": torch.ones(1)}, "their activations have a fixed scale"),
        ({"w2_weight_scale": torch.ones(2, 1)}, "their weights need one scale a channel"),
    ],
)
def test_why_experts_cannot_be_packed(changed: dict[str, Any], why: str | None) -> None:
    weights = {"w13_weight": torch.ones(2, 8, 4), "w2_weight": torch.ones(2, 4, 4)}
    scales = {"w13_weight_scale": torch.ones(2, 8, 1), "w2_weight_scale": torch.ones(2, 4, 1)}
    plain = {"activation": SimpleNamespace(value="silu"), "apply_router_weight_on_input": False}
    assert why_not(SimpleNamespace(**{**weights, **scales, **plain, **changed})) == why


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"ep_size": 2, "use_ep": True}, None),  # vLLM's map of experts says which are here
        ({"dp_size": 2}, None),  # tokens are gathered
        ({"dp_size": 2, "use_ep": True}, None),
        (
            {"dp_size": 2, "use_ep": True, "all2all_backend": "deepep_low_latency"},
            "the all-to-all deepep_low_latency hands over rows that are quantised, in an order of its own",
        ),
        ({"dp_size": 2, "all2all_backend": "deepep_low_latency"}, None),  # used for whole experts alone
        ({"pcp_size": 2}, "prompts are split over GPUs (prefill context parallelism)"),
    ],
)
def test_tokens_of_other_gpus_reach_packed_experts_or_these_stay_dense(
    changed: dict[str, Any], why: str | None
) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    usual = {"all2all_backend": "allgather_reducescatter"}
    parallel = replace(FusedMoEParallelConfig.make_no_parallel(), **{**usual, **changed})
    assert why_tokens_stay(parallel) == why
    layer = SimpleNamespace(moe_config=SimpleNamespace(moe_parallel_config=parallel))
    assert is_alone(layer) == ("dp_size" not in changed)
    if why is not None:
        assert loaded_experts(layer, NamedExperts("experts", None)) == why
