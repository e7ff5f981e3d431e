"""Layers are measured when they are loaded: once, by one process, within a budget, and served whatever goes wrong."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_fakes import FakeClock, FakeStopwatch, Quick, pretend_gpu

from slidesparse.base.file_lock import file_lock
from slidesparse.gemm import Problem, cards, choose, select, speed_files
from slidesparse.gemm.reference import Reference
from slidesparse.gemm.select import installation
from slidesparse.gemm.speed import LayerSpeed
from slidesparse.gemm.speed_files import add_layers, load_speeds, lock_path, tuned_path
from slidesparse.pruning import prune_mask
from slidesparse.tuning import at_load
from slidesparse.tuning.at_load import BUDGET_S, LoadTuner
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.pattern import Pattern

OUT, K = 24, 64
CPU = torch.device("cpu")
PROBLEM = Problem(Pattern(6, 8), torch.int8, OUT, K, CPU)
LOGGER = logging.getLogger("slidesparse.test")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The CPU passes for a GPU, with one accelerated backend."""
    pretend_gpu(monkeypatch, tmp_path)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines of the tuner so far, which are forgotten then."""
    caplog.set_level(logging.INFO)

    def read() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == LOGGER.name]
        caplog.clear()
        return found

    return read


def packed(out: int = OUT, pattern: str = "6:8") -> PackedWeight:
    weight = torch.randint(1, 128, (out, K)).to(torch.int8) * prune_mask(torch.ones(out, K), pattern).to(torch.int8)
    return pack_by(weight, pattern, scale=torch.full((out,), 1e-2))


def tuner(most: int = 1024, budget_s: float = BUDGET_S, dense_us: float = 2e3, **options: Any) -> LoadTuner:
    clock = FakeClock()
    stopwatch = FakeStopwatch(lambda backend, _: dense_us if backend == "dense" else 1e3, clock, **options)
    return LoadTuner(
        most, torch.bfloat16, LOGGER, budget_s=budget_s, stopwatch=lambda: stopwatch, clock=clock, sleep=clock.sleep
    )


def loaded(by: LoadTuner, problem: Problem = PROBLEM) -> bool:
    """Load a layer; returns whether it was measured."""
    if not by.wants(problem):
        return False
    by.measure(problem, packed(problem.out_features, str(problem.pattern)))
    return True


def test_a_layer_is_measured_once_and_read_by_the_next_start(lines: Callable[[], list[str]]) -> None:
    assert choose(PROBLEM).backends == ("dense",)
    by = tuner()
    assert loaded(by)
    assert not loaded(by)  # the next layer of this kind
    choice = choose(PROBLEM)
    assert (choice.backends, choice.reason) == (("quick",), "quick takes 0.50 of dense's time; measured here")
    table = load_speeds(tuned_path(installation(CPU)))
    (layer,) = table.layers
    assert (layer.out, layer.columns, layer.tokens) == (OUT, K, (16, 64, 256, 512, 1024))
    assert layer.us == {"dense": (2e3,) * 5, "quick 6:8": (1e3,) * 5}
    start, end = lines()
    assert start == "slidesparse: measuring int8 24x64 6:8 on this GPU: dense, quick at 16 to 1024 tokens"
    assert end.startswith("slidesparse: measured int8 24x64 6:8 in 0.")
    assert end.endswith("quick 6:8 takes 0.50 of dense's time")
    before = tuned_path(installation(CPU)).stat()
    assert not loaded(tuner())
    assert lines() == []
    assert tuned_path(installation(CPU)).stat() == before


def test_the_times_of_a_gpu_that_this_project_has_not_are_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(at_load, "ask_for_times", cards.ask_for_times)
    by = tuner()
    for pattern in (Pattern(6, 8), Pattern(4, 6)):
        assert loaded(by, replace(PROBLEM, pattern=pattern))
    (asked,) = (line for line in lines() if "docs/cards.md" in line)
    assert str(tuned_path(installation(CPU))) in asked
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert loaded(tuner(), replace(PROBLEM, out_features=2 * OUT))
    assert not [line for line in lines() if "docs/cards.md" in line]


@pytest.mark.parametrize(
    ("problem", "backend", "fallback"),
    [
        (PROBLEM, "quick", "dense"),  # the user chose
        (PROBLEM, "auto", "none"),  # one packed form alone
        (replace(PROBLEM, slid=False), "auto", "dense"),
    ],
)
def test_nothing_is_measured_where_no_time_decides(problem: Problem, backend: str, fallback: Any) -> None:
    assert not tuner().wants(problem, backend, fallback)


def test_nothing_is_measured_on_a_cpu_or_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not tuner().wants(PROBLEM)
    with monkeypatch.context() as patch:
        patch.setattr(select, "can_be_timed", lambda device: device.type == "cuda")
        assert not tuner().wants(PROBLEM)
    assert tuner().wants(PROBLEM)


def test_after_the_budget_the_next_start_goes_on(lines: Callable[[], list[str]]) -> None:
    by, other = tuner(budget_s=0.2), replace(PROBLEM, out_features=32)
    assert loaded(by)
    assert not loaded(by, other)
    assert by.spent_s < 0.4
    assert choose(PROBLEM).reason.endswith("measured here")
    assert choose(other).reason == select.NOT_MEASURED
    (told,) = [line for line in lines() if "measuring ends after 0.2 s of this start" in line]
    assert "the next start measures the rest" in told
    again = tuner()
    assert loaded(again)
    assert loaded(again, other)
    assert choose(other).reason.endswith("measured here")


def test_a_busy_gpu_gives_no_times(lines: Callable[[], list[str]]) -> None:
    loaded(tuner(disturbance=1.1))
    assert "so the GPU is busy" in lines()[1]
    assert choose(PROBLEM).backends == ("dense",)
    assert not tuned_path(installation(CPU)).exists()


# -- wrong results ---------------------------------------------------------------------------------------------------

WRONG = "quick: its result was wrong when it was measured here"


def make_wrong(monkeypatch: pytest.MonkeyPatch, above: int = 0) -> None:
    """Let the packed form be wrong for more tokens than ``above``."""
    right = Reference.matmul

    def matmul(self: Quick, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(self, x, *rest) * (2 if len(x) > above else 1)

    monkeypatch.setattr(Quick, "matmul", matmul)


def test_on_a_busy_gpu_a_wrong_form_is_wrong_all_the_same(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    with monkeypatch.context() as patch:
        make_wrong(patch)
        lines()
        assert loaded(tuner(disturbance=1.1))
    told = lines()
    assert "quick is not measured everywhere: WRONG RESULT" in told[1]
    assert "so the GPU is busy" in told[2]
    assert (choose(PROBLEM).backends, choose(PROBLEM).reason) == (("dense",), WRONG)
    assert choose(PROBLEM, fallback="none").backends == ("reference",)
    assert choose(PROBLEM, "quick").backends == ("quick",)  # who names it gets it
    table = load_speeds(tuned_path(installation(CPU)))
    assert table.layers == ()
    assert not loaded(tuner())
    assert choose(PROBLEM).backends == ("dense",)
    assert choose(replace(PROBLEM, out_features=32)).reason == select.NOT_MEASURED  # another kind


def test_who_is_wrong_in_a_later_start_is_not_chosen_by_earlier_times(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    assert loaded(tuner(most=256))
    assert choose(PROBLEM).backends == ("quick",)
    make_wrong(monkeypatch, above=256)
    assert loaded(tuner(most=2048))
    assert any("WRONG RESULT" in line for line in lines())
    assert (choose(PROBLEM).backends, choose(PROBLEM).reason) == (("dense",), WRONG)


def test_a_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    def fail(*_: object) -> None:
        raise ValueError("CUDA error: unknown\nmore")  # torch's for scales that it does not take

    monkeypatch.setattr(at_load.LayerMeasurement, "measure", fail)
    loaded(tuner())
    assert lines()[1:] == ["slidesparse: int8 24x64 6:8 is not measured: CUDA error: unknown"]


# -- the file --------------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    def full(path: Path, content: str | bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(speed_files, "replace_file", full)
    assert loaded(tuner())
    assert choose(PROBLEM).reason.endswith("measured here")
    assert "(not kept)" in lines()[-1]
    assert not loaded(tuner())  # this process knows


# -- several processes -----------------------------------------------------------------------------------------------


def test_a_process_waits_for_another_one_and_reads_its_times(lines: Callable[[], list[str]]) -> None:
    here = installation(CPU)
    times = LayerSpeed("int8", OUT, K, (16, 64, 256, 512, 1024), {"dense": (1.0,) * 5, "quick 6:8": (0.5,) * 5})
    with ExitStack() as held:
        held.enter_context(file_lock(lock_path(here, "cpu"), 0))
        by = tuner()

        def other_ends(seconds: float) -> None:
            add_layers(here, [times])
            held.close()

        by._sleep = other_ends
        loaded(by)
    assert lines() == ["slidesparse: waiting for another process that measures"]
    assert choose(PROBLEM).measured == replace(times, us={"dense": (1.0,) * 5, "quick": (0.5,) * 5})


def test_a_process_waits_no_longer_than_the_budget(lines: Callable[[], list[str]]) -> None:
    with file_lock(lock_path(installation(CPU), "cpu"), 0):
        by = tuner(budget_s=3.0)
        loaded(by)
    assert by.spent_s == pytest.approx(3.0, abs=0.1)
    assert len(lines()) == 2
    assert not loaded(by, replace(PROBLEM, out_features=32))
    assert lines() == []
    assert choose(PROBLEM).backends == ("dense",)


def test_a_server_does_not_wait_for_those_on_other_gpus_and_a_rank_does_for_the_first_one(
    monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    here = installation(CPU)
    with file_lock(lock_path(here), 0), file_lock(lock_path(here, "GPU-2"), 0):
        by = tuner()
        assert loaded(by)
        assert not [line for line in lines() if "waiting" in line]
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        loaded(by, replace(PROBLEM, out_features=32))
        assert lines()[0] == "slidesparse: waiting for another process that measures"
