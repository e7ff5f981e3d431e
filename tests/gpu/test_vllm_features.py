"""Families of models and features of a real vLLM, sparse against stock on the same checkpoint; tiny random models.

Stock vLLM serves the pruned checkpoint dense. In eager mode its INT8 products are exact, and so are ours, so every
token and every log-probability must be the same, whatever else is on. Other cases say what they are compared with.
Processes work side by side, each through engines of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest
from tolerances import FP8_TENSOR_CORE
from vllm_answers import difference
from vllm_families import DRAFTED, FAMILIES, SMALL, VISION_MODEL
from vllm_tiny import NUDGE, TOKENS, Answers, Case, Served, prompts, serve

from slidesparse_bench.engine.engine_process import Engine, EngineOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]

COMPILED = {"enforce_eager": False}
JOINED = COMPILED | {"additional_config": {"slidesparse": {"backend": "dense"}}}
"""Every linear dense, and joined with the norm or the activation before it, as a checkpoint's dense linears are."""
SIX_BITS = {"additional_config": {"slidesparse": {"backend": "hopper-6bit"}}}
MODES = {"eager": {}, "compiled": COMPILED}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
ADAPTED = ("ask", "ask with adapter")
NGRAM = "ngram" if find_spec("numba") else "ngram_gpu"


def speculative(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3, **more}, "disable_log_stats": False}


FEATURES: dict[str, dict[str, Any]] = {
    "FP8 KV cache": {"kv_cache_dtype": "fp8"},
    "prefix caching": {"enable_prefix_caching": True},
    "chunked prefill": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
    "async scheduling": {"async_scheduling": True},
    "n-gram speculation": speculative(NGRAM, prompt_lookup_max=4, prompt_lookup_min=2),
    "a dense draft model": speculative("draft_model", model="unmarked"),
    "EAGLE-3": speculative("eagle3", model="eagle"),
    "multi-token prediction": speculative("mtp", num_speculative_tokens=1),
}
"""Feature -> arguments of ``vllm.LLM``; everything eager, INT8, and one prompt at a time."""


def both(name: str, arguments: dict[str, Any], steps: tuple[str, ...] = ("ask",), **more: Any) -> dict[str, Case]:
    """The same case for stock vLLM and for ours."""
    return {f"{name}, {whose}": Case(whose == "sparse", arguments, steps, **more) for whose in ("stock", "sparse")}


def feature(*names: str) -> dict[str, Case]:
    return {key: case for name in names for key, case in both(name, FEATURES[name]).items()}


SLEEPS = {"enable_sleep_mode": True, "kv_cache_memory_bytes": 8_000_000_000}
"""vLLM wants the GPU to have more free memory when an engine sleeps, whatever its neighbours allocate meanwhile."""

GROUPS: list[dict[str, Case]] = [
    *(both(family, {}, family=family) for family in FAMILIES if family not in ("gemma3", DRAFTED)),
    both(DRAFTED, {}, family=DRAFTED)
    | both("multi-token prediction", FEATURES["multi-token prediction"], family=DRAFTED),
    both("gemma3", {}, family="gemma3") | both("compiled gemma3", COMPILED, family="gemma3"),
    feature("FP8 KV cache", "prefix caching", "chunked prefill"),
    feature("async scheduling", "n-gram speculation") | {"sleep": Case(True, SLEEPS, ("ask", "sleep", "sleep deeply"))},
    feature("a dense draft model")
    | {"a sparse draft model": Case(True, speculative("draft_model", model="first"))}
    | both("FP8", {}, dtype="fp8")
    | {"FP8, nudged": Case(False, {}, dtype="fp8", model="nudged")},
    {
        "reloaded": Case(True, COMPILED, ("ask", "reload", "reload what does not fit")),
        "second weights": Case(True, COMPILED, model="second"),
    },
    {
        "joined, reloaded": Case(True, JOINED, ("ask", "reload")),
        "joined, second weights": Case(True, JOINED, model="second"),
        "joined, sleep": Case(True, JOINED | SLEEPS, ("ask", "sleep deeply")),
    },
    {"six bits, stock": Case(False, model="six bits")}
    | {f"six bits, {name}": Case(True, SIX_BITS | more, model="six bits") for name, more in MODES.items()}
    | {"six bits, reloaded": Case(True, SIX_BITS, ("ask", "reload"), model="six bits")},
    both("EAGLE-3", FEATURES["EAGLE-3"], family="deep llama3"),
    both("LoRA", LORA, ADAPTED),
    both("compiled LoRA", LORA | COMPILED, ADAPTED),
]
"""Each is served by one process, one case after the other."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    with ExitStack() as stack:
        engines = []
        for group in GROUPS:
            options = EngineOptions(tmp_path_factory.mktemp("tiny"), True)
            engines.append(Engine(options, serve))
            stack.callback(engines[-1].stop)
            engines[-1].ask("run", list(group.values()))
        found: dict[str, Served] = {}
        for engine, group in zip(engines, GROUPS, strict=True):
            try:
                engine.ready()
                served = engine.answer()
            except Exception as error:  # the tests of this group say so, and the others go on
                served = [Served([], {}, str(error))] * len(group)
            found |= dict(zip(group, served, strict=True))
        yield found


def served(outcomes: dict[str, Served], name: str) -> Served:
    """A case that has answers of all its steps."""
    found = outcomes[name]
    assert found.error is None, f"{name}: {found.error}"
    return found


def assert_same(ours: Answers, stock: Answers) -> None:
    assert [len(tokens) for tokens in ours.tokens] == [TOKENS] * len(prompts())
    assert len({token for tokens in stock.tokens for token in tokens}) > TOKENS  # not one word over and over
    assert ours.tokens == stock.tokens
    assert ours.likeliest == stock.likeliest


def assert_sparse(facts: dict[str, Any]) -> None:
    assert facts["sparse"] in [n * SMALL["num_hidden_layers"] for n in (4, 7, 8)]  # fused, each alone, twice the layers


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_tokens_of_stock_vllm(outcomes: dict[str, Served], family: str) -> None:
    if family == VISION_MODEL and find_spec("torchvision") is None:
        pytest.skip("vLLM's model of this family imports torchvision")
    stock, ours = served(outcomes, f"{family}, stock"), served(outcomes, f"{family}, sparse")
    assert_sparse(ours.facts)
    assert stock.facts["sparse"] == 0
    assert_same(ours.answers[0], stock.answers[0])


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_gives_the_tokens_of_stock_vllm(outcomes: dict[str, Served], name: str) -> None:
    stock, ours = served(outcomes, f"{name}, stock"), served(outcomes, f"{name}, sparse")
    assert_sparse(ours.facts)
    for facts in (stock.facts, ours.facts):
        assert_on(name, facts)
    if name == "multi-token prediction":  # the draft reads hidden states of the same bits
        assert ours.facts["accepted"] == stock.facts["accepted"]
    assert_same(ours.answers[0], stock.answers[0])


def test_weights_of_six_bits_give_the_tokens_of_stock_vllm(outcomes: dict[str, Served]) -> None:
    stock, eager = served(outcomes, "six bits, stock"), served(outcomes, "six bits, eager")
    assert_sparse(eager.facts)
    assert_same(eager.answers[0], stock.answers[0])
    assert_sparse(served(outcomes, "six bits, compiled").facts)
    error = outcomes["six bits, reloaded"].error  # the second weights have eight
    assert error is not None
    assert "cannot be loaded into the running engine; got values of more than six bits" in error


def assert_on(name: str, facts: dict[str, Any]) -> None:
    """The engine did what the feature says."""
    assert facts["cache"].startswith("fp8") == (name == "FP8 KV cache")
    assert (facts["cached"] > 0) == (name == "prefix caching")
    assert (facts["batched"] < max(map(len, prompts()))) == (name == "chunked prefill")
    assert facts["async"] or name != "async scheduling"
    if name in ("n-gram speculation", "a dense draft model", "EAGLE-3", "multi-token prediction"):
        assert facts["draft"] > 0
    # Which n-grams of random text are right differs from release to release.
    if name in ("a dense draft model", "multi-token prediction"):
        assert facts["draft"] >= facts["accepted"] > 0


def test_a_sparse_draft_model_drafts_as_a_dense_one(outcomes: dict[str, Served]) -> None:
    dense, ours = served(outcomes, "a dense draft model, sparse"), served(outcomes, "a sparse draft model")
    assert_sparse(ours.facts)
    assert_same(ours.answers[0], dense.answers[0])
    assert (ours.facts["draft"], ours.facts["accepted"]) == (dense.facts["draft"], dense.facts["accepted"])


def test_an_engine_that_slept_gives_the_same_tokens(outcomes: dict[str, Served]) -> None:
    ours, stock = served(outcomes, "sleep"), served(outcomes, "llama3, stock")
    assert_sparse(ours.facts)
    for answers in ours.answers:  # before, after its weights were in host memory, after they were loaded again
        assert_same(answers, stock.answers[0])


def test_fp8_is_as_near_to_stock_as_its_tensor_cores_allow(outcomes: dict[str, Served]) -> None:
    stock, ours, nudged = (served(outcomes, f"FP8, {whose}") for whose in ("stock", "sparse", "nudged"))
    assert_sparse(ours.facts)
    # Two accumulators differ by at most twice their error, relative to the sum of |x w|. Over K random products that
    # sum is 0.8 K^0.5 times as large as a typical result. A nudge of every output channel by so much is what the
    # Tensor Cores may do at worst to every single output.
    kept = 0.75 * SMALL["hidden_size"]
    assert pytest.approx(2 * FP8_TENSOR_CORE * 0.8 * kept**0.5, rel=0.5) == NUDGE
    assert difference(stock.answers[0], nudged.answers[0]) > 0
    assert difference(stock.answers[0], ours.answers[0]) <= difference(stock.answers[0], nudged.answers[0])


def test_captured_graphs_read_weights_that_are_loaded_again(outcomes: dict[str, Served]) -> None:
    ours, second = served(outcomes, "reloaded"), served(outcomes, "second weights")
    assert_sparse(ours.facts)
    for facts in (ours.facts, second.facts):
        assert "FULL" in facts["graphs"] or "PIECEWISE" in facts["graphs"]
    before, after, _ = ours.answers
    assert before.tokens != after.tokens
    assert_same(after, second.answers[0])


def test_captured_graphs_read_joined_dense_weights_that_are_loaded_again(outcomes: dict[str, Served]) -> None:
    ours, second = served(outcomes, "joined, reloaded"), served(outcomes, "joined, second weights")
    slept = served(outcomes, "joined, sleep")
    for facts in (ours.facts, second.facts, slept.facts):
        assert facts["sparse"] == 0
        assert "FULL" in facts["graphs"] or "PIECEWISE" in facts["graphs"]
    before, after = ours.answers
    assert before.tokens != after.tokens
    assert_same(after, second.answers[0])
    awake, woken = slept.answers
    assert_same(awake, before)
    assert_same(woken, before)


def test_weights_that_do_not_fit_are_refused_in_one_line(outcomes: dict[str, Served]) -> None:
    told = served(outcomes, "reloaded").facts["refused"]
    assert "cannot be loaded into the running engine; got" in told
    assert "violates 6:8" in told
    assert "\n" not in told


def test_compiled_gemma_norms_are_as_near_to_stock_as_stock_is_to_itself(outcomes: dict[str, Served]) -> None:
    eager, stock, ours = (served(outcomes, which) for which in ("gemma3, stock", *both("compiled gemma3", {})))
    assert_sparse(ours.facts)
    # As in test_vllm.py: Inductor rounds and sums in other orders, and 8-bit activations carry that on.
    assert difference(stock.answers[0], ours.answers[0]) <= 2 * difference(stock.answers[0], eager.answers[0])


def test_an_adapter_gives_the_tokens_of_stock_vllm(outcomes: dict[str, Served]) -> None:
    stock, ours = served(outcomes, "LoRA, stock"), served(outcomes, "LoRA, sparse")
    assert_sparse(ours.facts)
    for without, adapted in (stock.answers, ours.answers):
        assert without.tokens != adapted.tokens
    assert_same(ours.answers[0], stock.answers[0])
    # vLLM's kernel of the first low-rank product splits its sum and adds the parts in the order in which they come
    # (vllm/lora/ops/triton_ops/kernel_utils.py, tl.atomic_add), so stock does not repeat itself to the last bit.
    compiled = served(outcomes, "compiled LoRA, stock")
    assert [tokens[0] for tokens in ours.answers[1].tokens] == [tokens[0] for tokens in stock.answers[1].tokens]
    assert difference(stock.answers[1], ours.answers[1]) <= difference(stock.answers[1], compiled.answers[1])


def test_a_compiled_adapter_is_as_near_to_stock_as_stock_is_to_itself(outcomes: dict[str, Served]) -> None:
    eager, stock, ours = (served(outcomes, which) for which in ("LoRA, stock", *both("compiled LoRA", {})))
    assert_sparse(ours.facts)
    for mine, theirs, itself in zip(ours.answers, stock.answers, eager.answers, strict=True):
        assert difference(theirs, mine) <= 2 * difference(theirs, itself)
    assert ours.answers[0].tokens != ours.answers[1].tokens
