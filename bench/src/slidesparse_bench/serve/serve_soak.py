"""The verdict on a soak: whether every request was answered whole, and whether memory and waits stayed as they were."""

from __future__ import annotations

from collections.abc import Sequence

from slidesparse_bench.serve.serve_load import Request, Served, between, to_first
from slidesparse_bench.served_figures import Growth, Soak, Waits

MOST_GPU_MB, MOST_HOST_MB = 100.0, 500.0
"""Memory, in 1e6 bytes, that may be taken over a soak: the GPU's is taken before, allocators of the host settle."""

MOST_SLOPE_MB = 20.0
"""Of the host's memory, a minute, in the last two thirds: what grows so fast for a day fills 29 GB."""

MOST_SLOWER = 1.5
"""What the 99th percentile of a wait may grow to, from the first third to the last."""


def verdict(asked: Sequence[Request], answers: Sequence[Served], gpu: Growth | None, host: Growth | None) -> Soak:
    """Judge a soak.

    Args:
        asked: In the order in which they came.
        answers: To each of them.
        gpu: Memory of the GPUs.
        host: Memory of the engine's processes.
    """
    errors = sum(answer.error is not None for answer in answers)
    whole = sum(
        answer.error is None and answer.tokens == request.output for request, answer in zip(asked, answers, strict=True)
    )
    thirds = _thirds(asked, answers)
    return Soak(len(asked), whole, errors, thirds, gpu, host, _faults(len(asked), whole, errors, thirds, gpu, host))


def _thirds(asked: Sequence[Request], answers: Sequence[Served]) -> tuple[Waits | None, ...]:
    whole_s = asked[-1].arrival_s
    parts: list[list[Served]] = [[], [], []]
    for request, answer in zip(asked, answers, strict=True):
        parts[min(2, int(3 * request.arrival_s / whole_s))].append(answer)
    return tuple(map(_waits, parts))


def _waits(answers: Sequence[Served]) -> Waits | None:
    first = to_first(answers)
    return None if first is None else Waits(first, between(answers))


def _faults(
    asked: int, whole: int, errors: int, thirds: Sequence[Waits | None], gpu: Growth | None, host: Growth | None
) -> tuple[str, ...]:
    faults = []
    if errors:
        faults.append(f"{errors} of {asked} requests ended with an error")
    if (lost := asked - whole - errors) > 0:
        faults.append(f"{lost} of {asked} requests did not get all their tokens")
    for name, grown, most in (("GPU", gpu, MOST_GPU_MB), ("host", host, MOST_HOST_MB)):
        if grown is not None and grown.end_mb - grown.start_mb > most:
            faults.append(f"{name} memory grew by {grown.end_mb - grown.start_mb:.0f} MB, more than {most:.0f}")
    if host is not None and host.slope_mb_a_minute > MOST_SLOPE_MB:
        faults.append(f"host memory grows by {host.slope_mb_a_minute:.0f} MB a minute, more than {MOST_SLOPE_MB:.0f}")
    return (*faults, *_slower(thirds))


def _slower(thirds: Sequence[Waits | None]) -> list[str]:
    begin, end = thirds[0], thirds[-1]
    if begin is None or end is None:
        return ["a third of the time without an answer"]
    named = {"the first token": (begin.first, end.first), "a token": (begin.between, end.between)}
    return [
        f"the longest hundredth waits {after.p99_ms:.1f} ms for {name} at the end, and {before.p99_ms:.1f} at the start"
        for name, (before, after) in named.items()
        if before is not None and after is not None and after.p99_ms > MOST_SLOWER * before.p99_ms
    ]
