"""``ss.matmul`` against plain torch, on the reference backend."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import scaled_product, vllm_int8
from tolerances import assert_product

import slidesparse as ss
from slidesparse.gemm.reference import Reference
from slidesparse.ops import matmul as module
from slidesparse.weights.quant import quantize_rows, quantize_weight

K, OUT = 93, 24  # no multiple of any group
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def pruned(pattern: str) -> torch.Tensor:
    weight = torch.randn(OUT, K)
    return weight * ss.prune_mask(weight, pattern)


def packed_8bit(dtype: torch.dtype, pattern: str = "6:8") -> ss.PackedWeight:
    values, scale = quantize_weight(pruned(pattern), dtype)
    return ss.pack(values, pattern, scale=scale)


@pytest.mark.parametrize("out_dtype", [None, *FLOATS], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "dense"])
def test_int8_is_the_dense_product_bit_for_bit(pattern: str, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    packed, x, bias = packed_8bit(torch.int8, pattern), torch.randn(2, 7, K).to(dtype), torch.randn(OUT)
    xq, scale_x = vllm_int8(x.flatten(0, 1).float().numpy())
    exact = xq.astype(np.int64) @ packed.unpack().numpy().astype(np.int64).T
    expected = torch.from_numpy(scaled_product(exact, scale_x, packed.scale.numpy(), bias.numpy()))
    y = ss.matmul(x, packed, bias, out_dtype=out_dtype)
    assert torch.equal(y, expected.to(out_dtype or dtype).view(2, 7, OUT))


@pytest.mark.parametrize("backend", ["auto", "dense", "reference"])
@pytest.mark.parametrize("pattern", ["2:4", "6:8", "14:16", "dense"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, *FLOATS], ids=str)
def test_other_types_stay_within_the_table(dtype: torch.dtype, pattern: str, backend: str) -> None:
    x, bias = torch.randn(7, K), torch.randn(OUT)
    if dtype in FLOATS:
        x, packed, scale = x.to(dtype), ss.pack(pruned(pattern).to(dtype), pattern), torch.ones(())
        values = x
    else:
        packed = packed_8bit(dtype, pattern)
        values, scale_x = quantize_rows(x, dtype)
        scale = scale_x.double() * packed.scale.double()
    weight = packed.unpack().double()
    exact = scale * (values.double() @ weight.T) + bias.double()
    magnitude = scale * (values.double().abs() @ weight.abs().T) + bias.double().abs()
    assert_product(ss.matmul(x, packed, bias, backend=backend), exact, magnitude, dtype)


@pytest.mark.parametrize("shape", [(K,), (0, K), (3, 0, K), (2, 3, 4, K)])
def test_leading_dimensions_are_kept(shape: tuple[int, ...]) -> None:
    packed, x = packed_8bit(torch.int8), torch.randn(shape)
    y = ss.matmul(x, packed)
    assert y.shape == (*shape[:-1], OUT)
    assert torch.equal(y.reshape(-1, OUT), ss.matmul(x.reshape(-1, K), packed))
    assert torch.equal(y, ss.matmul(torch.stack([x, x], -1)[..., 0], packed))  # any strides


def test_a_weight_is_prepared_once_a_backend_and_leaves_with_the_packed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    prepare = Reference.prepare

    def spied(self: Reference, packed: ss.PackedWeight) -> Any:
        prepared.append(packed.shape)
        return prepare(self, packed)

    monkeypatch.setattr(Reference, "prepare", spied)
    gc.collect()
    before, packed = len(module._PREPARED), packed_8bit(torch.int8)
    for _ in range(3):
        ss.matmul(torch.randn(5, K), packed, backend="reference")
    assert prepared == [(OUT, K)]
    assert len(module._PREPARED) == before + 1
    del packed
    gc.collect()
    assert len(module._PREPARED) == before


def test_a_backward_pass_is_refused() -> None:
    y = ss.matmul(torch.randn(3, K, requires_grad=True), packed_8bit(torch.int8))
    with pytest.raises(ss.UnsupportedError, match="for inference"):
        y.sum().backward()


PACKED, X = packed_8bit(torch.int8), torch.zeros(3, K)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"packed": pruned("6:8")}, "weight of matmul; got Tensor; needed a PackedWeight"),
        ({"packed": replace(PACKED, scale=None)}, "without a scale"),
        ({"packed": ss.pack(pruned("6:8"), "6:8", scale=torch.ones(OUT))}, "with a scale"),
        ({"packed": ss.pack(pruned("6:8").half(), "6:8")}, r"activations of matmul.*needed \[..., 93\] torch.float16"),
        ({"packed": PACKED.to("meta")}, r"activations of matmul.*on cpu.*on meta"),
        ({"x": torch.zeros(3, K + 1)}, r"activations of matmul; got \[3, 94\]"),
        ({"x": torch.zeros(())}, r"activations of matmul; got \[\]"),
        ({"x": torch.zeros(3, K, dtype=torch.int8)}, "activations of matmul; got .*int8"),
        ({"bias": torch.zeros(OUT, 1)}, "bias of matmul"),
        ({"out_dtype": torch.int8}, "out_dtype of matmul; got torch.int8"),
        ({"backend": "cuda"}, "unknown backend"),
        ({"backend": "hopper"}, "backend hopper cannot run this layer: it needs a CUDA device"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ss.SlideSparseError, match=says):
        ss.matmul(**{"x": X, "packed": PACKED, **given})
