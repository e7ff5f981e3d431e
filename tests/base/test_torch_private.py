"""The products and graphs of torch that no documentation promises: what they compute, and what happens without them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._inductor import pattern_matcher

from slidesparse.base import torch_private


def test_products() -> None:
    x, w = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((32, 512), (512, 16)))
    assert torch.equal(torch_private.int8_mm(x, w), (x.long() @ w.long()).int())


def test_no_graph_is_matched_without_all_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert torch_private.can_match_graphs()
    monkeypatch.delattr(pattern_matcher, "fx_to_pattern")
    with caplog.at_level(logging.WARNING):
        assert not torch_private.can_match_graphs()
    assert "fx_to_pattern" in caplog.text


@pytest.mark.gpu
def test_memory_and_streams_are_those_of_public_functions() -> None:
    here = torch.cuda.current_device()
    assert torch_private.is_current(here)
    other = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), other):
        with torch.cuda.stream(stream):
            assert torch_private.current_stream(here) == stream.cuda_stream
    made = torch_private.empty_here(3, 5, torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == ((3, 5), (5, 1), torch.bfloat16)
    assert made.device == torch.device("cuda", here)
