"""SGLang's own decoder layers with norms and activations fused, without its compiled parts.

What stands in for a compiled norm or activation computes as its kernel does, in float32 with one rounding, and writes
into its arguments as the kernel does. The reference backend multiplies INT8 exactly.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sglang_plugin import REFERENCE, built, config_of, pruned

import slidesparse as ss
from slidesparse.integrations.warmup import WarmUp
from slidesparse.lifting.choose import TorchLift
from slidesparse.weights.quant import quantize_weight

pytestmark = pytest.mark.usefixtures("server_of_models")

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16, "rms_norm_eps": 1e-6},
}
GROUP = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
TOPOLOGY = {
    **dict.fromkeys(("tp_size", "pp_size", "moe_tp_size", "moe_ep_size"), 1),
    **dict.fromkeys(("attn_tp_size", "attn_dp_size", "attn_cp_size"), 1),
    **dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank"), 0),
    **dict.fromkeys(("tp_group", "pp_group", "attn_tp_group"), GROUP),
}


class Attention(torch.nn.Module):
    """In the place of SGLang's, which is compiled: [M, heads * dim], each token on its own."""

    def __init__(self, heads: int, head_dim: int, scaling: float, num_kv_heads: int, **_: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, num_kv_heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        v = v.reshape(len(v), self.kv_heads, -1).repeat_interleave(self.heads // self.kv_heads, 1)
        return q.reshape(len(v), -1) + v.flatten(1)


def kernel_norm(offset: int) -> Callable[..., Any]:
    """FusedAddRMSNorm and RMSNorm of flashinfer, which sgl_kernel builds; with an offset of 1 those of Gemma."""

    def forward(self: Any, x: torch.Tensor, residual: Any = None, addition: Any = None, **_: Any) -> Any:
        if addition is not None:
            residual = residual + addition
        wide = x.float() if residual is None else x.float() + residual.float()
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = (wide * rstd * (self.weight.float() + offset)).to(x.dtype)
        return normed if residual is None else (x.copy_(normed), residual.copy_(wide))

    return forward


def kernel_silu(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@pytest.fixture
def server_of_models(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of one GPU, whose models can be built; bfloat16 is their type."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import activation, layernorm

    for name in ("_TP", "_PP", "_MOE_DP"):
        monkeypatch.setattr(parallel_state, name, GROUP)
    for norm, offset in ((layernorm.RMSNorm, 0), (layernorm.GemmaRMSNorm, 1), (layernorm.Gemma3RMSNorm, 1)):
        monkeypatch.setattr(norm, "forward_native", kernel_norm(offset))
    monkeypatch.setattr(activation.SiluAndMul, "forward_native", kernel_silu)
    torch.set_default_dtype(torch.bfloat16)
    arguments = runtime_context._CONTEXT.override_server_args(device="cpu")
    with arguments, runtime_context.get_parallel().override(**TOPOLOGY), torch.inference_mode():
        yield server
    torch.set_default_dtype(torch.float32)


def fill(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model random weights, always the same, as its loader would, and let its layers be processed."""
    generator = torch.Generator().manual_seed(0)
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False))
        quantised = "weight_scale" in own
        for kind, parameter in own.items():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if quantised and kind == "weight":
                values, scale = quantize_weight(values * ss.prune_mask(values, "6:8"), torch.int8)
                module.weight_scale.data.copy_(scale.reshape(-1, 1))
            if kind != "weight_scale":
                parameter.data.copy_(values)
        if quantised:
            module.quant_method.process_weights_after_loading(module)
    return model


MODELS = {
    "qwen2": ("Qwen2Model", "Qwen2Config", {}, 3),
    "qwen3": ("Qwen3Model", "Qwen3Config", {}, 3),
    "gemma2": ("Gemma2Model", "Gemma2Config", {"hidden_act": "gelu_pytorch_tanh"}, 2),
    "gemma3_causal": ("Gemma3TextModel", "Gemma3TextConfig", {}, 2),
}
"""Module of SGLang's -> its model, the configuration of transformers', and how many modules of a layer are fused."""


def model_of(module: str, monkeypatch: pytest.MonkeyPatch, fuse: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    import transformers
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    model_class, config_class, more, _ = MODELS[module]
    source = import_module(f"sglang.srt.models.{module}")
    for place in (source, import_module("sglang.srt.models.qwen2")):
        monkeypatch.setattr(place, "RadixAttention", Attention)
        monkeypatch.setattr(place, "get_rope", lambda *_, **__: lambda positions, q, k: (q, k))
    config = getattr(transformers, config_class)(**SIZES, **more)
    quantised = config_of(options=REFERENCE | {"fuse": fuse})
    model = fill(getattr(source, model_class)(config, quant_config=quantised, prefix="model"))

    def run(tokens: torch.Tensor) -> torch.Tensor:
        batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, residual_stream=None)
        return model(tokens, torch.arange(len(tokens)), batch)

    run.model = model
    return run


def readers(model: torch.nn.Module) -> dict[str, Any]:
    from slidesparse.integrations.sglang.fuse import READER

    return {name: vars(module)[READER] for name, module in model.named_modules() if READER in vars(module)}


@pytest.fixture
def lifts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Prologue -> how often activations were lifted after it."""
    counts: Counter[str] = Counter()
    lift = TorchLift.__call__
    monkeypatch.setattr(
        TorchLift, "__call__", lambda self, *given: (counts.update([self.spec.prologue]), lift(self, *given))[1]
    )
    return counts


@pytest.mark.parametrize("module", MODELS)
def test_a_model_gives_the_same_bits_fused(module: str, monkeypatch: pytest.MonkeyPatch, lifts: Counter[str]) -> None:
    apart, fused = (model_of(module, monkeypatch, fuse) for fuse in (False, True))
    # The first call finds the readers; later ones have other tokens, and other numbers of them.
    batches = [torch.tensor(tokens) for tokens in ([1, 2, 3], [4, 5, 6], [7, 8], [1, 2, 3])]
    wanted = [apart(tokens) for tokens in batches]
    assert lifts == {"none": 4 * 8}
    for number, (tokens, want) in enumerate(zip(batches, wanted, strict=True)):
        lifts.clear()
        assert torch.equal(fused(tokens), want)
        assert lifts.total() == 8
        assert lifts["none"] == 8 - (2 * MODELS[module][3] if number else 0)
    assert not readers(apart.model)
    assert len(readers(fused.model)) == 2 * MODELS[module][3]
    assert all(readers(fused.model).values())


# -- what must be left alone ---------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A norm of SGLang's, and what a model does with its result before a sparse layer of SGLang's reads it."""

    def __init__(self, fuse: bool, norm: str = "RMSNorm", **settings: Any) -> None:
        from sglang.srt.layers import layernorm

        super().__init__()
        self.norm = getattr(layernorm, norm)(96, **settings)
        config = config_of(options=REFERENCE | {"fuse": fuse})
        self.linear, self.second = (built(config, f"layers.0.{name}", *pruned("6:8")) for name in ("qkv_proj", "up"))
        for layer in (self.linear, self.second):
            layer.quant_method.process_weights_after_loading(layer)

    def forward(self, x: torch.Tensor, between: Between, *residual: Any) -> list[torch.Tensor]:
        returned = self.norm(x, *residual)
        normed, *new = returned if isinstance(returned, tuple) else (returned,)
        return [*between(self, normed), *new]


Between = Callable[[Block, torch.Tensor], list[torch.Tensor]]


def straight(block: Block, normed: torch.Tensor) -> list[torch.Tensor]:
    return [block.linear(normed)[0]]


def scaled_in_place(block: Block, normed: torch.Tensor) -> list[torch.Tensor]:
    normed[:, 1:].mul_(3)
    return [block.linear(normed)[0]]


def read_by_address(block: Block, normed: torch.Tensor) -> list[torch.Tensor]:
    assert normed.data_ptr() == normed.data_ptr() != 0
    return straight(block, normed)


def read_by_compiled_code(block: Block, normed: torch.Tensor) -> list[torch.Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return [normed + 0, *straight(block, normed)]


def asked_about(block: Block, normed: torch.Tensor) -> list[torch.Tensor]:
    assert (normed.shape, normed.stride(), normed.is_contiguous()) == ((5, 96), (96, 1), True)
    assert (normed.dtype, normed.device.type, normed.dim(), normed.is_cuda) == (torch.bfloat16, "cpu", 2, False)
    return straight(block, normed)


def by_two_linears(block: Block, normed: torch.Tensor) -> list[torch.Tensor]:
    return [block.linear(normed)[0], block.second(normed)[0]]


BETWEEN: dict[str, Between] = {
    "scaled": lambda block, normed: [block.linear(normed * 3)[0]],
    "scaled in place": scaled_in_place,
    "returned too": lambda block, normed: [block.linear(normed)[0], normed + 0],
    "read by address": read_by_address,
    "read by compiled code": read_by_compiled_code,
    "asked about": asked_about,
    "by two linears": by_two_linears,
    "by the other linear": lambda block, normed: [block.second(normed)[0]],
    "twice": lambda block, normed: [block.linear(normed)[0].mul_(2), block.linear(normed)[0]],
    "with another bias": lambda block, normed: [block.linear.quant_method.apply(block.linear, normed, torch.ones(24))],
}


def rows(seed: int, tokens: int = 5) -> list[torch.Tensor]:
    """Activations and a residual."""
    return list(torch.randn(2, tokens, 96, generator=torch.Generator().manual_seed(seed)).bfloat16())


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("found", [False, True])
def test_a_model_that_does_something_in_between_is_right(name: str, with_residual: bool, found: bool) -> None:
    between, (apart, fused) = BETWEEN[name], (fill(Block(fuse)) for fuse in (False, True))
    if found:  # the model begins to do it when the linear has been found
        fused(rows(9)[0], straight)
        assert readers(fused)["norm"] is not None
    for seed in range(4):
        x, residual = rows(seed)
        given = ([residual.clone()] if with_residual else []), ([residual] if with_residual else [])
        assert same(fused(x.clone(), between, *given[0]), apart(x, between, *given[1]))
    if found:
        assert (readers(fused)["norm"] is None) == (name != "asked about")  # SGLang's again
    assert same(fused(rows(7)[0], straight), apart(rows(7)[0], straight))


@pytest.mark.parametrize(
    ("norm", "settings"),
    [
        ("RMSNorm", {"cast_x_before_out_mul": True}),
        ("RMSNorm", {"var_hidden_size": 64}),
        ("RMSNorm", {"weight_dtype": torch.float32}),
        ("Gemma4RMSNorm", {}),
        ("RMSNorm", {"derived": True}),
    ],
)
def test_norms_that_compute_something_else_are_left_alone(norm: str, settings: dict[str, Any]) -> None:
    derived = settings.pop("derived", False)
    block = fill(Block(True, norm, **settings))
    if derived:
        block.norm.__class__ = type("Derived", (type(block.norm),), {})
    for _ in range(3):
        block(rows(0)[0], straight)
    assert not any(readers(block).values())
    assert type(block.norm(rows(0)[0])) is torch.Tensor


def test_calls_that_the_operator_does_not_know_are_sglangs() -> None:
    apart, fused = (fill(Block(fuse)) for fuse in (False, True))
    fused(rows(9)[0], straight)
    (x, residual), addition = rows(0), rows(1)[0]
    for given in ((residual, addition), (residual.float(),)):
        copies = [tensor.clone() for tensor in given]
        assert same(fused(x.clone(), straight, *copies), apart(x.clone(), straight, *given))
        assert type(fused.norm(x.clone(), *copies)[0]) is torch.Tensor
    assert type(fused.norm(x.view(5, 2, 48)[:, :1].repeat(1, 1, 2))) is torch.Tensor
    assert type(fused.norm(x[:0])) is torch.Tensor
    unread, _ = fused.norm(x, residual)
    assert type(unread).__name__ == "Unread"
    before = x.clone(), residual.clone()
    assert torch.equal(unread, apart.norm(x.clone(), residual.clone())[0])
    assert same([x, residual], list(before))  # SGLang computed it of copies


def test_nothing_is_joined_inside_a_compiled_model() -> None:
    block, wanted = fill(Block(True)), fill(Block(False))(rows(0)[0], straight)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    for _ in range(2):
        assert same(compiled(rows(0)[0], straight), wanted)
    assert not readers(block)
    block(rows(0)[0], straight)
    assert readers(block)["norm"] is not None
    torch.compiler.reset()
    assert same(compiled(rows(0)[0], straight), wanted)


def test_a_reader_is_found_before_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lifting kernels are compiled then, which a capture would not allow."""
    warmed: list[str] = []
    monkeypatch.setattr(WarmUp, "lift", lambda self, prologue, *_: warmed.append(prologue))
    block = fill(Block(True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        block(rows(0)[0], straight)
    assert not warmed
    assert not readers(block)
    block(rows(0)[0], straight)
    assert warmed == ["rms_norm", "add_rms_norm"]


def test_products_and_inputs_are_freed_with_the_result() -> None:
    block = fill(Block(True))
    block(rows(0)[0], straight)
    gc.disable()
    x = rows(1)[0]
    result = block.norm(x)
    kept = [weakref.ref(tensor) for tensor in (x, result.product, result)]
    del x, result
    assert [one() for one in kept] == [None] * 3
    gc.enable()
