"""The state dict of layers whose weight only a kernel's own layout holds, on a GPU."""

from __future__ import annotations

import pytest
import torch

from slidesparse import UnsupportedError, prune_mask
from slidesparse.gemm import Problem, get_backend
from slidesparse.layer.linear import SlideLinear
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import QUANTISED, parse_dtype
from slidesparse.weights.support import as_bits

pytestmark = pytest.mark.gpu

K, OUT = 2000, 200  # more columns than cuSPARSELt reads by one product, and no multiple of any tile


def _packed(pattern: str, dtype: str) -> PackedWeight:
    weight = torch.randn(OUT, K)
    return pack_weight(weight * prune_mask(weight, pattern), Pattern.parse(pattern), parse_dtype(dtype))


def _layer(packed: PackedWeight, backend: str) -> SlideLinear:
    problem = Problem(packed.pattern, packed.dtype, OUT, K, torch.device("cuda"))
    if (why := get_backend(backend).why_not(problem)) is not None:
        pytest.skip(why)
    return SlideLinear(packed.to("cuda"), torch.randn(OUT, device="cuda"), backend=backend)


@pytest.mark.parametrize("backend", ["hopper", "cusparselt", "dense", "reference"])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16", "fp32"])
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8"])
def test_every_backend_gives_the_weight_back(pattern: str, dtype: str, backend: str) -> None:
    packed = _packed(pattern, dtype)
    layer, other = _layer(packed, backend), _layer(_packed(pattern, dtype), backend)
    state = layer.state_dict()
    assert state.keys() == {"weight", "bias"} | ({"weight_scale"} if packed.dtype in QUANTISED else set())
    assert state["weight"].dtype == packed.dtype
    assert torch.equal(as_bits(state["weight"]), as_bits(packed.unpack()))
    x = torch.randn(33, K, dtype=torch.bfloat16 if packed.dtype in QUANTISED else packed.dtype, device="cuda")
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), layer(x))


def test_a_layer_that_left_its_gpu_still_gives_the_weight_back() -> None:
    packed = _packed("6:8", "int8")
    assert torch.equal(_layer(packed, "hopper").cpu().state_dict()["weight"], packed.unpack())


def test_a_layer_that_only_cusparselt_can_read_says_so_without_a_gpu() -> None:
    layer = _layer(_packed("6:8", "int8"), "cusparselt").cpu()
    with pytest.raises(UnsupportedError):
        layer.state_dict()
