"""Benchmark records with numbers that are easy to compute with."""

from __future__ import annotations

from slidesparse_bench.known_models import LAYERS
from slidesparse_bench.records import Case, Clocks, Machine, Record, Timing, Tried

MACHINE = Machine(
    gpu="Test GPU",
    capability="9.0",
    driver="580.1",
    memory_gb=141.0,
    l2_mb=50.0,
    torch="2.11.0",
    cuda="13.0",
    triton=None,
    cusparselt="0.8.0",
    vllm=None,
    slidesparse="0.1.0",
    commit="abc123",
)
IDLE, LOADED = Clocks(345.0, 75.0, 30.0), Clocks(1500.0, 690.0, None)
SHAPES = dict(zip(LAYERS, ((48, 32), (32, 32), (96, 32), (32, 64)), strict=True))


def case(layer: str = "qkv", tokens: int = 64, *, benchmark: str = "gemm", dtype: str = "int8") -> Case:
    return Case(benchmark, "Tiny", layer, dtype, tokens, *SHAPES[layer])


def record(
    of: Case,
    variant: str,
    median_us: float | None,
    *,
    backend: str = "torch",
    ideal: float | None = None,
    n_bytes: int = 0,
    started: str = "2026-11-20T10:00:00.000000+00:00",
    machine: Machine = MACHINE,
    why_not: str | None = None,
) -> Record:
    timing = None if median_us is None else Timing(median_us, median_us * 0.9, median_us * 1.1, 20, 4, "graph", 7.5)
    return Record(
        case=of,
        machine=machine,
        started=started,
        clocks_before=IDLE,
        clocks_after=LOADED,
        variant=variant,
        backend=backend,
        algorithm=f"{backend} kernel",
        tried=(Tried(f"{backend} kernel", median_us), Tried("another", None, "it refused")),
        timing=timing,
        why_not=why_not,
        error=None if timing is None else 0.001,
        noise=None if timing is None else 0.004,
        ideal_speedup=ideal,
        n_bytes=n_bytes,
    )
