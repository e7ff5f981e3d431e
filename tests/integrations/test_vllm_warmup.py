"""Which batches a layer runs when it is loaded, and within what memory: without vLLM."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from expert_weights import packed_experts

from slidesparse.gemm import get_backend
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.spec import parse_weight
from slidesparse.integrations.warmup import WarmUp, list_batches
from slidesparse.layer.experts import SlideExperts
from slidesparse.layer.linear import SlideLinear
from slidesparse.lifting import kernel as lift
from slidesparse.lifting.layout import LiftSpec
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import pack_by
from slidesparse.weights.quant import Rounding


def sparse_linear(backend: str) -> SlideLinear:
    """INT8, 6:8, 16 columns -> 8 rows."""
    weight = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    packed = pack_by(weight * prune_mask(weight, "6:8"), "6:8", scale=torch.ones(8))
    return SlideLinear(packed, backend=backend)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the batches that layers run."""
    tokens: list[int] = []
    monkeypatch.setattr(SlideLinear, "forward", lambda _, x: tokens.append(len(x)))
    return tokens


def test_the_warm_up_takes_every_route_and_skips_no_octave() -> None:
    found = list_batches(4096, (0, 17, 18, 5000))
    assert found == sorted(set(found))
    assert {1, 17, 18, 2048, 3072, 4096} <= set(found)
    assert all(0 < tokens <= 4096 for tokens in found)
    assert all(later <= 2 * former for former, later in pairwise(found))
    assert list_batches(1, ()) == [1]
    assert list_batches(2500, ())[-1] == 2500


def test_layers_of_a_kind_are_warmed_up_once(ran: list[int]) -> None:
    warmup = WarmUp(4, torch.bfloat16)
    for backend in ("reference", "reference", "dense"):
        warmup.layer(sparse_linear(backend))
    assert ran == [1, 2, 3, 4] * 2


def test_experts_with_weights_of_another_form_are_warmed_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[SlideExperts] = []
    monkeypatch.setattr(SlideExperts, "warm_up", lambda layer, *_: ran.append(layer))
    monkeypatch.setattr(HopperExperts, "warm_up", lambda *_: None)
    roundings: tuple[Rounding, ...] = ("absmax", "6bit", "absmax")
    gate_up, down = (
        [packed_experts(2, 512, size, torch.int8, rounding=one) for one in roundings] for size in (512, 256)
    )
    layers = [SlideExperts(gate_up[i], down[j], HopperExperts()) for i in range(3) for j in range(3)]
    warmup = WarmUp(4, torch.bfloat16)
    for layer in layers:
        warmup.experts(layer, "a", 2)
    assert ran == [layers[place] for place in (0, 1, 3, 4)]


def test_a_warm_up_that_memory_ended_is_done_by_the_next_layer_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def run(_: object, dtype: torch.dtype, top_k: int) -> None:
        tried.append(top_k)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SlideExperts, "warm_up", run)
    layer = SlideExperts(packed_experts(2, 16, 16, torch.int8), packed_experts(2, 16, 8, torch.int8))
    warmup = WarmUp(4, torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError):
        warmup.experts(layer, "a", 2)
    warmup.experts(layer, "a", 2)
    warmup.experts(layer, "a", 2)
    assert tried == [2, 2]


def test_a_warm_up_ends_where_its_memory_does(ran: list[int]) -> None:
    token_bytes = 2 * (16 + 8) + 2 * 16  # bf16 in and out, int8 lifted
    for memory, most in ((100 * token_bytes, 100), (1, 1)):
        WarmUp(4096, torch.bfloat16, memory=memory).layer(sparse_linear("reference"))
        assert max(ran) == most
        ran.clear()


@pytest.mark.parametrize("prologue", ["rms_norm", "add_rms_norm", "silu_mul"])
def test_lifting_kernels_are_warmed_up_within_the_same_memory(prologue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    listener = SimpleNamespace(run=lambda x, *_: read.append(x.nbytes))
    monkeypatch.setattr(lift, "find_kernel_lift", lambda *_: listener)
    weight = parse_weight(sparse_linear("reference").spec)
    (form,) = weight.forms
    warmup = WarmUp(4096, torch.bfloat16, memory=1 << 14)
    spec = LiftSpec(prologue, torch.bfloat16, weight.weight_dtype, form.order, get_backend("reference").layout)
    warmup._lift_batches(spec, weight, "reference", torch.device("cpu"))
    assert 1 << 12 < max(read) < 1 << 14
