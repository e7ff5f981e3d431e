"""A start in SGLang measures the layers that this machine has no times of, before their backends are chosen."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from test_sglang_plugin import O_PROJ, built, config_of, loaded, pruned
from tuning_fakes import FakeStopwatch, pretend_start


@pytest.fixture
def stopwatch(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeStopwatch:
    """Dense takes twice as long as the packed form, on a GPU that is none."""
    return pretend_start(monkeypatch, tmp_path)


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


@pytest.mark.usefixtures("stopwatch")
def test_a_start_says_what_is_gained_after_the_last_layer(caplog: pytest.LogCaptureFixture) -> None:
    """A linear that the checkpoint leaves dense counts by the times of one of its shape; one was thrown away."""

    def told() -> list[str]:
        return [line for line in caplog.messages if " of dense's time for " in line]

    caplog.set_level("INFO")
    marker = {"version": 1, "pattern": "6:8", "ignore": [], "layers": {"a.1.o_proj": "dense"}}
    config = config_of(marker, options=None)
    sparse, dense, thrown = (built(config, f"a.{i}.o_proj", *pruned("6:8")) for i in range(3))
    del thrown
    gc.collect()  # its parameters hold it
    sparse.quant_method.process_weights_after_loading(sparse)
    assert told() == []
    dense.quant_method.process_weights_after_loading(dense)
    shares = "0.75 of dense's time for 16 tokens, 0.75 for 64, 0.75 for 256, 0.75 for 1024, 0.75 for 4096"
    assert told() == [f"slidesparse: by times measured here the linears take {shares}"]
    sparse.quant_method.process_weights_after_loading(sparse)  # the end of an update, which was refused
    assert len(told()) == 1
    caplog.clear()
    loaded(config_of(options={"backend": "quick"}), O_PROJ, *pruned("6:8"))
    assert told() == []
