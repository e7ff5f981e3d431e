"""The operators: contracts, what the fused ones compute, and the layouts that backends may ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fused_lifts import fused_lift
from slab_views import slab_view
from torch.autograd import forward_ad

from slidesparse import InputError, SlideLinear, UnsupportedError, ops, pack
from slidesparse.gemm import get_backend
from slidesparse.lifting.choose import TorchLift
from slidesparse.lifting.layout import Layout, LiftSpec, LinearTensors, Slabs
from slidesparse.lifting.prologue import Prologue, add_rms_norm, rms_norm, silu_mul
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.quant import quantize_rows
from slidesparse.weights.slide import gather
from slidesparse.weights.support import as_bits

K, TOKENS, EPS = 92, 9, 1e-6
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
FUSED = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "silu_mul": silu_mul}
SLABS = Slabs()


def packed_weight(pattern: str = "6:8", dtype: torch.dtype = torch.int8) -> PackedWeight:
    return pack(torch.zeros(1, K, dtype=dtype), pattern)


def activations(prologue: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    """The arguments of a prologue."""
    x, residual, norm_weight = torch.randn(TOKENS, K), torch.randn(TOKENS, K), torch.randn(K)
    given = {
        "rms_norm": (x, norm_weight),
        "add_rms_norm": (x, residual, norm_weight),
        "silu_mul": (torch.cat([x, residual], 1),),
    }
    return *(tensor.to(dtype) for tensor in given[prologue]), *([EPS] if "norm" in prologue else [])


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.dtype == wanted.dtype and torch.equal(as_bits(got), as_bits(wanted))


@pytest.fixture
def weight() -> tuple[Any, ...]:
    """What a fused form of ``linear`` takes after its activations."""
    layer = SlideLinear(replace(packed_weight(), scale=torch.ones(1)))
    return layer._tensors(), layer.weight_scale, None, layer.spec


@pytest.mark.parametrize("prologue", FUSED)
def test_fused_operators_keep_their_contract(prologue: str, weight: tuple[Any, ...]) -> None:
    operator = getattr(torch.ops.slidesparse, f"{prologue}_linear").default
    torch.library.opcheck(operator, (*activations(prologue), *weight))


@pytest.mark.parametrize("prologue", FUSED)
def test_results_lie_as_the_fake_ones_do_whatever_the_strides(prologue: str, weight: tuple[Any, ...]) -> None:
    given = [t.T.contiguous().T if isinstance(t, torch.Tensor) and t.dim() == 2 else t for t in activations(prologue)]
    results = getattr(ops, f"{prologue}_linear")(*given, *weight)
    assert all(result.is_contiguous() for result in (results if isinstance(results, tuple) else (results,)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("prologue", FUSED)
def test_fused_is_one_after_the_other(prologue: Prologue, dtype: torch.dtype) -> None:
    column_map, given = packed_weight("4:6").column_map(16), activations(prologue)
    before = [tensor.clone() for tensor in given if isinstance(tensor, torch.Tensor)]
    result = FUSED[prologue](*given)
    value, *rest = result if isinstance(result, tuple) else (result,)
    wanted = quantize_rows(value, dtype)
    values, scale, *others = fused_lift(prologue, given, column_map, dtype)
    assert same(values, gather(wanted.values, column_map))
    assert torch.equal(scale, wanted.scale)
    assert all(same(one, other) for one, other in zip(others, rest, strict=True))
    assert all(same(one, other) for one, other in zip(given, before, strict=False)), "an input was overwritten"


@pytest.mark.parametrize(
    ("prologue", "norm_weight", "residual", "message"),
    [
        ("rms_norm", None, None, "weight of RMSNorm; got none"),
        ("rms_norm", torch.ones(1), None, r"weight of RMSNorm; got \[1\]"),
        ("add_rms_norm", torch.ones(K), None, "residual; got none"),
        ("add_rms_norm", torch.ones(K), torch.ones(1, K), r"residual; got \[1, 92\]"),
    ],
)
def test_a_norm_is_neither_left_out_nor_broadcast(
    prologue: Prologue, norm_weight: torch.Tensor | None, residual: torch.Tensor | None, message: str
) -> None:
    """As the kernels, which refuse what is not there or of another size."""
    spec = LiftSpec(prologue, torch.float32, torch.int8, (), Layout())
    tensors = LinearTensors(packed_weight().column_map(), (), None, None, norm_weight)
    with pytest.raises(InputError, match=message):
        TorchLift(spec)(torch.randn(TOKENS, K), residual, tensors, EPS)


@pytest.mark.parametrize(
    "x",
    [
        *(torch.randn(TOKENS, columns) for columns in (K - 8, K + 8)),  # some of the columns, or past the last one
        *(torch.randn(1, TOKENS, K), torch.randn(K), torch.ones(TOKENS, K, dtype=torch.int32)),
    ],
)
def test_what_are_no_rows_of_the_weights_width_is_refused(x: torch.Tensor) -> None:
    """As the kernels do."""
    layer = SlideLinear(replace(packed_weight(), scale=torch.ones(1)))
    tensors = [tensor for form in layer.forms for tensor in form.tensors]
    with pytest.raises(InputError, match="activations to lift"):
        ops.linear(x, tensors, layer.weight_scale, None, layer.spec)
    if x.dim() != 2 or not x.is_floating_point():
        with pytest.raises(InputError, match="activations to lift"):
            ops.quantize_lift(x, packed_weight().column_map(), torch.int8)
        with pytest.raises(InputError, match=r"needed floats \[M, K\]"):
            ops.lift(x, packed_weight().column_map())


# -- the definitions of what is fused, in numpy --------------------------------------------------------------------


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).to(torch.float64).numpy()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_round_once_as_compiled_ones_do(dtype: torch.dtype, offset: float) -> None:
    x, residual = (torch.randint(-40, 41, (2, 5, K)) / 8).to(dtype).unbind(0)
    norm_weight = torch.randn(K).to(dtype)
    total = x.double().numpy() + residual.double().numpy()
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + EPS)
    wanted = rounded(normed * (norm_weight.double().numpy() + offset), dtype)
    got, after = add_rms_norm(x, residual, norm_weight, EPS, offset=offset)
    assert np.array_equal(after.double().numpy(), rounded(total, dtype))
    # A square root in float32 may put a value on the other side of a rounding boundary: one step of the type.
    step = torch.finfo(dtype).eps
    np.testing.assert_allclose(got.double().numpy(), wanted, rtol=2 * step, atol=0)
    assert (got.double().numpy() != wanted).mean() < (0.02 if dtype != torch.float32 else 1)
    wide = torch.from_numpy(total).to(torch.float32)
    assert same(rms_norm(wide, norm_weight, EPS, offset=offset), got)


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_is_rounded_after_the_product(dtype: torch.dtype) -> None:
    x = torch.randn(5, 2 * K).to(dtype)
    gate, up = np.split(x.double().numpy(), 2, -1)
    wanted = rounded(gate / (1 + np.exp(-gate)) * up, dtype)
    got = silu_mul(x).double().numpy()
    np.testing.assert_allclose(got, wanted, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert (got != wanted).mean() < (0.02 if dtype != torch.float32 else 1)


# -- layouts -------------------------------------------------------------------------------------------------------


def test_slabs_that_were_copied_are_refused() -> None:
    column_map = get_backend("hopper").layout.column_map(packed_weight())
    values, _ = ops.quantize_lift(torch.randn(TOKENS, K), column_map, torch.int8, "hopper")
    slab_view(values, SLABS)
    with pytest.raises(InputError, match="activations in slabs"):
        slab_view(values.clone(), SLABS)
    with pytest.raises(InputError, match="activations in slabs"):
        slab_view(values.T.contiguous().T, SLABS)


# -- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "fp32"])
def test_a_tangent_is_refused(dtype: str) -> None:
    """A kernel would lose it, and the definition in torch gives that of rounding, which is zero or wrong."""
    layer = SlideLinear.from_linear(torch.nn.Linear(K, 8), "6:8", dtype, method="magnitude")
    x = torch.randn(TOKENS, K)
    with forward_ad.dual_level():
        layer(x)  # a constant among duals
        with pytest.raises(UnsupportedError, match="for inference"):
            layer(forward_ad.make_dual(x, x))
    with pytest.raises(UnsupportedError, match="for inference"):
        torch.func.jvp(layer, (x,), (x,))


@pytest.mark.parametrize("dtype", ["int8", "fp32"])
def test_transforms_of_torch_func_are_refused(dtype: str) -> None:
    layer = SlideLinear.from_linear(torch.nn.Linear(K, 8), "6:8", dtype, method="magnitude")
    x = torch.randn(3, 2, K)
    with pytest.raises(UnsupportedError, match="vmap over a slidesparse layer"):
        torch.vmap(layer)(x)
    for transform in (torch.func.grad(lambda x: layer(x).sum()), torch.func.jacrev(layer)):
        with pytest.raises(RuntimeError, match=r"autograd\.Function with functorch"):  # torch's own
            transform(x)
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(layer, {}, (x,)), layer(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_runs_where_gradients_are_recorded(dynamic: bool) -> None:
    """As it does uncompiled: a norm's weight requires a gradient, and nobody has to ask for it."""
    torch._dynamo.reset()
    layer = SlideLinear.from_linear(torch.nn.Linear(K, 8), "6:8", method="magnitude")
    model = torch.nn.Sequential(torch.nn.LayerNorm(K), layer)
    run = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (3, 5):
        x = torch.randn(tokens, K)
        y = run(x)
        assert torch.equal(y, model(x))
        with pytest.raises(UnsupportedError, match="for inference"):
            y.sum().backward()


def test_gradients_are_refused_wherever_they_are_asked_for() -> None:
    linear = torch.nn.Linear(K, 8).bfloat16().requires_grad_(False)
    layer = SlideLinear.from_linear(linear, "6:8", "bf16", method="magnitude", backend="reference")
    x = torch.randn(2, K, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="for inference"):
        layer(x).sum().backward()
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_inference_calls_no_kernel_of_autograd() -> None:
    """One of ``torch.library.register_autograd`` costs 5 us in every call under ``torch.no_grad``."""
    has_kernel, names = torch._C._dispatch_has_kernel_for_dispatch_key, ("join_graph", "linear", "chain")
    assert [name for name in names if has_kernel(f"slidesparse::{name}", "Autograd")] == ["join_graph"]
