"""A start in SGLang measures the layers that this machine has no times of, before their backends are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_sglang_plugin import O_PROJ, config_of, loaded, pruned
from tuning_fakes import FakeClock, FakeStopwatch, pretend_gpu

from slidesparse.tuning import at_load


@pytest.fixture
def stopwatch(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeStopwatch:
    """Dense takes twice as long as the packed form, on a GPU that is none."""
    pretend_gpu(monkeypatch, tmp_path)
    made = FakeStopwatch(lambda backend, _: 2e3 if backend == "dense" else 1e3, FakeClock())
    real = at_load.LoadTuner.__init__

    def with_fakes(self: at_load.LoadTuner, *given: Any) -> None:
        real(self, *given, stopwatch=lambda: made, clock=made.clock, sleep=made.clock.sleep)

    monkeypatch.setattr(at_load.LoadTuner, "__init__", with_fakes)
    return made


def backends(options: dict[str, str] | None) -> tuple[str, ...]:
    """What a start chooses for a layer; SGLang's dense product is "dense"."""
    layer = loaded(config_of(options=options), O_PROJ, *pruned("6:8"))
    return tuple(layer.slide.choice.backends) if hasattr(layer, "slide") else ("dense",)


def test_a_kind_of_layer_is_measured_once_and_then_chosen_by_its_times(stopwatch: FakeStopwatch) -> None:
    assert backends({"tune": "off"}) == ("dense",)
    assert not stopwatch.launches
    assert backends(None) == ("quick",)
    measured = len(stopwatch.launches)
    assert measured > 0
    assert backends(None) == backends({"tune": "off"}) == ("quick",)  # the next start reads the times
    assert len(stopwatch.launches) == measured
