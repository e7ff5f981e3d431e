"""Experts are measured when they are loaded: both forms, right ones alone, within the start's time and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_fakes import FakeStopwatch, pretend_hopper

from slidesparse.gemm import select
from slidesparse.gemm.expert_times import ExpertKind, choose_experts, measured_here
from slidesparse.tuning import at_load
from slidesparse.tuning.at_load import LoadTuner
from slidesparse.tuning.measure_experts import ExpertMeasurement
from slidesparse.weights.pattern import Pattern

CPU = torch.device("cpu")
PATTERNS = Pattern(6, 8), Pattern(6, 8)
KIND = ExpertKind(torch.int8, *PATTERNS, hidden=32, inner=16, experts=4, everywhere=4, top_k=2, device=CPU)
LOGGER = logging.getLogger("slidesparse.test")


class Form:
    """Experts under the name of a form."""

    def __init__(self, backend: str, layer: Callable[..., torch.Tensor]) -> None:
        self.backend, self.layer = backend, layer

    def run(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self.layer(x, weights, chosen)


def layer(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What both forms compute here; it depends on all that they are given."""
    return x * (weights * chosen).sum(1, keepdim=True).to(x.dtype)


def forms(layer: Callable[..., torch.Tensor], packed: Callable[..., torch.Tensor] | None = None) -> dict[str, Any]:
    named = {"dense": Form("dense", layer), "hopper": Form("hopper", packed or layer)}
    return {name: form.run for name, form in named.items()}


def stopwatch(share: float = 0.5, **options: Any) -> FakeStopwatch:
    return FakeStopwatch(lambda form, _: 1e3 * (share if form == "hopper" else 1), **options)


def test_both_forms_are_timed_with_other_choices_in_every_call() -> None:
    watch = stopwatch(l2_bytes=2000)
    found = ExpertMeasurement(KIND, forms(layer), torch.bfloat16, watch).measure([1, 64, 4096], [], lambda: False)
    assert (found.layer.out, found.layer.columns, found.layer.tokens) == (32, 32, (1, 64, 4096))
    assert found.layer.us == {"dense": (1e3,) * 3, "hopper": (5e2,) * 3}
    assert (found.faults, found.noise) == ({}, 0.0)
    # An expert has 1536 bytes: two of them, and no more than there are, until three caches are full.
    # The most important numbers of tokens come first.
    assert [(name, tokens, calls) for name, tokens, _, calls in watch.prepared] == [
        *(("dense", 64, 1), ("hopper", 64, 1), ("dense", 4096, 1), ("hopper", 4096, 1)),
        *(("dense", 1, 2), ("hopper", 1, 2)),
    ]


def test_wrong_once_is_wrong() -> None:
    """Whatever was right before: times of it would let it be chosen."""

    def wrong(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return layer(x, *more) * (1.1 if len(x) == 4096 else 1)

    found = ExpertMeasurement(KIND, forms(layer, wrong), torch.bfloat16, stopwatch()).measure(
        [16, 64, 4096], [], lambda: False
    )
    assert found.layer.tokens == (64, 4096)  # 64 tokens came first, and nothing after the wrong one
    assert found.layer.us == {"dense": (1e3, 1e3), "hopper": (None, None)}
    assert found.faults["hopper"].startswith("WRONG RESULT")
    assert found.wrong == {"hopper"}


def test_experts_of_vllm_that_differ_from_themselves_are_no_fault_of_the_packed_ones() -> None:
    calls = []

    def unsteady(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return layer(x, *more) * (2 if len(x) == 4096 and len(calls) % 2 else 1)

    packed = forms(unsteady, layer)
    found = ExpertMeasurement(KIND, packed, torch.bfloat16, stopwatch()).measure([64, 4096], [], lambda: False)
    assert found.faults["dense"].startswith("WRONG RESULT")
    assert found.layer.us == {"dense": (1e3,), "hopper": (None,)}  # compared with what is not to be trusted
    assert found.wrong == frozenset()


def test_what_vllm_refuses_is_a_fault_and_no_crash() -> None:
    def refuses(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no workspace\nmore")

    found = ExpertMeasurement(KIND, forms(refuses, layer), torch.bfloat16, stopwatch()).measure([16], [], lambda: False)
    assert (found.layer, found.faults) == (None, {"dense": "AssertionError: no workspace"})


def test_memory_ends_it_at_the_largest_number_that_fits() -> None:
    # A token has 2 rows of 192 bytes: 64 lifted, 64 of gate and up, 64 of the product, in 16 bits.
    watch = stopwatch(memory=300 * 2 * 192)
    measurement = ExpertMeasurement(KIND, forms(layer), torch.bfloat16, watch)
    found = measurement.measure([16, 64, 1024, 4096], [], lambda: False)
    assert found.layer.tokens == (16, 64, 256)  # in place of 4096, and near 1024 no more
    assert [(tokens, capture) for _, tokens, capture, _ in watch.prepared[::2]] == [
        (64, True),
        (256, False),
        (16, True),
    ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_hopper(monkeypatch, tmp_path, select, at_load)


def tuner(watch: FakeStopwatch, budget_s: float = 12.0, most: int = 256) -> LoadTuner:
    clock = watch.clock
    return LoadTuner(
        most, torch.bfloat16, LOGGER, budget_s=budget_s, stopwatch=lambda: watch, clock=clock, sleep=clock.sleep
    )


def always_wrong(*given: torch.Tensor) -> torch.Tensor:
    return layer(*given) * 1.1


def loaded(by: LoadTuner, packed: Callable[..., torch.Tensor] = layer) -> bool:
    """Load experts; returns whether they were measured."""
    if not by.wants_experts(KIND):
        return False
    by.measure_experts(KIND, forms(layer, packed))
    return True


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("share", "sparse"), [(0.5, True), (1.2, False)])
def test_the_tuner_measures_a_kind_once_and_the_next_start_reads(
    caplog: pytest.LogCaptureFixture, share: float, sparse: bool
) -> None:
    caplog.set_level(logging.INFO)
    by = tuner(stopwatch(share))
    assert by.wants_experts(KIND)
    by.measure_experts(KIND, forms(layer))
    assert not by.wants_experts(KIND)
    assert measured_here(KIND) == (1, 16, 64, 256)
    assert choose_experts(KIND, by.expert_sizes).sparse == sparse
    assert not tuner(stopwatch(share)).wants_experts(KIND)
    begun, ended = caplog.messages
    head = "slidesparse: measuring int8 4 experts 32x32 6:8 on this GPU: packed and as they are, at 1 to 256 tokens"
    assert begun == head
    assert ended.endswith(f"hopper takes {share:.2f} of dense's time")


@pytest.mark.usefixtures("gpu")
def test_a_wrong_form_is_not_chosen_until_the_driver_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    by = tuner(stopwatch(), most=4096)
    assert loaded(by, always_wrong)
    assert "hopper is not measured everywhere: WRONG RESULT" in caplog.text
    for start in (by, tuner(stopwatch(), most=16384)):
        assert not loaded(start)
        choice = choose_experts(KIND, start.expert_sizes)
        assert (choice.sparse, choice.reason) == (False, "hopper: its result was wrong when it was measured here")
    monkeypatch.setattr(select, "driver_version", lambda: "600.1")
    assert loaded(tuner(stopwatch(), most=4096))
    assert choose_experts(KIND, by.expert_sizes).sparse


@pytest.mark.usefixtures("gpu")
def test_a_start_without_time_measures_what_matters_and_the_next_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    by = tuner(stopwatch(), budget_s=1e-3)
    assert by.wants_experts(KIND)
    by.measure_experts(KIND, forms(layer))
    assert measured_here(KIND) == (64,)
    assert "measuring ends after 0.001 s of this start" in caplog.text
    assert not by.wants_experts(replace(KIND, top_k=1))
    after = tuner(stopwatch())
    assert after.wants_experts(KIND)
    after.measure_experts(KIND, forms(layer))
    assert measured_here(KIND) == (1, 16, 64, 256)
