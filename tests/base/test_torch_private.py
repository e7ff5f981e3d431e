"""What stands in for torch's private functions gives what they give."""

from __future__ import annotations

import logging

import pytest
import torch

from slidesparse.base import torch_private
from slidesparse.errors import UnsupportedError

INT_MM = "torch._int_mm"


def test_what_torch_lacks_is_said_once_and_something_public_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch, "_int_mm")
    monkeypatch.setattr(
        torch_private, "int8_mm", torch_private._at_first_call("int8_mm", INT_MM, torch_private._public_int8_mm)
    )
    torch_private.find.cache_clear()
    x, w = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((32, 2048), (2048, 16)))
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert torch.equal(torch_private.int8_mm(x, w), (x.long() @ w.long()).int())
            with pytest.raises(UnsupportedError, match=r"needed one that has torch\._int_mm$"):
                torch_private.require(INT_MM)
    finally:
        torch_private.find.cache_clear()
    assert caplog.messages == [
        f"slidesparse: torch {torch.__version__} has no torch._int_mm: dense INT8 products run in float64"
    ]


def test_public_int8_products_are_torchs_own() -> None:
    x, w = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((32, 512), (512, 16)))
    assert torch.equal(torch_private._public_int8_mm(x, w), torch._int_mm(x, w))


@pytest.mark.parametrize("biased", [False, True])
def test_public_fp8_products_are_the_formula(biased: bool) -> None:
    x, w = (torch.randn(size).to(torch.float8_e4m3fn) for size in ((5, 64), (64, 16)))
    scale_x, scale_w = torch.rand(5, 1), torch.rand(1, 16)
    bias = torch.randn(16).bfloat16() if biased else None
    y = torch_private._public_fp8_mm(x, w, scale_x, scale_w, bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    exact = x.double() @ w.double() * scale_x.double() * scale_w.double()
    exact = exact if bias is None else exact + bias.double()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)


GRAPHS = [name for name, instead in torch_private.PRIVATE.items() if instead == torch_private._GRAPHS]


@pytest.mark.parametrize("hidden", GRAPHS)
def test_no_graph_is_matched_without_all_that_it_takes(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    assert torch_private.can_match_graphs()
    find = torch_private.find
    monkeypatch.setattr(torch_private, "find", lambda name: None if name == hidden else find(name))
    assert not torch_private.can_match_graphs()
    with pytest.raises(UnsupportedError, match=f"needed one that has {hidden}$"):
        torch_private.pattern_of(torch.relu, (4, 2), torch.bfloat16)


@pytest.mark.gpu
def test_public_ways_on_a_gpu_are_the_private_ones() -> None:
    here = torch.cuda.current_device()
    assert torch_private.is_current(here)
    other = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), other):
        with torch.cuda.stream(stream):
            numbers = {torch_private.current_stream(here), torch_private._public_stream(here)}
            assert numbers == {stream.cuda_stream}
    made = torch_private.empty_here(3, 5, torch.bfloat16)
    public = torch_private._public_empty((3, 5), (5, 1), torch.bfloat16)
    for tensor in (made, public):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 5), (5, 1), torch.bfloat16)
        assert tensor.device == torch.device("cuda", here)
