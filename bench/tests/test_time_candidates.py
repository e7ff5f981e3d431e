"""How many copies of its operands a timing needs: one rule for the search and for the benchmarks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slidesparse.tuning.timing import l2_bytes
from slidesparse_bench.kernels.time_candidates import copies_to_rotate

H200_L2 = 50 << 20


@pytest.mark.parametrize(("n_bytes", "copies"), [(1 << 40, 2), (H200_L2, 4), (H200_L2 - 1, 5), (1 << 20, 64)])
def test_the_search_keeps_to_the_launches_of_a_graph(
    n_bytes: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(L2_cache_size=H200_L2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert copies_to_rotate(n_bytes, 0) == copies
    assert l2_bytes() == H200_L2
    del found.L2_cache_size
    assert l2_bytes(0) == 40 << 20
