"""Experts are packed where neither decoding nor prompts get slower, by times that were measured here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tuning_fakes import pretend_hopper

from slidesparse.gemm import select, speed_files
from slidesparse.gemm.backend import Problem
from slidesparse.gemm.expert_times import (
    NOT_MEASURED,
    ExpertKind,
    choose_experts,
    keep_expert_times,
    measured_here,
    pays,
    was_wrong,
)
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.select import WRONG_HERE, choose, find_measured
from slidesparse.gemm.speed import Experts, LayerSpeed
from slidesparse.gemm.speed_files import add_layers
from slidesparse.weights.pattern import Pattern

CPU = torch.device("cpu")
PATTERNS = Pattern(6, 8), Pattern(6, 8)
KIND = ExpertKind(torch.int8, *PATTERNS, hidden=64, inner=32, experts=8, everywhere=8, top_k=2, device=CPU)
TOKENS = (16, 64, 256, 1024, 4096)


def times(*shares: float | None, tokens: tuple[int, ...] = TOKENS) -> LayerSpeed:
    """Of experts that take these shares of 100 us."""
    us = {"dense": (100.0,) * len(tokens), "hopper": tuple(None if s is None else 100 * s for s in shares)}
    return LayerSpeed("int8", 64, 64, tokens, us)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_hopper(monkeypatch, tmp_path, select)


@pytest.mark.parametrize(
    ("shares", "packed"),
    [
        ((0.9, 0.9, 0.9, 0.9, 0.9), True),
        ((1.03, 1.03, 1.03, 0.8, 0.8), True),  # as noise could have it
        ((1.04, 1.04, 1.04, 0.5, 0.5), False),  # decoding pays for prompts
        ((0.6, 0.6, 0.6, 1.04, 1.04), False),  # prompts pay for decoding
        ((0.9, 1.09, 0.9, 1.09, 0.9), True),
        ((0.5, 1.11, 0.5, 0.5, 0.5), False),
        ((0.5, None, 0.5, 0.5, 0.5), False),
    ],
)
def test_neither_decoding_nor_prompts_may_get_slower(shares: tuple[float | None, ...], packed: bool) -> None:
    assert pays(times(*shares)) == packed


def test_an_m_without_a_time_of_stock_says_nothing_for_packed_experts() -> None:
    layer = times(0.5, 0.5, 0.5, 0.5, 0.5)
    assert not pays(replace(layer, us={**layer.us, "dense": (100.0, None, 100.0, 100.0, 100.0)}))


def test_nothing_measured_is_dense() -> None:
    choice = choose_experts(KIND, TOKENS)
    assert (choice.sparse, choice.reason) == (False, "experts like them have not been measured on this GPU")


def test_times_are_kept_and_found_by_the_same_experts_alone() -> None:
    keep_expert_times(KIND, times(0.8, 0.8, 0.8, 0.9, 0.9))
    choice = choose_experts(KIND, TOKENS)
    assert (choice.sparse, choice.reason) == (True, "hopper takes 0.80 to 0.90 of dense's time; measured here")
    assert measured_here(KIND) == TOKENS
    others = {"experts": 16, "everywhere": 16}, {"top_k": 1}, {"everywhere": 16}, {"pattern": Pattern(4, 6)}
    for other in (*others, {"down": Pattern(4, 6)}, {"dtype": torch.float8_e4m3fn}, {"hidden": 640}):
        assert measured_here(replace(KIND, **other)) == ()  # type: ignore[arg-type]
        assert not choose_experts(replace(KIND, **other), TOKENS).sparse  # type: ignore[arg-type]


def test_experts_with_two_patterns_have_times_of_their_own() -> None:
    keep_expert_times(KIND, times(0.8, 0.8, 0.8, 0.9, 0.9))
    both = replace(KIND, down=Pattern(2, 4))
    keep_expert_times(both, times(1.5, 1.5, 1.5, 1.5, 1.5))
    assert (KIND.form, both.form) == ("6:8", "6:8 and 2:4")
    assert str(both) == "int8 8 experts 64x64 6:8 and 2:4"
    assert choose_experts(KIND, TOKENS).sparse
    assert choose_experts(both, TOKENS).reason == "hopper takes 1.50 of dense's time; measured here"
    assert not choose_experts(replace(both, pattern=Pattern(2, 4)), TOKENS).sparse
    layers = speed_files.load_speeds(speed_files.tuned_path(select.installation(CPU))).layers
    assert [layer.experts for layer in layers] == [Experts(8, 8, 2), Experts(8, 8, 2, down="2:4")]


def test_experts_of_six_bits_have_times_of_their_own() -> None:
    keep_expert_times(KIND, times(0.8, 0.8, 0.8, 0.9, 0.9))
    six = replace(KIND, bits=6)
    assert (choose_experts(six, TOKENS).reason, measured_here(six)) == (NOT_MEASURED, ())
    keep_expert_times(replace(six, down=Pattern(4, 6)), times(0.5, 0.5, 0.5, 0.5, 0.5), ["hopper"])
    keep_expert_times(six, times(1.5, 1.5, 1.5, 1.5, 1.5))
    assert choose_experts(six, TOKENS).reason == "hopper takes 1.50 of dense's time; measured here"
    assert choose_experts(KIND, TOKENS).reason == "hopper takes 0.80 to 0.90 of dense's time; measured here"
    assert str(six) == f"{KIND}, 6 bits"
    assert was_wrong(replace(six, down=Pattern(4, 6)))
    assert not was_wrong(six)


def test_times_of_experts_and_of_linears_of_one_size_stay_apart() -> None:
    keep_expert_times(KIND, times(0.5, 0.5, 0.5, 0.5, 0.5))
    problem = Problem(KIND.pattern, KIND.dtype, 64, 64, CPU)
    assert find_measured(problem, ["dense", "hopper"]) is None
    linear = times(2.0, 2.0, 2.0, 2.0, 2.0)
    add_layers(
        select.installation(CPU), [replace(linear, us={"dense": linear.us["dense"], "hopper 6:8": linear.us["hopper"]})]
    )
    found = find_measured(problem, ["dense", "hopper"])
    assert found.us["hopper"] == (200.0,) * 5
    assert choose_experts(KIND, TOKENS).reason == "hopper takes 0.50 of dense's time; measured here"


def test_decoding_and_prompts_must_both_be_measured() -> None:
    keep_expert_times(KIND, times(0.8, 0.8, tokens=(16, 64)))
    choice = choose_experts(KIND, TOKENS)
    assert not choice.sparse
    assert choice.reason.endswith("measured here; no prompt was measured")
    assert choose_experts(KIND, (16, 256)).sparse  # an engine that never has more
    keep_expert_times(KIND, times(0.9, tokens=(4096,)))
    assert choose_experts(KIND, TOKENS).sparse
    other = replace(KIND, pattern=Pattern(4, 6))
    keep_expert_times(other, times(0.8, tokens=(1024,)))
    assert choose_experts(other, TOKENS).reason.endswith("no decoding step was measured")


def test_experts_that_were_wrong_stay_dense_until_the_kernel_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    good = times(0.8, 0.8, 0.8, 0.9, 0.9)
    keep_expert_times(KIND, good)
    keep_expert_times(KIND, None, ["hopper"])
    for _ in range(2):
        choice = choose_experts(KIND, TOKENS)
        assert (choice.sparse, choice.reason) == (False, f"hopper: {WRONG_HERE}")
        keep_expert_times(KIND, good)
    for other in ({"top_k": 1}, {"pattern": Pattern(4, 6)}):
        assert choose_experts(replace(KIND, **other), TOKENS).reason == NOT_MEASURED  # type: ignore[arg-type]
    problem = Problem(KIND.pattern, KIND.dtype, 64, 64, CPU)
    assert choose(problem).reason != f"hopper: {WRONG_HERE}"  # a linear of this size is another kernel's
    monkeypatch.setattr(Hopper, "library", lambda _: "slidesparse hopper-99")
    assert choose_experts(KIND, TOKENS).reason == NOT_MEASURED
    keep_expert_times(KIND, times(0.8, 0.9, tokens=(16, 1024)))
    assert choose_experts(KIND, TOKENS).sparse
