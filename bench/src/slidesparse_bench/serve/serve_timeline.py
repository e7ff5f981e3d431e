"""Where the time of engine steps goes: a profile of vLLM's worker, reduced to a few numbers a step.

vLLM marks each step in its profile with the requests and tokens that it runs, as
``execute_context_2(700)_generation_254(254)``. Whatever the host launches from one such mark to the next belongs to the
first, with what the GPU does for it; a kernel is found from its launch by their common correlation id, which those of a
CUDA graph share.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from slidesparse_bench.served_records import Step

LIFT = "lift"
"""Quantise and lift, with norm or activation."""

CLASSES = {
    LIFT: re.compile("resident_kernel|walking_kernel"),
    "attention": re.compile("flash::|FlashAttn|flash_fwd|attention|fmha"),
    "gemm": re.compile("^(?!triton).*(gemm|cutlass|xmma|nvjet)|^scale_kernel", re.IGNORECASE),
    "elementwise": re.compile("triton|quant|norm|silu", re.IGNORECASE),
    "rest": re.compile(""),
}
"""Class of a kernel -> names that belong to it; the first match counts. Attention's are CUTLASS kernels too, cuBLASLt's
are called nvjet, and Inductor names its kernels after their neighbours in the graph, products included. Norms,
activations, quantisation and rotary embeddings are one class, since each engine fuses them in its own way."""

MARK = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")

HOST, GPU = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events: calls of the host into CUDA, and work of the GPU."""

SCOPES = ("user_annotation", "gpu_model_runner: ")
"""Category, and the beginning of the names, of vLLM's own parts of a step; with VLLM_CUSTOM_SCOPES_FOR_PROFILING."""

MOST_NAMES = 8
"""Calls into CUDA, and parts of vLLM, that a step tells of, the slowest."""


def read_steps(trace: Path) -> list[Step]:
    """The steps of a profile that torch wrote."""
    with trace.open(encoding="utf-8") as file:
        return reduce_steps(json.load(file)["traceEvents"])


def reduce_steps(events: Iterable[Mapping[str, Any]]) -> list[Step]:
    """Sort events into the steps they belong to; the last step, of which the end is not known, is left out.

    Args:
        events: Of a trace in Chrome's format, in any order.
    """
    marks: list[tuple[float, float, tuple[int, ...]]] = []
    host, gpu, scopes = [], [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, name = event.get("cat"), event["name"]
        if kind in HOST:
            host.append(event)
        elif kind in GPU:
            gpu.append(event)
        elif kind == SCOPES[0]:
            if found := MARK.search(name):
                marks.append((event["ts"], event["dur"], tuple(map(int, found.groups()))))
            elif name.startswith(SCOPES[1]):
                scopes.append(event)
    marks.sort()
    return _steps(marks, host, gpu, scopes)


def _steps(
    marks: Sequence[tuple[float, float, tuple[int, ...]]],
    host: Sequence[Mapping[str, Any]],
    gpu: Sequence[Mapping[str, Any]],
    scopes: Sequence[Mapping[str, Any]],
) -> list[Step]:
    starts = [mark[0] for mark in marks]

    def place(event: Mapping[str, Any]) -> int:
        return bisect_right(starts, event["ts"]) - 1

    launched = {call["args"]["correlation"]: place(call) for call in host if "correlation" in call.get("args", {})}
    work: list[list[Mapping[str, Any]]] = [[] for _ in marks]
    for event in gpu:
        index = launched.get(event.get("args", {}).get("correlation"), -1)
        if index >= 0:
            work[index].append(event)
    calls: list[Counter[str]] = [Counter() for _ in marks]
    parts: list[Counter[str]] = [Counter() for _ in marks]
    for found, counters in ((host, calls), (scopes, parts)):
        for event in found:
            if (index := place(event)) >= 0:
                counters[index][event["name"].removeprefix(SCOPES[1])] += event["dur"]
    return [
        _step(mark, after[0], work[index], work[index + 1], calls[index], parts[index])
        for index, (mark, after) in enumerate(pairwise(marks))
        if work[index] and work[index + 1]
    ]


def _step(
    mark: tuple[float, float, tuple[int, ...]],
    end: float,
    work: Sequence[Mapping[str, Any]],
    following: Sequence[Mapping[str, Any]],
    calls: Counter[str],
    parts: Counter[str],
) -> Step:
    start, host_us, (prompts, prompt_tokens, decoding, decoded) = mark
    first, then = (min(event["ts"] for event in some) for some in (work, following))
    names: Counter[str] = Counter()
    for event in work:
        names[event["name"]] += event["dur"]
    return Step(
        tokens=prompt_tokens + decoded,
        prompts=prompts,
        requests=prompts + decoding,
        wall_us=_rounded(end - start),
        host_us=_rounded(host_us),
        gpu_us=_rounded(then - first),
        busy_us=_rounded(covered([(event["ts"], event["ts"] + event["dur"]) for event in work])),
        lead_us=_rounded(first - start),
        kernels_us=by_class(names),
        launches=len(work),
        calls_us=_largest(calls),
        scopes_us=_largest(parts),
    )


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of some spans.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def by_class(names: Mapping[str, float]) -> dict[str, float]:
    """Microseconds by what kernels do, from the time of each.

    >>> by_class({"flash::Kernel": 1.0, "sparse_gemm": 5.0, "resident_kernel": 2.0, "copy": 0.5})
    {'lift': 2.0, 'attention': 1.0, 'gemm': 5.0, 'elementwise': 0.0, 'rest': 0.5}
    """
    times = dict.fromkeys(CLASSES, 0.0)
    for name, time_us in names.items():
        times[next(kind for kind, pattern in CLASSES.items() if pattern.search(name))] += time_us
    return {kind: _rounded(time_us) for kind, time_us in times.items()}


def _largest(times: Counter[str]) -> dict[str, float]:
    return {name: _rounded(time_us) for name, time_us in times.most_common(MOST_NAMES)}


def _rounded(time_us: float) -> float:
    return round(time_us, 1)
