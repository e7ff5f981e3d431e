"""A start in SGLang measures the layers that this machine has no times of, before their backends are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slidesparse.integrations.sglang.measuring import make_tuner, measure_first
from tuning_fakes import FakeClock, FakeStopwatch, pretend_gpu

from slidesparse.errors import InputError
from slidesparse.gemm import choose
from slidesparse.integrations.sglang.refusals import SGLangOptions
from slidesparse.layer.linear import packed_problem
from slidesparse.prune import prune_mask
from slidesparse.tuning import at_load
from slidesparse.weights.packed import PackedWeight, pack_segments

OUT, K = 24, 96


@pytest.fixture(autouse=True)
def stopwatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeStopwatch:
    """Dense takes twice as long as the packed form, on a GPU that is none."""
    pretend_gpu(monkeypatch, tmp_path)
    made = FakeStopwatch(lambda backend, _: 2e3 if backend == "dense" else 1e3, FakeClock())
    real = at_load.LoadTuner.__init__

    def with_fakes(self: at_load.LoadTuner, *given: Any) -> None:
        real(self, *given, stopwatch=lambda: made, clock=made.clock, sleep=made.clock.sleep)

    monkeypatch.setattr(at_load.LoadTuner, "__init__", with_fakes)
    return made


def packed() -> PackedWeight:
    weight = torch.randint(1, 128, (OUT, K)).to(torch.int8) * prune_mask(torch.ones(OUT, K), "6:8").to(torch.int8)
    return pack_segments(weight, "6:8", scale=torch.full((OUT,), 1e-2))


def test_a_kind_of_layer_is_measured_once_and_then_chosen_by_its_times(stopwatch: FakeStopwatch) -> None:
    options, problem = SGLangOptions(), packed_problem(packed())
    assert choose(problem).backends == ("dense",)
    tuner = make_tuner(options, 1024, torch.bfloat16)
    measure_first(tuner, problem, options, packed)
    assert choose(problem).backends == ("quick",)
    measured = len(stopwatch.launches)
    assert measured > 0
    for another in (tuner, make_tuner(options, 1024, torch.bfloat16)):  # the next layer, and the next start
        measure_first(another, problem, options, lambda: pytest.fail("it was packed to be measured"))
    assert len(stopwatch.launches) == measured


def test_measuring_can_be_turned_off() -> None:
    options = SGLangOptions.parse({"tune": "off"})
    assert make_tuner(options, 1024, torch.bfloat16) is None
    measure_first(None, packed_problem(packed()), options, lambda: pytest.fail("it was packed to be measured"))
    with pytest.raises(InputError, match="tune of slidesparse in --json-model-override-args"):
        SGLangOptions.parse({"tune": "always"})


@pytest.mark.usefixtures("server")
def test_a_layer_of_sglangs_is_measured_when_it_is_loaded(stopwatch: FakeStopwatch) -> None:
    from test_sglang_plugin import O_PROJ, config_of, loaded, pruned

    layer = loaded(config_of(options=None), O_PROJ, *pruned("6:8", OUT, K))
    assert layer.slide.choice.backends == ("quick",)
    assert stopwatch.launches
