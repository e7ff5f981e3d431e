"""Pruned experts in SGLang's own ``FusedMoE``, built, loaded and run on a CPU; its kernels never run."""

from __future__ import annotations

import gc
import importlib
import json
import operator
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from sglang_mixtures import (
    EXPERTS,
    HIDDEN,
    INNER,
    NAME,
    SPARSE,
    built,
    is_close,
    loaded,
    marked,
    mixture,
    one_rank,
    through,
    tokens,
    weights_of,
)
from small_mixtures import pruned_mixture
from test_sglang_plugin import built as built_linear
from test_sglang_plugin import config_of
from test_sglang_plugin import pruned as pruned_linear
from tuning_fakes import ExpertTuner

from slidesparse.base.log import log_once
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import PatternViolation, UnsupportedError
from slidesparse.integrations import NAME as OURS
from slidesparse.integrations.sglang import METHOD

INT8, FP8 = torch.int8, torch.float8_e4m3fn

SMALL: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "num_experts_per_tok": 2},
    **{"tie_word_embeddings": False, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
MODELS = {
    "Qwen3MoeForCausalLM": ("qwen3_moe", "mlp", {"num_experts": EXPERTS}),
    "MixtralForCausalLM": ("mixtral", "block_sparse_moe", {"num_local_experts": EXPERTS}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "mlp", {"num_experts": EXPERTS}),  # with a shared expert
}
"""Name -> module of SGLang's, the parent of its experts, and settings."""

LEAVES = {"w1": ("w1", "gate_proj"), "w3": ("w3", "up_proj"), "w2": ("w2", "down_proj")}

pytestmark = pytest.mark.usefixtures("server")


@pytest.fixture(autouse=True)
def without_amx(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would reorder the weights of experts that it keeps for some CPUs, by its compiled parts."""
    from sglang.srt.layers.quantization import w8a8_int8

    log_once.cache_clear()
    monkeypatch.setattr(w8a8_int8, "_is_cpu_amx_available", False)


# -- whole models --------------------------------------------------------------------------------------------------


def pruned(path: Path, name: str, dtype: str) -> Path:
    return pruned_mixture(path, name, SMALL | MODELS[name][2], dtype)


def served(path: Path, name: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's own model, loaded by its own ``load_weights``, and processed as its loader does."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    module = importlib.import_module(f"sglang.srt.models.{MODELS[name][0]}")
    monkeypatch.setattr(module, "get_rope", lambda *_, **__: None)  # looks for compiled parts
    settings = transformers.AutoConfig.from_pretrained(path)
    setattr(settings, OURS, options)
    stored = json.loads((path / "config.json").read_text())["quantization_config"]
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    config = QUANTIZATION_METHODS[METHOD].from_config(stored | {"hf_config": settings, "packed_modules_mapping": fused})
    model = getattr(module, name)(settings, quant_config=config)
    checkpoint = Checkpoint(path)
    model.load_weights((tensor, checkpoint.tensor(tensor)) for tensor in checkpoint.files)
    for layer in model.modules():
        if (method := getattr(layer, "quant_method", None)) is not None:
            method.process_weights_after_loading(layer)
    return model


def stored_experts(path: Path, prefix: str) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The experts of a layer as the checkpoint has them."""
    checkpoint, found = Checkpoint(path), {}
    for shard, leaves in LEAVES.items():
        names = [
            next(f"{prefix}.{e}.{x}" for x in leaves if f"{prefix}.{e}.{x}.weight" in checkpoint.files)
            for e in range(EXPERTS)
        ]
        found[shard] = [
            tuple(checkpoint.tensor(f"{name}.{kind}") for kind in ("weight", "weight_scale")) for name in names
        ]
    return found


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_a_pruned_checkpoint_loads_by_sglangs_own_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    path = pruned(tmp_path, name, dtype)
    with one_rank(), caplog.at_level("INFO"):
        model = served(path, name, SPARSE, monkeypatch)
        for index in range(2):
            prefix = f"model.layers.{index}.{MODELS[name][1]}.experts"
            layer = model.get_submodule(prefix)
            assert not list(layer.parameters())
            given, weights = tokens(SMALL["hidden_size"]), stored_experts(path, prefix)
            assert is_close(through(layer, *given), mixture(weights, *given), weights["w1"][0][0].dtype)
    said = f"{MODELS[name][1]}.experts: sparse, 4 experts, 6:8: grouped products for any number of tokens; asked for"
    assert said in caplog.text


# -- one layer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("split", ["tensor", "experts"])
def test_what_two_gpus_give_sums_to_the_mixture(dtype: torch.dtype, split: str) -> None:
    weights, given = weights_of(dtype), tokens()
    total = torch.zeros(given[0].shape)
    for rank in range(2):
        with one_rank(**{split: 2}, rank=rank):
            layer = loaded(dtype, weights)
            assert (layer.slide.count, layer.slide.everywhere) == (2 if split == "experts" else 4, 4)
            total += through(layer, *given).float()
    assert is_close(total, mixture(weights, *given), dtype)


@pytest.mark.parametrize("factor", [None, 2.5])
def test_down_has_a_pattern_of_its_own_and_the_models_factor_is_applied(factor: float | None) -> None:
    weights, given = weights_of(INT8), tokens()
    weights["w2"] = weights_of(INT8, ("4:6",) * EXPERTS)["w2"]
    with one_rank():
        config = config_of(marked(down="4:6"), SPARSE)
        layer = loaded(INT8, weights, config, routed_scaling_factor=factor)
        assert is_close(through(layer, *given), mixture(weights, *given) * (factor or 1), INT8)


def test_compiled_models_call_packed_experts() -> None:
    """Dynamo is not to trace how kernels are launched."""
    (x, weights, chosen), traced = tokens(), []

    def backend(module: Any, _: Any) -> Any:
        traced.extend(node.target for node in module.graph.nodes if node.op.startswith("call"))
        return module

    with one_rank():
        layer = loaded(INT8, weights_of(INT8))
        given = SimpleNamespace(hidden_states=x, topk_output=SimpleNamespace(topk_weights=weights, topk_ids=chosen))
        run = torch.compile(lambda x: layer.scheme.apply_weights(layer, given).hidden_states * x, backend=backend)
        assert torch.equal(run(torch.tensor(2)), 2 * through(layer, x, weights, chosen))
    assert traced == [operator.mul]


@pytest.mark.parametrize(("own", "sparse"), [("6:8", True), ("2:4", True), ("10:12", False)])
def test_a_shared_expert_that_sglang_makes_one_of_them_must_follow_their_pattern(
    caplog: pytest.LogCaptureFixture, own: str, sparse: bool
) -> None:
    """It is on every rank, after the experts that are there."""
    weights = weights_of(INT8, ("6:8",) * EXPERTS + (own,))
    x, share, chosen = tokens(top_k=3)
    chosen[:, 2] = EXPERTS
    total = torch.zeros(x.shape)
    for rank in range(2):
        with one_rank(experts=2, rank=rank), caplog.at_level("INFO"):
            layer = loaded(INT8, weights, num_fused_shared_experts=1)
            assert hasattr(layer, "slide") is sparse
            if sparse:
                total += through(layer, x, share * torch.tensor([1, 1, 0.5]), chosen).float()
    if sparse:
        assert is_close(total, mixture(weights, x, share, chosen), INT8)
    else:
        assert "mlp.experts: dense, a shared expert that is one of them follows another pattern" in caplog.text


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({}, True),
        ({"ignore": ["model.layers.0.mlp.shared_expert_gate"]}, True),
        ({"ignore": ["model.layers.0.mlp.shared_expert.up_proj"]}, False),
        ({"layers": {"model.layers.0.mlp.shared_experts.down_proj": "4:6"}}, False),
        ({"pattern": "4:6"}, False),
        ({"experts": {}}, False),
    ],
)
def test_sglang_makes_a_shared_expert_one_of_them_only_where_it_was_pruned_alike(
    changes: dict[str, Any], fused: bool
) -> None:
    """It would load weights that are not quantised as if they were."""
    from sglang.srt.models.qwen2_moe import can_fuse_shared_expert

    sizes = SimpleNamespace(shared_expert_intermediate_size=64, moe_intermediate_size=64)
    with one_rank():
        assert can_fuse_shared_expert(sizes, config_of(marked() | changes)) is fused


def test_nothing_dense_is_left_and_weights_are_not_loaded_again() -> None:
    with one_rank():
        layer, given = built(INT8, weights_of(INT8)), tokens()
        dense = [weakref.ref(parameter.untyped_storage()) for parameter in layer.parameters()]
        names = [name for name, _ in layer.named_parameters()]
        layer.quant_method.process_weights_after_loading(layer)
        gc.collect()
        assert [ref() for ref in dense] == [None] * 4
        assert not [name for name in names if hasattr(layer, name)]
        assert all(name.startswith("slide.") for name, _ in layer.named_buffers())
        y = through(layer, *given)
        layer.quant_method.process_weights_after_loading(layer)
        assert torch.equal(through(layer, *given), y)
        told = layer._derived_weight_cache_error
        assert told.startswith(f"weights for a running engine with sparse layers; got {NAME}, whose dense weight is")


# -- left to SGLang ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("activation", "gelu", "their activation is gelu in SGLang"),
        ("is_gated", False, "their is_gated is False"),
        ("swiglu_limit", 10.0, "their swiglu_limit is 10.0"),
        ("apply_router_weight_on_input", True, "their apply_router_weight_on_input is True"),
        ("with_bias", True, "they have a bias"),
        ("quant_method", SimpleNamespace(), "SimpleNamespace of SGLang's keeps some of them elsewhere"),
    ],
)
def test_experts_of_another_kind_are_left_to_sglang(
    caplog: pytest.LogCaptureFixture, name: str, value: Any, why: str
) -> None:
    with one_rank(), caplog.at_level("INFO"):
        layer = built(INT8, weights_of(INT8))
        holder = layer.moe_runner_config if hasattr(layer.moe_runner_config, name) else layer
        assert hasattr(holder, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, name, value)
            layer.scheme.process_weights_after_loading(layer)
        assert f"mlp.experts: dense, {why}" in caplog.text
        assert layer.w13_weight.shape == (EXPERTS, 2 * INNER, HIDDEN)
        told = len(caplog.messages)
        layer.scheme.process_weights_after_loading(layer)  # at the end of an update
        assert not hasattr(layer, "slide")
        assert caplog.messages[told:] == []


@pytest.mark.parametrize(
    ("flag", "kind", "value", "why"),
    [
        ("a2a_backend", "MoeA2ABackend", "DEEPEP", "--moe-a2a-backend deepep hands over rows in an order of its own"),
        ("runner_backend", "MoeRunnerBackend", "FLASHINFER_CUTLASS", "--moe-runner-backend flashinfer_cutlass takes"),
    ],
)
def test_tokens_that_come_in_another_form_are_left_to_sglang(
    caplog: pytest.LogCaptureFixture, flag: str, kind: str, value: str, why: str
) -> None:
    """INT8 experts, for which SGLang has one kernel, are refused: it would give them tokens that it cannot read."""
    from sglang.srt.layers.moe import utils
    from sglang.srt.runtime_context import get_flags

    with one_rank(), caplog.at_level("INFO"):
        layer = built(FP8, weights_of(FP8))
        with get_flags().moe.override(**{flag: getattr(getattr(utils, kind), value)}):
            layer.quant_method.process_weights_after_loading(layer)
            with pytest.raises(UnsupportedError, match=re.escape(f"INT8 experts in SGLang; got {why}")):
                built(INT8, weights_of(INT8))
        assert not hasattr(layer, "slide")
    assert f"mlp.experts: dense, {why}" in caplog.text


@pytest.mark.parametrize(
    ("asked", "dtype", "why", "refused"),
    [
        ("enable_eplb", INT8, "experts left to SGLang: left to SGLang: --enable-eplb ", True),
        ("dwdp_size", INT8, "experts left to SGLang: left to SGLang: --dwdp-size ", True),
        ("enable_deterministic_inference", FP8, "experts left to SGLang: --enable-deterministic-inference", False),
        ("enable_deterministic_inference", INT8, None, False),  # whose products are exact
        ("enable_symm_mem", INT8, "4 experts, 6:8: with --enable-symm-mem they cannot be measured", False),
    ],
)
def test_what_the_server_is_asked_to_do_with_experts(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    dtype: torch.dtype,
    why: str | None,
    refused: bool,
) -> None:
    from slidesparse.integrations.sglang import config as place
    from slidesparse.integrations.sglang import experts

    for module in (place, experts):
        monkeypatch.setattr(module, "get_server_args", lambda: SimpleNamespace(**{asked: 2}))
    with one_rank(), caplog.at_level("INFO"):
        options = SPARSE if why is None else {"experts": "auto"}
        layer = loaded(dtype, weights_of(dtype), config_of(marked(), options, dtype))
        assert hasattr(layer, "slide") == (why is None)
        if refused:
            with pytest.raises(UnsupportedError, match=f'"experts": "sparse" .*; got --{asked[:4]}'):
                loaded(INT8, weights_of(INT8))
    assert why is None or why in caplog.text


@pytest.mark.parametrize(
    ("marker", "options", "why"),
    [
        (marked(), {"experts": "dense"}, "experts left to SGLang: left to SGLang, as asked for"),
        (marked(), {"experts": "auto"}, "mlp.experts: dense, 4 experts, 6:8: experts like them have not been measured"),
        (marked("another"), SPARSE, "experts left to SGLang: left alone when the checkpoint was pruned"),
        (marked(pattern="dense"), SPARSE, "mlp.experts: dense, one of their patterns is dense"),
    ],
)
def test_what_the_user_and_the_marker_say(
    caplog: pytest.LogCaptureFixture, marker: dict[str, Any], options: dict[str, str], why: str
) -> None:
    with one_rank(), caplog.at_level("INFO"):
        layer = loaded(INT8, weights_of(INT8), config_of(marker, options))
        assert hasattr(layer, "w13_weight")
    assert why in caplog.text


def test_experts_without_zeros_are_refused_and_others_of_sglangs_stay() -> None:
    weights = weights_of(INT8)
    weights["w3"][2][0][:] = 1
    with one_rank():
        with pytest.raises(PatternViolation, match=rf"{re.escape(NAME)}\.w13_weight violates 6:8"):
            loaded(INT8, weights)
        config = config_of(marked())
        config.target_scheme_map["Linear"]["input_activations"].symmetric = False
        with pytest.raises(NotImplementedError):
            built(INT8, weights, config)


# -- measured ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("split", [1, 2])
def test_auto_goes_by_the_times_of_both_forms(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, split: int, sparse: bool
) -> None:
    """Both get the tokens as SGLang's dispatcher hands them over: with the numbers of the experts of this GPU."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
    from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8MoEMethod

    from slidesparse.integrations import experts
    from slidesparse.integrations.options import ServerOptions
    from slidesparse.integrations.sglang.experts import Int8Experts

    tuner, weights, processed = ExpertTuner(sparse, lambda _: tokens()), weights_of(INT8), []
    monkeypatch.setattr(ServerOptions, "tuner", lambda *_: tuner)
    monkeypatch.setattr(experts, "choose_experts", tuner.choose)
    process = W8A8Int8MoEMethod.process_weights_after_loading
    monkeypatch.setattr(
        W8A8Int8MoEMethod, process.__name__, lambda self, layer: (processed.append(layer), process(self, layer))
    )

    def apply(self: Any, layer: Any, given: Any) -> Any:
        """What SGLang's kernel computes; it may write over its input."""
        ids, count = given.topk_output.topk_ids, layer.num_local_experts
        assert int(ids.max()) < count
        here = {shard: own[layer.moe_ep_rank * count :][:count] for shard, own in weights.items()}
        share = given.topk_output.topk_weights * (ids >= 0)
        y = mixture(here, given.hidden_states, share, ids.clamp(0)).bfloat16()
        inplace = self.moe_runner_config.inplace
        return StandardCombineInput(given.hidden_states.copy_(y) if inplace else y)

    monkeypatch.setattr(Int8Experts, "apply_weights", apply)
    with one_rank(experts=split, rank=split - 1), caplog.at_level("INFO"):
        config = config_of(marked(), SPARSE | {"experts": "auto"})
        layers = [loaded(INT8, weights, config) for _ in range(2)]
        ((kind, seen),) = tuner.seen.items()
        assert (kind.experts, kind.everywhere, kind.top_k, kind.inner) == (4 // split, 4, 2, INNER)
        assert is_close(seen["hopper"], seen["dense"].float(), INT8)
        assert [hasattr(layer, "slide") for layer in layers] == [sparse] * 2
        assert [hasattr(layer, "w13_weight") for layer in layers] == [not sparse] * 2
        assert len(processed) == (1 if sparse else 2)  # the layer that was measured, or each of them once
        assert layers[0].moe_runner_config.inplace
        given = tokens()
        y = through(layers[1], given[0].clone(), *given[1:])
        assert is_close(y, seen["dense"].float(), INT8)
    word = "sparse" if sparse else "dense"
    assert f"mlp.experts: {word}, {4 // split} experts, 6:8: hopper takes 0.50 of dense's time; measured" in caplog.text


def test_a_layer_that_sglang_names_without_the_model_has_its_own_pattern() -> None:
    """SGLang's Mixtral says layers.0 where its checkpoint says model.layers.0."""
    with one_rank():
        config = config_of(marked() | {"layers": {f"model.layers.0.self_attn.{x}_proj": "4:6" for x in "qkv"}})
        layer = built_linear(config, "layers.0.self_attn.qkv_proj", *pruned_linear("4:6"))
        assert str(layer.scheme.pattern) == "4:6"
        assert str(built_linear(config, "layers.1.self_attn.qkv_proj", *pruned_linear("6:8")).scheme.pattern) == "6:8"
