"""Dense INT8 checkpoints without a marker in a real SGLang: stock, fused by the plugin, and with it switched off."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from test_sglang import GRAPHS, Jobs, serve_all
from vllm_answers import difference
from vllm_tiny import Case, Served

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")]

JOBS: Jobs = {
    "stock": (Case(False, GRAPHS, model="unmarked"), {}),
    "fused": (Case(True, GRAPHS, model="unmarked"), {}),
    "not fused": (Case(True, GRAPHS, model="unmarked"), {"fuse": False}),
    "nudged": (Case(False, GRAPHS, model="nudged"), {}),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    return serve_all(tmp_path_factory.mktemp("dense"), JOBS, len(JOBS))


def test_fused_answers_are_as_near_as_slightly_other_scales(outcomes: dict[str, Served]) -> None:
    assert [outcome.error for outcome in outcomes.values()] == [None] * len(JOBS)
    stock, fused, nudged = (outcomes[name].answers[0] for name in ("stock", "fused", "nudged"))
    assert not outcomes["fused"].facts["sparse"]
    assert 0 < difference(stock, fused) <= difference(stock, nudged)  # 0: nothing would have been fused


def test_without_fusing_answers_are_stocks(outcomes: dict[str, Served]) -> None:
    assert outcomes["not fused"].answers == outcomes["stock"].answers
