"""What was measured of a served load: waits, power, memory, and the verdict on a soak."""

from __future__ import annotations

from dataclasses import dataclass

from slidesparse.errors import InputError
from slidesparse_bench.number_range import require_numbers


@dataclass(frozen=True)
class Latency:
    """Milliseconds: half of what users waited was shorter, and all but one in a hundred."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Power:
    """Of all GPUs together, over one workload.

    Attributes:
        energy_j: Energy, by the GPU's counter.
        mean_w: Energy over time.
        sm_mhz: SM clock, the mean of samples.
        temperature_c: The highest.
        busy: Share of time in which any kernel ran, as the driver reports it, however few of the GPU's cores it took.
        memory_gb: Memory in use at the end, in 1e9 bytes.
    """

    energy_j: float
    mean_w: float
    sm_mhz: float
    temperature_c: float
    busy: float
    memory_gb: float


@dataclass(frozen=True)
class Steady:
    """The GPU while requests wait for a place: from the first answer's end until the rest run all at once.

    Attributes:
        seconds: How long that was, in all repeats.
        busy: Share of it in which any kernel ran, as the driver reports it; None where the driver said nothing.
    """

    seconds: float
    busy: float | None


@dataclass(frozen=True)
class Waits:
    """What users waited in a part of a load.

    Attributes:
        first: Time to the first token.
        between: Time between tokens; None where no answer had two.
    """

    first: Latency
    between: Latency | None


@dataclass(frozen=True)
class Growth:
    """Memory over a soak, in 1e6 bytes.

    Attributes:
        start_mb: At its start.
        end_mb: At its end.
        slope_mb_a_minute: Of the line with the least squares through all samples of its last two thirds.
    """

    start_mb: float
    end_mb: float
    slope_mb_a_minute: float


@dataclass(frozen=True)
class Soak:
    """How an engine stood a load that lasts.

    Attributes:
        asked: Requests.
        whole: Of those, how many got as many tokens as they asked for.
        errors: How many ended with an error.
        thirds: Waits of the requests that came in the first, second and last third of the time.
        gpu: Memory in use on all GPUs together; None where the driver would not say.
        host: Resident memory of the engine's processes together; None where the system would not say.
        faults: What is wrong, a sentence each; empty: it passed.
    """

    asked: int
    whole: int
    errors: int
    thirds: tuple[Waits | None, ...]
    gpu: Growth | None
    host: Growth | None
    faults: tuple[str, ...]


def check_figures(first: Latency | None, between: Latency | None, power: Power | None, steady: Steady | None) -> None:
    """Refuse numbers that nobody can have measured.

    Raises:
        InputError: Naming one.
    """
    for latency in (first, between):
        require_numbers(latency or Latency(0, 0), "record.latency", "p50_ms", "p99_ms")
    if steady is not None:
        require_numbers(steady, "record.steady", "seconds", "busy")
    if power is not None:
        require_numbers(power, "record.power", "energy_j", positive=True)
        require_numbers(power, "record.power", "mean_w", "sm_mhz", "temperature_c", "busy", "memory_gb")


def check_soak(soak: Soak) -> None:
    """Refuse numbers that nobody can have measured.

    Raises:
        InputError: Naming one.
    """
    require_numbers(soak, "record.soak", "asked", positive=True)
    require_numbers(soak, "record.soak", "whole", "errors")
    for growth in (soak.gpu, soak.host):
        if growth is not None:
            require_numbers(growth, "record.soak", "start_mb", "end_mb")
    if soak.whole + soak.errors > soak.asked or len(soak.thirds) != 3:
        raise InputError("record.soak", got=f"{soak.whole} whole, {soak.errors} errors", needed=f"{soak.asked} at most")
    for third in soak.thirds:
        if third is not None:
            check_figures(third.first, third.between, None, None)
