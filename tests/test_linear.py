from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles import scaled_product, sglang_int8, vllm_int8
from torch import nn

from slidesparse import InputError, Pattern, PatternViolation, SlideLinear, UnsupportedError, ops, pack, prune_mask
from slidesparse.gemm.cusparselt.backend import CuSparseLt
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.reference import Reference
from slidesparse.gemm.select import Choice
from slidesparse.gemm.spec import Route, WeightSpec
from slidesparse.layer.settle import pack_dense
from slidesparse.layer.weight_form import WeightForm
from slidesparse.weights.quant import QUANTISED, parse_dtype, quantize_weight

ACTIVATIONS = [torch.bfloat16, torch.float16, torch.float32]
BACKENDS = ["reference", "dense"]
K, OUT = 93, 24  # no multiple of any group

STRIDES = {
    "contiguous": lambda m, k: torch.randn(m, k),
    "transposed": lambda m, k: torch.randn(k, m).T,
    "every other column": lambda m, k: torch.randn(m, 2 * k)[:, ::2],
}


def _pruned_linear(pattern: str, bias: bool = True, k: int = K) -> nn.Linear:
    linear = nn.Linear(k, OUT, bias=bias)
    with torch.no_grad():
        linear.weight *= prune_mask(linear.weight, pattern)
        linear.weight[3] = 0
        linear.weight[5] *= 1e-3 / linear.weight[5].abs().max()
    return linear


def _with_hard_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A zero row and one of absmax 1e-3 among every three."""
    x[1::3] = 0
    x[2::3] *= 1e-3 / x[2::3].abs().amax(-1, keepdim=True)
    return x.to(dtype)


def _vllm(x: torch.Tensor, linear: nn.Linear, quantise: Callable[..., Any] = vllm_int8) -> torch.Tensor:
    """The layer by vLLM's formulas in numpy: INT8 operands, int64 product, float32 scales, one rounding."""
    xq, scale_x = quantise(x.float().numpy())
    wq, scale_w = vllm_int8(linear.weight.detach().float().numpy())
    bias = None if linear.bias is None else linear.bias.detach().float().numpy()
    y = scaled_product(xq.astype(np.int64) @ wq.astype(np.int64).T, scale_x, scale_w, bias)
    return torch.from_numpy(y).to(x.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "30:32"])
@pytest.mark.parametrize("m", [0, 1, 199])
@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
def test_int8_is_vllms_dense_layer_bit_for_bit(dtype: torch.dtype, m: int, pattern: str, backend: str) -> None:
    linear = _pruned_linear(pattern)
    layer = SlideLinear.from_linear(linear, pattern, "int8", backend=backend)
    x = _with_hard_rows(torch.randn(m, K), dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert torch.equal(y, _vllm(x, linear))


@pytest.mark.parametrize("backend", BACKENDS)
def test_activations_follow_the_quantiser_that_a_layer_is_given(backend: str) -> None:
    linear = _pruned_linear("6:8")
    values, scale = quantize_weight(linear.weight.detach(), torch.int8)
    x = torch.arange(-K, 2 * K, dtype=torch.float32).view(3, K) / 2
    x[:, 0] = 127
    expected = _vllm(x, linear, sglang_int8)
    assert not torch.equal(expected, _vllm(x, linear))
    layer = SlideLinear(pack(values, "6:8", scale=scale), linear.bias, backend=backend, activation_rounding="sglang")
    assert torch.equal(layer(x), expected)
    pairs = torch.cat([torch.full_like(x, 100.0), x / 100], 1)  # where the SiLU of 100 is 100
    fused = ops.silu_mul_linear(pairs, layer._tensors(), layer.weight_scale, layer.bias, layer.spec)
    assert torch.equal(fused, _vllm(100 * (x / 100), linear, sglang_int8))
    assert torch.equal(layer.unpack(), values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("bias", [False, True])
def test_int8_with_any_strides_and_leading_dimensions(strides: str, bias: bool, backend: str) -> None:
    linear = _pruned_linear("6:8", bias)
    layer = SlideLinear.from_linear(linear, "6:8", backend=backend)
    x = STRIDES[strides](14, K).to(torch.bfloat16)
    expected = _vllm(x, linear)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x.unflatten(0, (2, 7))).flatten(0, 1), expected)
    assert torch.equal(layer(x[0]), expected[0])
    assert layer(x[:0].reshape(3, 0, K)).shape == (3, 0, OUT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("start", "columns"), [(0, 41), (5, 60), (92, 1)])
@pytest.mark.parametrize("pattern", ["4:6", "6:8", "14:16"])
def test_int8_of_a_shard(pattern: str, start: int, columns: int, dtype: torch.dtype, backend: str) -> None:
    linear = _pruned_linear(pattern, bias=False)
    values, scale = quantize_weight(linear.weight.detach(), torch.int8)
    shard = values[:, start : start + columns]
    k_offset = start % Pattern.parse(pattern).group
    layer = SlideLinear(pack(shard, pattern, scale=scale, k_offset=k_offset), backend=backend)
    x = _with_hard_rows(torch.randn(7, columns), dtype)
    xq, scale_x = vllm_int8(x.float().numpy())
    accumulator = xq.astype(np.int64) @ shard.numpy().astype(np.int64).T
    expected = scaled_product(accumulator, scale_x, scale.numpy(), None)
    assert torch.equal(layer(x), torch.from_numpy(expected).to(dtype))
    assert torch.equal(layer.unpack(), shard)


# -- torch.compile and the operators -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_is_eager(dtype: str, backend: str) -> None:
    torch._dynamo.reset()
    layer = SlideLinear.from_linear(_pruned_linear("6:8"), "6:8", dtype, backend=backend)
    # aot_eager traces through the fakes as every backend of torch.compile does, and needs no C++ compiler.
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (7, 2, 199, 0):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_lie_as_the_fake_ones_do(backend: str) -> None:
    # Without scales, bias and a change of type nothing stands after the product of a padded weight.
    layer = SlideLinear.from_linear(_pruned_linear("6:8", bias=False), "6:8", "fp32", backend=backend)
    assert layer(torch.randn(7, K)).stride() == (OUT, 1)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_rounds_the_answer_alone(dtype: str, backend: str) -> None:
    dense = _pruned_linear("6:8")
    layer = SlideLinear.from_linear(dense, "6:8", dtype, backend=backend)
    x = torch.randn(7, K)
    wanted = layer(x).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True)(x)
        assert got.dtype == compiled.dtype == dense(x).dtype == torch.bfloat16
        state = layer.state_dict()
    assert torch.equal(got, wanted)
    assert torch.equal(compiled, wanted)
    assert torch.equal(state["weight"], layer.state_dict()["weight"])
    with torch.autocast("cpu", enabled=False):
        assert layer(x).dtype == torch.float32


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", ["bf16", "fp32"])
def test_autocast_takes_every_type(given: torch.dtype, stored: str) -> None:
    layer = SlideLinear.from_linear(_pruned_linear("6:8"), "6:8", stored)
    x = torch.randn(7, K).to(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = layer(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, layer(x.to(layer.weight_dtype)).bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match="float64"):
        layer(x.double())


def _arguments(op: str) -> tuple[object, ...]:
    x = torch.randn(5, K)
    values = quantize_weight(_pruned_linear("6:8").weight.detach(), torch.int8)
    packed = pack(values.values, "6:8", scale=values.scale)
    column_map = packed.column_map(16)
    if op == "lift":
        return x, column_map
    if op == "quantize_lift":
        return x, column_map, torch.int8
    if op == "linear":
        forms = [WeightForm(packed, name) for name in ("dense", "reference")]
        specs = tuple(form.spec() for form in forms)
        weight = WeightSpec(OUT, "int8", specs, (Route(0, "dense"), Route(5, "reference")))
        tensors = [tensor for form in forms for tensor in form.tensors]
        return x, tensors, packed.scale, torch.randn(OUT), weight.text
    xq, scale_x = ops.quantize_lift(x, packed.column_map(), torch.int8)
    return xq, scale_x, [packed.columns()], packed.scale, torch.randn(OUT), OUT, torch.bfloat16, "reference"


@pytest.mark.parametrize("op", ["quantize_lift", "lift", "gemm", "linear"])
def test_operators_keep_their_contract(op: str) -> None:
    torch.library.opcheck(getattr(torch.ops.slidesparse, op).default, _arguments(op))


# -- routes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _routed(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = Route(0, "dense"), Route(8, "reference"), Route(100, "dense")
    monkeypatch.setattr("slidesparse.layer.linear.choose", lambda *_: Choice(routes, "told so"))


@pytest.mark.usefixtures("_routed")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp32"])
@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_the_number_of_tokens_picks_the_backend(
    pattern: str, dtype: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for backend in (Dense, Reference):

        def spied(self: Any, *arguments: Any, matmul: Any = backend.matmul) -> Any:
            ran.append(self.name)
            return matmul(self, *arguments)

        monkeypatch.setattr(backend, "matmul", spied)
    torch._dynamo.reset()
    linear = _pruned_linear(pattern)
    layer = SlideLinear.from_linear(linear, pattern, dtype)
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else layer
    x = torch.randn(150, K)
    whole = SlideLinear.from_linear(linear, pattern, dtype, backend="dense")(x)
    for tokens in (7, 8, 99, 100, 150):
        # INT8 is exact whichever runs; the others sum in another order.
        assert torch.allclose(run(x[:tokens]), whole[:tokens], atol=0 if dtype == "int8" else 1e-4, rtol=0)
    assert ran[1:] == ["dense", "reference", "reference", "dense", "dense"]


# -- the module ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("move", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_casting_a_model_leaves_the_layer_alone(dtype: str, move: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.LayerNorm(K), SlideLinear.from_linear(_pruned_linear("6:8"), "6:8", dtype))
    before = copy.deepcopy(model[1].state_dict())
    x = torch.randn(7, K)
    y = model[1](x)
    move(model)
    assert model[0].weight.dtype != torch.float32
    after = model[1].state_dict()
    assert {name: t.dtype for name, t in after.items()} == {name: t.dtype for name, t in before.items()}
    assert torch.equal(model[1](x), y)


@pytest.mark.parametrize("pattern", ["6:8", "4:6", "dense"])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16", "fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_is_what_a_checkpoint_holds(backend: str, dtype: str, pattern: str) -> None:
    linear = nn.Linear(K, OUT) if pattern == "dense" else _pruned_linear(pattern)
    layer = SlideLinear.from_linear(linear, pattern, dtype, backend=backend)
    weight, storage = linear.weight.detach(), parse_dtype(dtype)
    expected = {"bias": linear.bias.detach()}
    if storage in QUANTISED:
        values, scale = quantize_weight(weight, storage)
        expected |= {"weight": values, "weight_scale": scale.reshape(OUT, 1)}
    else:
        expected["weight"] = weight.to(storage)
    state = layer.state_dict(prefix="q.")
    assert state.keys() == {f"q.{name}" for name in expected}  # nothing of a backend's
    for name, tensor in expected.items():
        assert state[f"q.{name}"].dtype == tensor.dtype
        assert torch.equal(state[f"q.{name}"].float(), tensor.float())


def test_a_weight_is_loaded_where_captured_graphs_read_it() -> None:
    source, target = (SlideLinear.from_linear(_pruned_linear("6:8"), "6:8") for _ in range(2))
    before = [tensor.data_ptr() for tensor in (*target.forms[0].tensors, target.weight_scale)]
    target.load_state_dict(source.state_dict())
    assert [tensor.data_ptr() for tensor in (*target.forms[0].tensors, target.weight_scale)] == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": None}, r'Missing key\(s\) in state_dict: "weight"'),
        ({"weight_scale": None}, r'Missing key\(s\) in state_dict: "weight_scale"'),
        ({"forms.0.operand_0": torch.zeros(3)}, "Unexpected key"),
        ({"weight": torch.zeros(OUT, K)}, "form of weight; got torch.float32"),
        ({"weight": torch.zeros(OUT, 8, dtype=torch.int8)}, "form of weight"),
        ({"weight": torch.ones(OUT, K, dtype=torch.int8)}, "weight violates 6:8 at row 0, group 0"),
        ({"weight_scale": torch.ones(3, 1)}, "scale of weight"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, torch.Tensor | None], says: str) -> None:
    layer = SlideLinear.from_linear(_pruned_linear("6:8"), "6:8")
    x = torch.randn(3, K)
    y = layer(x)
    state = {name: tensor for name, tensor in {**layer.state_dict(), **change}.items() if tensor is not None}
    with pytest.raises(RuntimeError, match=says):
        layer.load_state_dict(state)
    assert torch.equal(layer(x), y)


def test_a_weight_that_cannot_be_read_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SlideLinear.from_linear(_pruned_linear("6:8"), "6:8", backend="reference")
    monkeypatch.setattr(Reference, "columns", CuSparseLt().columns)
    with pytest.raises(UnsupportedError, match=r"cuSPARSELt's layout.*got it on cpu"):
        layer.state_dict()


def test_a_copy_and_an_empty_layer_have_a_state() -> None:
    layer = SlideLinear.from_linear(_pruned_linear("6:8"), "6:8")
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.state_dict()["weight"], layer.state_dict()["weight"])
    empty = copied.to("meta").state_dict()
    assert {name: (t.shape, t.dtype, t.is_meta) for name, t in empty.items()} == {
        name: (t.shape, t.dtype, True) for name, t in layer.state_dict().items()
    }


def test_from_linear_prunes_only_when_asked() -> None:
    linear = nn.Linear(16, 4)
    before = linear.weight.detach().clone()
    with pytest.raises(PatternViolation, match=r"layers\.0\.q_proj violates 6:8 at row 0"):
        SlideLinear.from_linear(linear, "6:8", name="layers.0.q_proj")
    pruned = copy.deepcopy(linear)
    with torch.no_grad():
        pruned.weight *= prune_mask(pruned.weight, "6:8")
    x = torch.randn(3, 16)
    asked = SlideLinear.from_linear(linear, "6:8", method="magnitude")
    assert torch.equal(asked(x), SlideLinear.from_linear(pruned, "6:8")(x))
    assert torch.equal(linear.weight, before)


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp32"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_activations(dtype: str, bad: float) -> None:
    layer = SlideLinear.from_linear(_pruned_linear("6:8"), "6:8", dtype)
    x = torch.randn(3, K)
    x[1, 4] = bad
    with pytest.raises(InputError, match="activations hold NaN or Inf"):
        layer(x)


@pytest.mark.parametrize(
    ("dtype", "x", "bias"),
    [
        ("int8", torch.zeros(3, K + 1), None),
        ("int8", torch.zeros(3, K, dtype=torch.float64), None),
        ("int8", torch.zeros(3, K, dtype=torch.int8), None),
        ("bf16", torch.zeros(3, K), None),
        ("int8", torch.tensor(1.0), None),
        *(("int8", torch.zeros(3, K), one) for one in (torch.ones(1), torch.ones(OUT, 1), torch.ones(OUT).int())),
    ],
)
def test_what_does_not_fit_is_refused(dtype: str, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    with pytest.raises(InputError, match=r"(activations|bias) of SlideLinear"):
        SlideLinear.from_linear(_pruned_linear("6:8"), "6:8", dtype)(x, bias)


def test_a_strided_bias_of_the_call_reaches_the_operator_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    # Kernels read a bias by its address.
    layer, wide = SlideLinear.from_linear(_pruned_linear("6:8"), "6:8"), torch.randn(2 * OUT)
    seen: list[torch.Tensor] = []
    run = ops.linear

    def watched(*arguments: Any) -> torch.Tensor:
        seen.append(arguments[3])
        return run(*arguments)

    monkeypatch.setattr(ops, "linear", watched)
    layer(torch.randn(3, K), wide[::2])
    assert seen[0].is_contiguous()
    assert torch.equal(seen[0], wide[::2])


def test_activations_on_another_device_are_refused() -> None:
    layer = SlideLinear.from_linear(_pruned_linear("6:8"), "6:8")
    tensors = [tensor for form in layer.forms for tensor in form.tensors]
    rest = (layer.weight_scale, None, layer.spec)
    with pytest.raises(InputError, match="on two devices"):
        ops._linear(torch.zeros(3, K, device="meta"), tensors, *rest)


def test_a_weight_that_is_packed_dense_chooses_and_runs_dense() -> None:
    weight = torch.randint(1, 100, (OUT, 24), dtype=torch.int8)
    packed = pack_dense(weight, torch.rand(OUT), Pattern(4, 6))
    layer = SlideLinear(packed, fallback="none")
    assert layer.choice.backends == ("dense",)
    assert layer.choice.reason == "this weight is packed dense"
    x = torch.randn(3, 24)
    assert torch.equal(layer(x), SlideLinear(packed, backend="reference")(x))


def test_a_layer_of_a_quantised_parameter_is_copied_and_its_outputs_require_no_gradient() -> None:
    weight = torch.nn.Parameter(_pruned_linear("6:8").weight.detach())
    values, scale = quantize_weight(weight, torch.int8)
    layer, x = SlideLinear(pack(values, "6:8", scale=scale)), torch.randn(3, K)
    assert not layer(x).requires_grad
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_a_layer_of_six_bits_takes_a_state_dict_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hopper, "why_not", lambda *_: None)
    linear = nn.Linear(64, 32, bias=False)
    layer, eight = (
        SlideLinear.from_linear(linear, "6:8", method="magnitude", fallback="none", rounding=rounding)
        for rounding in ("6bit", "absmax")
    )
    assert (layer.choice.backends, eight.choice.backends) == (("hopper-6bit",), ("hopper",))
    pruned = linear.weight.detach() * prune_mask(linear.weight.detach(), "6:8")
    values, scale = quantize_weight(pruned, torch.int8)
    packed = pack(values, "6:8", scale=scale)
    assert not layer.holds_bits(packed)
    assert not layer.refill(packed)
    layer.load_state_dict({"weight": values, "weight_scale": scale})
    assert layer.choice.backends == ("hopper",)
    assert layer.operand_bytes == eight.operand_bytes


def test_a_backend_that_was_asked_for_does_not_change_with_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hopper, "why_not", lambda *_: None)
    linear = nn.Linear(64, 32, bias=False)
    layer = SlideLinear.from_linear(linear, "6:8", method="magnitude", backend="hopper-6bit", rounding="6bit")
    pruned = linear.weight.detach() * prune_mask(linear.weight.detach(), "6:8")
    values, scale = quantize_weight(pruned, torch.int8)
    with pytest.raises(RuntimeError, match="values of a weight for hopper-6bit; got 8 bits"):
        layer.load_state_dict({"weight": values, "weight_scale": scale})
    assert layer.choice.backends == ("hopper-6bit",)
