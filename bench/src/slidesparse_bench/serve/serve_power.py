"""What a GPU draws while it serves: energy from its own counter, clocks and load from samples, ten a second."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import TracebackType
from typing import Any, TypeVar

from slidesparse_bench.served_figures import Power

T = TypeVar("T")

INTERVAL_S = 0.1

LOOKBACK_S = 1.0
"""A sample of the load tells the share of time in which any kernel ran, over up to so long before it: NVIDIA's
documentation of nvmlUtilization_t says 1/6 s to 1 s, by the product."""

SOURCES = ("pynvml", "vllm.third_party.pynvml")


@dataclass(frozen=True)
class GpuSample:
    """One look at one GPU: SM clock in MHz, load in percent, temperature in degrees Celsius."""

    at: float
    clock: float
    busy: float
    warm: float


class PowerMeter:
    """Measures between entering and leaving; where NVML fails meanwhile there is no ``power``, and a line says so.

    Args:
        uuids: Of the GPUs.
        nvml: NVIDIA's library; None: where it is installed.
    """

    def __init__(self, uuids: Sequence[str], nvml: Any = None) -> None:
        self._nvml = nvml if nvml is not None else open_nvml()
        self._handles = [self._nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        self._samples: list[GpuSample] = []
        self.power: Power | None = None

    def __enter__(self) -> PowerMeter:
        self._samples, self.power = [], None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._started, self._from_j = time.perf_counter(), self._guarded(self._energy)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = time.perf_counter() - self._started
        self._stop.set()
        self._thread.join()
        self.power = self._guarded(lambda: self._power(seconds)) if self._samples else None

    def _guarded(self, read: Callable[[], T]) -> T | None:
        """Read something of NVML, whose errors are its own: nothing else depends on them."""
        try:
            return read()
        except Exception as error:
            print(f"slidesparse: no power, clocks or energy: {error}", file=sys.stderr)
            return None

    def _power(self, seconds: float) -> Power | None:
        if self._from_j is None:
            return None
        energy = self._energy() - self._from_j
        return Power(
            energy,
            energy / seconds,
            statistics.fmean(sample.clock for sample in self._samples),
            max(sample.warm for sample in self._samples),
            statistics.fmean(sample.busy for sample in self._samples) / 100,
            self._memory_bytes() / 1e9,
        )

    def memory_bytes(self) -> int | None:
        """In use now, on all GPUs together; None where NVML does not tell."""
        return self._guarded(self._memory_bytes)

    def _memory_bytes(self) -> int:
        return sum(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)

    def busy_during(self, spans: Sequence[tuple[float, float]]) -> float | None:
        """Share of some time in which any kernel ran; None where no sample tells of that time alone.

        Args:
            spans: Begin and end of each part, on the clock of time.perf_counter.
        """
        found = [
            sample.busy
            for sample in self._samples
            if any(begin + LOOKBACK_S <= sample.at <= end for begin, end in spans)
        ]
        return statistics.fmean(found) / 100 if found else None

    def _energy(self) -> float:
        return sum(float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) for handle in self._handles) / 1e3

    def _sample(self) -> None:
        if not self._guarded(self._sample_until_stopped):
            self._samples = []  # of a part of the time

    def _sample_until_stopped(self) -> bool:
        nvml = self._nvml
        while True:
            for handle in self._handles:
                clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                warm = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
                self._samples.append(GpuSample(time.perf_counter(), float(clock), float(busy), float(warm)))
            if self._stop.wait(INTERVAL_S):
                return True


def open_nvml() -> Any:
    """Return NVIDIA's library, ready to be asked.

    Raises:
        ImportError: It is not installed.
        Exception: NVML's own, where there is no driver.
    """
    for name in SOURCES:
        try:
            nvml = import_module(name)
        except ImportError:
            continue
        nvml.nvmlInit()
        return nvml
    raise ImportError("neither pynvml nor vLLM's copy of it is installed")
