"""Experts are measured when they are loaded: both forms, right ones alone, within the start's time and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_fakes import FakeStopwatch

from slidesparse.gemm import expert_times, select, speed_files
from slidesparse.gemm.expert_times import ExpertKind, choose_experts, measured_here
from slidesparse.pattern import Pattern
from slidesparse.tuning import at_load
from slidesparse.tuning.at_load import LoadTuner
from slidesparse.tuning.measure_experts import ExpertMeasurement

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
    assert found.layer is not None
    assert (found.layer.out, found.layer.columns, found.layer.tokens) == (32, 32, (1, 64, 4096))
    assert found.layer.us == {"dense": (1e3,) * 3, "hopper": (5e2,) * 3}
    assert (found.faults, found.noise) == ({}, 0.0)
    # An expert has 1536 bytes: two of them, and no more than there are, until three caches are full.
    # The most important numbers of tokens come first.
    assert [(name, tokens, calls) for name, tokens, _, calls in watch.prepared] == [
        *(("dense", 64, 1), ("hopper", 64, 1), ("dense", 4096, 1), ("hopper", 4096, 1)),
        *(("dense", 1, 2), ("hopper", 1, 2)),
    ]


def test_calls_of_few_tokens_read_other_experts() -> None:
    many = ExpertMeasurement(replace(KIND, experts=64, everywhere=64), {}, torch.bfloat16, stopwatch(l2_bytes=20000))
    chosen = [tuple(chosen.flatten().tolist()) for _, _, chosen in many.inputs(1)]
    assert len(chosen) == 20
    assert len(set(chosen)) > 15
    assert all(0 <= one < 64 and one != other for one, other in chosen)


def test_a_wrong_form_has_no_time() -> None:
    def wrong(*given: torch.Tensor) -> torch.Tensor:
        return layer(*given) * 1.1

    found = ExpertMeasurement(KIND, forms(layer, wrong), torch.bfloat16, stopwatch()).measure(
        [16, 64], [], lambda: False
    )
    assert found.layer is None
    assert found.faults["hopper"].startswith("WRONG RESULT")


def test_wrong_once_is_wrong() -> None:
    """Whatever was right before: times of it would let it be chosen."""

    def wrong(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return layer(x, *more) * (1.1 if len(x) == 4096 else 1)

    found = ExpertMeasurement(KIND, forms(layer, wrong), torch.bfloat16, stopwatch()).measure(
        [16, 64, 4096], [], lambda: False
    )
    assert found.layer is not None
    assert found.layer.us == {"dense": (1e3,), "hopper": (None,)}  # 64 tokens came first
    assert found.faults["hopper"].startswith("WRONG RESULT")


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
    assert found.layer is not None
    assert found.layer.tokens == (16, 64, 256)  # in place of 4096, and near 1024 no more
    assert [(tokens, capture) for _, tokens, capture, _ in watch.prepared[::2]] == [
        (64, True),
        (256, False),
        (16, True),
    ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(speed_files, "_UNWRITTEN", {})
    for module in (select, expert_times, at_load):
        monkeypatch.setattr(module, "can_be_timed", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(select, "driver_version", lambda: "580.1")


def tuner(watch: FakeStopwatch, budget_s: float = 12.0) -> LoadTuner:
    clock = watch.clock
    return LoadTuner(
        256, torch.bfloat16, LOGGER, budget_s=budget_s, stopwatch=lambda: watch, clock=clock, sleep=clock.sleep
    )


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
    assert ended.endswith(
        f"hopper over dense {share:.2f} at 1, {share:.2f} at 16, {share:.2f} at 64, {share:.2f} at 256 tokens"
    )


@pytest.mark.usefixtures("gpu")
def test_a_form_that_was_wrong_is_not_chosen_by_this_start_or_the_next(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return layer(x, *more) * (1.1 if len(x) == 256 else 1)

    for _ in range(2):
        by = tuner(stopwatch())
        if by.wants_experts(KIND):
            by.measure_experts(KIND, forms(layer, wrong))
        assert not choose_experts(KIND, by.expert_sizes).sparse
    assert "WRONG RESULT" in caplog.text


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
