"""What a GPU drew, from a pretended NVML."""

from __future__ import annotations

import time
from types import SimpleNamespace

from slidesparse.bench.serve_power import PowerMeter


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
        assert meter.power is not None
        assert abs(meter.power.mean_w - 700) < 35
        assert abs(meter.power.energy_j / meter.power.mean_w - 0.25) < 0.2
        assert meter.power.sm_mhz == 1600
        assert meter.power.temperature_c == 40
        assert meter.power.busy == 0.9
        assert meter.power.memory_gb == 700
