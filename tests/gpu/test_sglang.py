"""The plugin in a real SGLang, against stock SGLang on the same pruned checkpoint; small random models.

Stock SGLang serves it dense. INT8 products are exact, ours too, and activations are quantised as the server does it: so
every token and every log-probability must be the same where no norm is fused, with CUDA graphs too. Other cases say
what they are compared with. Engines start side by side.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_tiny import DRAFT, REAL, make, served
from vllm_answers import difference
from vllm_tiny import TOKENS, Answers, Case, Served, prompts

from slidesparse_bench.engine.eagle_head import eagle_settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")]

AT_ONCE = 8
GRAPHS = {"disable_cuda_graph": False, "cuda_graph_max_bs_decode": 8, "cuda_graph_max_bs_prefill": 512}
FAMILIES = ("llama3", "qwen2", "qwen3", "gemma3")
FEATURES: dict[str, dict[str, Any]] = {
    "CUDA graphs, prefix cache": GRAPHS | {"disable_radix_cache": False},
    "chunked prefill, no overlap": {"chunked_prefill_size": 64, "disable_overlap_schedule": True},
    "deterministic inference": GRAPHS | {"enable_deterministic_inference": True},
}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4, "speculative_ngram_max_bfs_breadth": 1}
EAGLE = GRAPHS | eagle_settings("sglang", Path("eagle"), None)[0]
DRAFTS = {
    "n-grams": GRAPHS | NGRAM,
    "a draft model": EAGLE | {"speculative_algorithm": "STANDALONE", DRAFT: "unmarked"},
    "EAGLE-3": EAGLE,
}
HOPPER = {"backend": "hopper", "fuse": False}
NEAR = {
    "FP8": ("stock", "sparse", "nudged"),
    "fused norms": ("stock", "sparse", "nudged"),
    "mixture": ("dense", "sparse", "nudged"),
}
"""What is rounded otherwise -> what it is compared with, ours, and what slightly other scales change."""

Jobs = dict[str, tuple[Case, dict[str, Any]]]
"""Name -> case, and the plugin's options."""


def both(name: str, arguments: dict[str, Any], steps: tuple[str, ...] = ("ask",), **more: Any) -> Jobs:
    """The same case for stock SGLang and for ours; loading INT8 weights again ends stock SGLang."""
    asked = {"stock": tuple(step for step in steps if step != "reload"), "sparse": steps}
    return {f"{name}, {who}": (Case(who == "sparse", arguments, some, **more), HOPPER) for who, some in asked.items()}


def near(name: str, options: dict[str, dict[str, Any]], **more: Any) -> Jobs:
    models = dict.fromkeys(NEAR[name], "first") | {"nudged": "nudged"}
    return {
        f"{name}, {who}": (Case(who in options, model=model, **more), options.get(who, {}))
        for who, model in models.items()
    }


# Of INT8 experts stock SGLang has none for an NVIDIA GPU; its own kernel for them runs where the plugin runs none.
EXPERTS = {who: HOPPER | {"experts": "sparse" if who == "sparse" else "dense"} for who in NEAR["mixture"]}
GROUPS = (
    *(both(family, {}, family=family) for family in FAMILIES),
    *(both(name, more, ("ask", "reload", "together")) for name, more in FEATURES.items()),
    *(both(name, more, ("tokens",), family="deep llama3") for name, more in DRAFTS.items()),
    near("FP8", {"sparse": HOPPER}, dtype="fp8"),
    near("fused norms", {"sparse": {"backend": "hopper"}}, arguments=GRAPHS),
    near("mixture", EXPERTS, family="two experts a token"),
)
JOBS: Jobs = {name: job for group in GROUPS for name, job in group.items()}
ALONE: Jobs = {name: (case, {"fuse": False}) for name, (case, _) in both("memory", {}, model=f"{REAL} 6:8").items()}
"""They measure time and memory, and would measure their neighbours."""


def serve_all(folder: Path, jobs: Jobs, at_once: int) -> dict[str, Served]:
    for case, _ in jobs.values():
        make(folder, case)
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(jobs, pool.map(lambda name: served(folder, name, *jobs[name]), jobs), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Served]:
    return serve_all(folder, JOBS, AT_ONCE) | serve_all(folder, ALONE, 1)


def pair(outcomes: dict[str, Served], name: str) -> tuple[Served, Served]:
    """Stock's case and ours, with answers of all their steps; every linear of ours is sparse."""
    stock, ours = (outcomes[f"{name}, {whose}"] for whose in ("stock", "sparse"))
    assert (stock.error, ours.error) == (None, None)
    assert (len(stock.facts["sparse"]), len(ours.facts["sparse"])) == (0, 4)
    return stock, ours


def assert_same(ours: Answers, stock: Answers, words: int = TOKENS) -> None:
    assert [len(tokens) for tokens in ours.tokens] == [TOKENS] * len(prompts())
    assert len({token for tokens in stock.tokens for token in tokens}) > words  # not one word over and over
    assert ours.tokens == stock.tokens
    assert ours.likeliest == stock.likeliest


@pytest.mark.parametrize("name", [*FAMILIES, *FEATURES])
def test_every_family_and_feature_gives_the_bits_of_stock_sglang(outcomes: dict[str, Served], name: str) -> None:
    stock, ours = pair(outcomes, name)
    words = {"words": 4} if name == "gemma3" else {}  # whose random weights say six in all
    assert_same(ours.answers[0], stock.answers[0], **words)
    for facts in (stock.facts, ours.facts):
        assert (facts["cached_tokens"] > 0) == (name == "CUDA graphs, prefix cache")
        assert (facts["chunk"] < max(map(len, prompts()))) == (name == "chunked prefill, no overlap")
        assert facts["graphs"] == ("disable_cuda_graph" in FEATURES.get(name, {}))


@pytest.mark.parametrize("name", FEATURES)
def test_weights_are_not_loaded_again_and_the_engine_goes_on(outcomes: dict[str, Served], name: str) -> None:
    _, (done, said), after = pair(outcomes, name)[1].answers
    assert not done
    assert "weights for a running engine with sparse layers; got" in said
    assert [len(tokens) for tokens in after] == [TOKENS] * len(prompts())


def test_deterministic_answers_do_not_depend_on_the_batch(outcomes: dict[str, Served]) -> None:
    for found in pair(outcomes, "deterministic inference"):
        assert found.answers[-1] == found.answers[0].tokens


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_give_the_tokens_of_stock_sglang_with_the_same_draft(outcomes: dict[str, Served], name: str) -> None:
    stock, ours = pair(outcomes, name)
    assert ours.answers == stock.answers
    for count in ("spec_verify_ct", "spec_num_correct_drafts"):
        assert ours.facts[count] == stock.facts[count]
    assert ours.facts["spec_verify_ct"] > 0
    assert ours.facts["spec_num_correct_drafts"] > 0 or name != "a draft model"  # which is the model itself


@pytest.mark.parametrize("name", NEAR)
def test_what_is_rounded_otherwise_is_as_near_as_slightly_other_scales(outcomes: dict[str, Served], name: str) -> None:
    dense, ours, nudged = (outcomes[f"{name}, {whose}"] for whose in NEAR[name])
    assert (dense.error, ours.error, nudged.error) == (None, None, None)
    mixed = [any(kind.endswith("experts") for kind in found.facts["sparse"]) for found in (dense, ours)]
    assert mixed == [False, name == "mixture"]
    assert len(ours.facts["sparse"]) == (3 if name == "mixture" else 4)
    limit = difference(dense.answers[0], nudged.answers[0])
    assert limit > 0
    # As in test_vllm_features.py and test_vllm_experts.py, where the nudge and the step of logits are explained.
    assert difference(dense.answers[0], ours.answers[0]) <= limit + (2 * 2.0**-6 if name == "mixture" else 0)


def test_a_start_keeps_what_it_measured(outcomes: dict[str, Served], folder: Path) -> None:
    stock, ours = outcomes["memory, stock"], outcomes["memory, sparse"]
    assert (stock.error, ours.error) == (None, None)
    assert ours.facts["measured"]
    assert len(ours.facts["sparse"]) > 0
    assert any((folder / "cache" / "slidesparse").iterdir())
    assert ours.answers == stock.answers


def test_packed_weights_take_no_more_memory(outcomes: dict[str, Served]) -> None:
    stock, ours = outcomes["memory, stock"], outcomes["memory, sparse"]
    assert (stock.error, ours.error) == (None, None)
    assert ours.facts["weights_gb"] <= stock.facts["weights_gb"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_bits_of_stock_sglang(folder: Path) -> None:
    # Last, when no other engine runs: ranks want as much free memory as each other. Shards cut groups of 6.
    found = serve_all(folder, both("two GPUs", {"tp_size": 2}, model=f"{REAL} 4:6"), 1)
    stock, ours = pair(found, "two GPUs")
    assert_same(ours.answers[0], stock.answers[0])
