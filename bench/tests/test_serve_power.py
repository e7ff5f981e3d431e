"""What a GPU drew, from a pretended NVML."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from slidesparse.errors import UnsupportedError
from slidesparse_bench.serve.serve_load import Served
from slidesparse_bench.serve.serve_measured import Round
from slidesparse_bench.serve.serve_memory import require_free
from slidesparse_bench.serve.serve_power import PowerMeter
from slidesparse_bench.serve.serve_steady import steady, steady_spans


class Nvml:
    """Two GPUs that draw 400 W and 300 W by their counters."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-a": 400, "GPU-b": 300}[uuid]

    def nvmlDeviceGetTotalEnergyConsumption(self, watts: int) -> int:
        return int(1e3 * watts * time.perf_counter())

    def nvmlDeviceGetClockInfo(self, handle: int, what: int) -> int:
        return {400: 1500, 300: 1700}[handle] * what

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=90)

    def nvmlDeviceGetTemperature(self, handle: int, what: int) -> int:
        return handle // 10 + what

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=handle * 10**9)


def test_power_is_energy_over_time_of_all_gpus() -> None:
    meter = PowerMeter(["GPU-a", "GPU-b"], Nvml())
    for _ in range(2):  # it may be used again
        with meter:
            time.sleep(0.25)
        assert abs(meter.power.mean_w - 700) < 35
        assert abs(meter.power.energy_j / meter.power.mean_w - 0.25) < 0.2
        assert meter.power.sm_mhz == 1600
        assert meter.power.temperature_c == 40
        assert meter.power.busy == 0.9
        assert meter.power.memory_gb == 700


@pytest.mark.parametrize("failing", ["ClockInfo", "TotalEnergyConsumption", "MemoryInfo"])
def test_what_nvml_does_not_tell_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    nvml = Nvml()
    meter = PowerMeter(["GPU-a"], nvml)

    def fail(*_: int) -> None:
        raise RuntimeError("the GPU is lost")

    monkeypatch.setattr(nvml, f"nvmlDeviceGet{failing}", fail)
    with meter:
        time.sleep(0.05)
    assert meter.power is None
    assert "no power, clocks or energy: the GPU is lost" in capsys.readouterr().err
    with pytest.raises(ValueError, match="of the workload"), meter:
        raise ValueError("of the workload")


def test_a_load_is_steady_while_requests_wait_for_a_place() -> None:
    answers = [Served((0.5, float(end)), 2) for end in range(1, 11)]
    rounds = [Round(10.0, answers, 0, started) for started in (100.0, 200.0)]
    assert steady_spans(rounds, places=4) == [(101.0, 106.0), (201.0, 206.0)]  # then four are left
    assert steady_spans(rounds, places=10) == []
    found = steady(rounds[:1] * 30, None)
    assert found is None  # ten requests run at once


class Taken(Nvml):
    """The first GPU is free, another program holds half of the second."""

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(free={400: 139, 300: 70}[handle] * 10**9, total=140 * 10**9)


def test_a_gpu_that_others_hold_is_refused_before_an_engine_starts() -> None:
    require_free(["GPU-a"], 0.9, Taken())
    with pytest.raises(UnsupportedError, match=r"GPU-b; got 70\.0 of 140\.0 GB free; needed 126\.0, the 90% that vLLM"):
        require_free(["GPU-a", "GPU-b"], 0.9, Taken())
    require_free(["GPU-unknown"], 0.9, Taken())  # NVML raises: the engine says it later
