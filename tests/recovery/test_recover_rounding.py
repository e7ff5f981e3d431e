"""Rounding inside of training is rounding as prune and servers do it, and after it that of the files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse.base.traced_tensor import TracedTensor, origin_of
from slidesparse.recovery.result import gathered, round_as_stored
from slidesparse.recovery.rounding import round_linears_
from slidesparse.weights.quant import dequantize, quantize_rows, quantize_weight


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.int8, "absmax"), (torch.int8, "6bit"), (torch.float8_e4m3fn, "absmax")]
)
def test_a_linear_multiplies_what_is_served(dtype: torch.dtype, rounding: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 24))
    model[0].weight.data[:, ::4] = 0
    x = torch.randn(3, 5, 64, requires_grad=True)
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach()
    round_linears_(model, {"0": rounding}, dtype)
    found = model(x)
    inputs, weights = quantize_rows(x.detach(), dtype), quantize_weight(weight, dtype, rounding=rounding)
    products = inputs.values.double() @ weights.values.double().t()
    expected = products * inputs.scale.double() * weights.scale.double().t() + bias
    torch.testing.assert_close(found, expected.float())
    assert not torch.allclose(found, torch.nn.functional.linear(x, weight, bias), atol=1e-6)
    # Backward as if nothing were rounded, with the values that were multiplied.
    slope = torch.randn_like(found)
    found.backward(slope)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, slope @ dequantize(weights.values, weights.scale))
    rounded = inputs.values.float() * inputs.scale
    torch.testing.assert_close(model[0].weight.grad, slope.flatten(0, 1).t() @ rounded.flatten(0, 1))


def test_each_expert_is_rounded_to_its_own_type() -> None:
    """A parameter of stacked experts is evaluated as it is written."""
    types = {"0": "BF16", "1": "F32", "2": "F16"}
    origin = origin_of(torch.stack([TracedTensor.named(name, (4, 8)) for name in types]).transpose(1, 2))
    meta: Any = SimpleNamespace(names=SimpleNamespace(origins={"experts": origin}, tied={}))
    stored = {
        name: SimpleNamespace(dtype=kind, shape=(4, 8), n_bytes=128 if kind == "F32" else 64)
        for name, kind in types.items()
    }
    checkpoint: Any = SimpleNamespace(stored=stored.__getitem__)
    one = torch.nn.Parameter(torch.randn(3, 8, 4))
    written = gathered({"experts": one}, meta, checkpoint, keep=True)
    round_as_stored({"experts": one}, meta, checkpoint)
    assert [str(value.dtype) for value in written.values()] == ["torch.bfloat16", "torch.float32", "torch.float16"]
    assert torch.equal(one, torch.stack([value.float().T for value in written.values()]))
