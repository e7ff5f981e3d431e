from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers
from adapted import Adapted
from torch import nn
from torch.nn.utils.prune import custom_from_mask

from slidesparse import InputError, Pattern, PatternViolation, SlideLinear, prune_mask, sparsify_
from slidesparse.models.sparsify import layer_patterns, run_once
from slidesparse.models.targets import OFFLOADED, find_targets, input_sets

# 64 and 160 are no multiples of 6, 10 or 14; 96 token ids keep the embedding small.
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
DECODER = {**SIZES, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}

Make = Callable[..., nn.Module]


def _llama(**options: object) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **options)).eval()


def _qwen3(**options: object) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=32, **options)).eval()


def _bitnet(**options: object) -> nn.Module:
    return transformers.BitNetForCausalLM(transformers.BitNetConfig(**DECODER, **options)).eval()


def _bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


DECODERS = [_llama, _qwen3, _bitnet]

DECODER_SETS = [
    [f"model.layers.{i}.{name}" for name in names]
    for i in range(2)
    for names in [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
]
DECODER_LINEARS = [name for names in DECODER_SETS for name in names]

BERT_SETS = [
    [f"encoder.layer.{i}.{name}" for name in names]
    for i in range(2)
    for names in [
        ["attention.self.query", "attention.self.key", "attention.self.value"],
        ["attention.output.dense"],
        ["intermediate.dense"],
        ["output.dense"],
    ]
]


HEAD = "a head of an encoder, which servers keep in floats"


def _tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 96, (2, 9), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _run(model: nn.Module) -> torch.Tensor:
    return model(input_ids=_tokens())[0]


def _slid(model: nn.Module) -> dict[str, SlideLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SlideLinear)}


def _prune_dense(model: nn.Module, names: list[str], pattern: str) -> nn.Module:
    """The same model with pruned, dense weights."""
    pruned = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            weight = pruned.get_submodule(name).weight
            weight *= prune_mask(weight, pattern)
    return pruned


# -- which layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", DECODERS)
def test_decoders(make: Make) -> None:
    targets = find_targets(make())
    assert list(targets.linears) == DECODER_LINEARS
    assert targets.dense == {"lm_head": "output embedding"}
    targets = find_targets(_bert())
    assert list(targets.linears) == [name for names in BERT_SETS for name in names]
    assert targets.dense == {"pooler.dense": HEAD}


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("Bert", {"bert.pooler.dense": HEAD}),
        ("Roberta", {"classifier.dense": HEAD}),
        ("ModernBert", {"head.dense": HEAD}),
    ],
)
def test_heads_that_judge_a_text_stay_dense(kind: str, heads: dict[str, str]) -> None:
    """vLLM holds them in floats: it would read their 8-bit weights without scales."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, num_labels=40, pad_token_id=0)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    dense = find_targets(model).dense
    assert {name: dense[name] for name in heads} == heads


def test_the_head_of_a_text_tower_stays_dense() -> None:
    part = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    text, vision = {**part, "vocab_size": 96}, {**part, "image_size": 16, "patch_size": 8}
    config = transformers.SiglipConfig(text_config=text, vision_config=vision)
    assert find_targets(transformers.SiglipModel(config)).dense["text_model.head"] == HEAD


def test_a_head_by_name_alone_is_an_ordinary_linear() -> None:
    model = nn.ModuleDict({"classifier": nn.ModuleDict({"dense": nn.Linear(64, 64)})})
    assert list(find_targets(model).linears) == ["classifier.dense"]


@pytest.mark.parametrize("make", DECODERS)
def test_output_embedding_only_when_asked_and_never_when_tied(make: Make) -> None:
    assert list(find_targets(make(), lm_head=True).linears) == [*DECODER_LINEARS, "lm_head"]
    tied = find_targets(make(tie_word_embeddings=True), lm_head=True)
    assert list(tied.linears) == DECODER_LINEARS
    assert tied.dense == {"lm_head": "shares its weight with the input embedding"}


def test_tying_is_seen_on_the_meta_device() -> None:
    # There two modules share no storage, so the config must say it.
    with torch.device("meta"):
        model = _llama(tie_word_embeddings=True)
    assert find_targets(model, lm_head=True).dense == {"lm_head": "shares its weight with the input embedding"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(64, 64), "one linear layer; use SlideLinear"),
        (lambda: nn.Sequential(nn.LayerNorm(8)), "no linear layer to treat"),
        (lambda: sparsify_(nn.Sequential(nn.Linear(64, 64)), "6:8"), "treat; got 1 SlideLinear, sparse already;"),
        (lambda: nn.Sequential(nn.Linear(8, 8)), "no linear layer to treat"),
    ],
)
def test_models_without_a_layer_to_treat(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sparsify_(model(), "6:8")


def test_attention_of_torch_keeps_the_projection_that_it_reads_itself() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4), "mlp": nn.Linear(64, 64)})
    assert list(_slid(sparsify_(model, "6:8"))) == ["mlp"]
    x = torch.randn(3, 2, 64)
    assert model["attention"](x, x, x)[0].shape == x.shape


@pytest.mark.parametrize(("make", "sets"), [*((make, DECODER_SETS) for make in DECODERS), (_bert, BERT_SETS)])
def test_linears_of_one_input_are_found(make: Make, sets: list[list[str]]) -> None:
    with torch.device("meta"):
        model = make()
    run = run_once(model)
    assert run is not None
    assert input_sets(model, find_targets(model).linears, run) == sets


def test_adapters_stay_as_they_are_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = _llama()
    model.lm_head = Adapted(model.lm_head)
    for layer in model.model.layers:
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    expected = [name.replace("up_proj", "up_proj.base_layer") for name in DECODER_LINEARS]
    assert list(_slid(sparsify_(model, "6:8"))) == expected
    said = "left dense: 2 x model.layers.*.mlp.up_proj.lora_A.default (a part of an adapter)"
    assert said in [record.getMessage() for record in caplog.records]
    _run(model)
    alone = sparsify_(nn.Sequential(Adapted(nn.Linear(64, 64)), nn.Linear(64, 64)), "6:8")
    assert list(_slid(alone)) == ["0.base_layer", "1"]
    assert list(_slid(sparsify_(Adapted(nn.Linear(64, 64)), "6:8"))) == ["base_layer"]


def test_a_linear_with_a_forward_of_its_own_stays_dense() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1000

    model = nn.Sequential(nn.Linear(64, 64), Shifted(64, 64), nn.Linear(64, 64))
    model[0].forward = lambda x: 2 * x
    dense = {"0": "Linear has a forward of its own", "1": "Shifted has a forward of its own"}
    assert find_targets(model).dense == dense


def test_what_is_offloaded_stays_dense_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    accelerate.cpu_offload(model[0], execution_device=torch.device("cpu"))
    sparsify_(model, "6:8")
    assert [type(module) for module in model] == [nn.Linear, SlideLinear]
    (said,) = (record.getMessage() for record in caplog.records if "left dense" in record.getMessage())
    assert said == f"left dense: 0 ({OFFLOADED})"
    with pytest.raises(InputError, match="load the whole model onto one device"):
        sparsify_(model, "6:8")


# -- hooks ---------------------------------------------------------------------------------------------------------


def test_hooks_run_on_the_layer_in_a_linears_place_until_they_are_removed() -> None:
    model, called = nn.Sequential(nn.Linear(64, 64)), list[str]()
    linear = model[0]
    handles = [
        linear.register_forward_pre_hook(lambda layer, args: called.append(type(layer).__name__)),
        linear.register_forward_pre_hook(lambda layer, args, kwargs: called.append("kwargs"), with_kwargs=True),
        linear.register_forward_hook(lambda layer, args, y: torch.zeros_like(y)),
        linear.register_forward_hook(lambda *_: called.append("always"), always_call=True),
        linear.register_forward_hook(lambda *_: called.append("after"), with_kwargs=True),
    ]
    sparsify_(model, "6:8")
    assert model(torch.randn(3, 64)).count_nonzero() == 0
    assert called == ["SlideLinear", "kwargs", "always", "after"]
    with pytest.raises(InputError):
        model(torch.randn(3, 32))
    assert called[4:] == ["SlideLinear", "kwargs", "always"]
    for handle in handles:
        handle.remove()
    assert model(torch.randn(3, 64)).count_nonzero() > 0
    assert len(called) == 7


def test_hooks_that_compute_a_weight_end_with_the_linear_and_others_do_not() -> None:
    model, called = nn.Sequential(nn.Linear(64, 64)), list[str]()
    custom_from_mask(model[0], "weight", prune_mask(model[0].weight.detach(), "6:8"))
    model[0].register_forward_hook(lambda *_: called.append("after"))
    expected = model[0].weight.detach().clone()
    sparsify_(model, "6:8", "fp32", method=None)
    model(torch.randn(3, 64))
    assert torch.equal(model[0].unpack(), expected)
    assert called == ["after"]


# -- patterns of layers --------------------------------------------------------------------------------------------


def test_layer_patterns() -> None:
    names = ["a.q", "a.k", "b.q"]
    six, four, dense = Pattern(6, 8), Pattern(4, 6), Pattern.parse("dense")
    assert layer_patterns(names, "6:8") == dict.fromkeys(names, six)
    assert layer_patterns(names, six, {"a.q": "dense"}) == {"a.q": dense, "a.k": six, "b.q": six}
    # The first entry that matches counts.
    layers = {"a.q": "dense", r"re:a\.": "4:6"}
    assert layer_patterns(names, "6:8", layers) == {"a.q": dense, "a.k": four, "b.q": six}
    assert layer_patterns(names, "6:8", dict(reversed(layers.items())))["a.q"] == four


# -- whole models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*DECODERS, _bert])
@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_slid_and_dense_backends_give_one_int8_model(make: Make, pattern: str) -> None:
    model = make().to(torch.bfloat16 if pattern == "4:6" else torch.float32)
    slid = sparsify_(copy.deepcopy(model), pattern, "int8", backend="reference")
    dense = sparsify_(copy.deepcopy(model), pattern, "int8", backend="dense")
    assert list(_slid(slid)) == list(find_targets(model).linears)
    assert {layer.choice.backends for layer in _slid(slid).values()} == {("reference",)}
    assert torch.equal(_run(slid), _run(dense))
    assert not torch.equal(_run(slid), _run(model))


@pytest.mark.parametrize("make", [*DECODERS, _bert])
def test_unquantised_model_is_the_pruned_one(make: Make) -> None:
    model = make()
    names = list(find_targets(model).linears)
    pruned = _prune_dense(model, names, "6:8")
    slid = sparsify_(copy.deepcopy(model), "6:8", "fp32", backend="dense")
    for name, layer in _slid(slid).items():
        assert torch.equal(layer.forms[0].operand[0], pruned.get_submodule(name).weight)
    # Both multiply the same float32 matrices with the same GEMM; only the bias is added at another place. Errors of a
    # few ulp pass through two blocks of width 64.
    torch.testing.assert_close(_run(slid), _run(pruned), rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_pruned_are_refused() -> None:
    with pytest.raises(PatternViolation, match=r"model\.layers\.0\.self_attn\.q_proj violates 6:8"):
        sparsify_(_llama(), "6:8", method=None)


def test_exceptions_and_ignored_layers() -> None:
    layers = {r"re:.*down_proj": "4:6", "model.layers.0.self_attn.o_proj": "dense"}
    model = sparsify_(_llama(), "6:8", "fp8", ignore=[r"re:model\.layers\.1\.self_attn"], layers=layers)
    patterns = {name: str(layer.pattern) for name, layer in _slid(model).items()}
    assert patterns == {
        name: "4:6" if "down_proj" in name else "dense" if "o_proj" in name else "6:8"
        for name in DECODER_LINEARS
        if "layers.1.self_attn" not in name
    }
    assert bool(_run(model).isfinite().all())


WRONG: list[dict[str, Any]] = [
    *({"ignore": [entry]} for entry in ("up_proj", "re:up_proj", "re:(", "model.embed_tokens")),  # of whole names
    *({"layers": one} for one in ({"q": "dense"}, {"re:b": "6:8"}, {"re:[": "6:8"}, {"lm_head": "6_8"})),
    *({"pattern": "8:6"}, {"dtype": "int4"}, {"method": "sparse-gpt"}, {"backend": "cutlas"}, {"fallback": "slow"}),
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_bad_options_leave_the_model_alone(options: dict[str, Any]) -> None:
    model = _llama()
    with pytest.raises(InputError):
        sparsify_(model, **{"pattern": "6:8", **options})
    assert not _slid(model)


@pytest.mark.parametrize("spoil", ["NaN", "beyond fp16", "one bias for all"])
def test_what_no_layer_can_hold_is_found_before_any_is_replaced(spoil: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if spoil == "one bias for all":
        model[1].bias = nn.Parameter(torch.zeros(1))
    else:
        model[1].weight.data[3, 3] = torch.nan if spoil == "NaN" else 1e6
    with pytest.raises(InputError, match="bias of SlideLinear" if "bias" in spoil else "1 .*holds NaN"):
        sparsify_(model, "6:8", "fp16")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("training", [True, False])
def test_layers_are_in_the_mode_of_their_model(training: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).train(training)
    linear = SlideLinear.from_linear(model[0], "6:8", method="magnitude")
    assert {module.training for module in (linear, *sparsify_(model, "6:8").modules())} == {training}


def test_a_module_in_two_places_is_replaced_in_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model = sparsify_(Twice(), "6:8")
    assert type(model.a) is SlideLinear
    assert model.b is model.a
