"""Mixtures of experts in a real vLLM, sparse against stock on the same checkpoint; tiny random models, eager."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from vllm_answers import difference
from vllm_families import SMALL
from vllm_tiny import TOKENS, Case, Served, prompts, serve

from slidesparse.bench.vllm_engine import Engine, EngineOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(
        find_spec("vllm") is not None
        and not any(find_spec(f"vllm.{name}") for name in ("_moe_C", "_moe_C_stable_libtorch")),
        reason="needs vLLM's compiled operations of mixtures",
    ),
]

ONE, TWO = "one expert a token", "two experts a token"
CASES = {
    f"{dtype}, {family}, {whose}": Case(whose == "sparse", {}, family=family, dtype=dtype, model=model)
    for family, dtype in ((ONE, "int8"), (TWO, "int8"), (TWO, "fp8"))
    for whose, model in (("stock", "first"), ("sparse", "first"), ("nudged", "nudged"))
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    engine = Engine(EngineOptions(tmp_path_factory.mktemp("tiny"), True), serve)
    try:
        engine.ask("run", list(CASES.values()))
        engine.ready()
        yield dict(zip(CASES, engine.answer(), strict=True))
    finally:
        engine.stop()


def served(outcomes: dict[str, Served], name: str) -> Served:
    found = outcomes[name]
    assert found.error is None, f"{name}: {found.error}"
    return found


def test_one_expert_a_token_gives_the_tokens_of_stock_vllm(outcomes: dict[str, Served]) -> None:
    stock, ours = (served(outcomes, f"int8, {ONE}, {whose}") for whose in ("stock", "sparse"))
    assert (stock.facts["experts"], ours.facts["experts"]) == (0, SMALL["num_hidden_layers"])
    assert [len(tokens) for tokens in ours.answers[0].tokens] == [TOKENS] * len(prompts())
    assert ours.answers == stock.answers


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_more_experts_are_as_near_to_stock_as_rounding_allows(outcomes: dict[str, Served], dtype: str) -> None:
    # Stock rounds the weighted product of each expert to bfloat16 and adds those; ours rounds the sum once more.
    stock, ours, nudged = (served(outcomes, f"{dtype}, {TWO}, {whose}") for whose in ("stock", "sparse", "nudged"))
    assert ours.facts["experts"] == SMALL["num_hidden_layers"]
    assert difference(stock.answers[0], nudged.answers[0]) > 0
    assert difference(stock.answers[0], ours.answers[0]) <= difference(stock.answers[0], nudged.answers[0])
