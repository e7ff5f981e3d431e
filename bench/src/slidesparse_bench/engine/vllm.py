"""``bench vllm``: whole models in vLLM, sparse through the plugin against stock dense vLLM, in one run.

For every model and type, checkpoints of random weights are written, one dense and one for each pattern, and one engine
is started for each; then each measurement goes round all engines, several times over, dense first and last in every
round. Dense is stock vLLM, without the plugin, on the unpruned weights: what a user would otherwise run.

In a turn all engines compute on the same core, the next turn on the next, and what counts of a turn is the time that
one request or step in five undercuts (vllm_engine.py).

* prefill: M tokens as prompts of 1024, one output token each; the time of ``LLM.generate``, scheduling included.
* decode: an engine step in which M sequences decode, 64 of them; default compilation and CUDA graphs.
* kernels: the time of all kernels of one prefill, and of one decoding step, by what they do, from the profiler; for
  vLLM's own choice of CUDA graphs.

With ``auto`` and a backend's name, each pruned checkpoint gets an engine for each. Engines that wait while one is
measured use a share of the machine; with ``alone`` one runs after the other, dense first and last.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from slidesparse.errors import UnsupportedError
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import parse_dtype
from slidesparse_bench import environment
from slidesparse_bench.comparison import now
from slidesparse_bench.engine.vllm_checkpoint import model_config, write_checkpoint
from slidesparse_bench.engine.vllm_engine import BATCHED_TOKENS, DECODE_TOKENS, Engine, EngineOptions
from slidesparse_bench.engine.vllm_profile import EngineProfile, Variant
from slidesparse_bench.problems import ideal_speedup
from slidesparse_bench.records import (
    DENSE_VARIANT,
    ENGINE,
    KERNELS,
    STEP_KERNELS,
    Case,
    Clocks,
    Record,
    Timing,
    new_records,
)

STOCK, OURS = "vllm", "slidesparse"

CLASSES = (
    ("attention", re.compile("flash::|FlashAttn|flash_fwd|attention|fmha")),
    ("gemm", re.compile("^(?!triton).*(gemm|cutlass|xmma|nvjet)|^scale_kernel", re.IGNORECASE)),
    ("elementwise", re.compile("triton|quant|held_kernel|walking_kernel|norm|silu", re.IGNORECASE)),
    ("rest", re.compile("")),
)
"""Class of a kernel -> names that belong to it; the first match counts. Attention's are CUTLASS kernels too, cuBLASLt's
are called nvjet, and Inductor names its kernels after their neighbours in the graph, products included. Norms,
activations, quantisation and rotary embeddings are one class, since each engine fuses them in its own way."""


Engines: TypeAlias = dict[Variant, Engine]
"""The running engines, dense first."""

Held: TypeAlias = Callable[[Variant], AbstractContextManager[Engine]]
"""Starts the engine of a variant, and stops it in the end."""


def run(profile: EngineProfile, path: Path, scratch: Path | None = None) -> list[Record]:
    """Measure, and write each record as soon as it exists.

    Args:
        profile: The engines and sizes.
        path: A new file.
        scratch: Where checkpoints are written and removed again: a dense one and one a pattern; the system's
            temporary folder when None.

    Raises:
        InputError: The file exists already or cannot be written.
        UnsupportedError: No GPU, no vLLM, or an engine that does not start.
    """
    environment.require_gpu()
    if find_spec("vllm") is None:
        raise UnsupportedError("slidesparse bench vllm needs vLLM", remedy='pip install "slidesparse[vllm]"')
    records = []
    with new_records(path) as file:
        for model in profile.models:
            for dtype in profile.dtypes:
                for record in _measure(profile, model, dtype, scratch):
                    file.write(record.to_line() + "\n")
                    file.flush()
                    records.append(record)
    return records


def _measure(profile: EngineProfile, model: str, dtype: str, scratch: Path | None) -> Iterator[Record]:
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:

        @contextmanager
        def held(variant: Variant) -> Iterator[Engine]:
            engine = Engine(_engine_options(profile, model, dtype, variant, Path(folder)))
            try:
                yield engine
            finally:
                engine.stop()

        measure = _one_after_the_other if profile.alone else _side_by_side
        yield from measure(profile, Case(ENGINE, model, "", dtype, 0, 0, 0), held)


def _side_by_side(profile: EngineProfile, case: Case, held: Held) -> Iterator[Record]:
    with ExitStack() as stack:
        engines = {variant: stack.enter_context(held(variant)) for variant in profile.variants()}
        yield from _failures(engines, case)
        weights = {variant: _weights(engine) for variant, engine in engines.items()}
        each = list(engines.values())
        for kind, size in profile.sizes():
            started, clocks, (*seconds, again) = _rounds([*each, each[0]], kind, size, profile.rounds)
            times = _Times(started, clocks, dict(zip(engines, seconds, strict=True)), again)
            yield from _records(weights, replace(case, layer=profile.kind(kind), tokens=size), times)
        yield from _kernels(profile, case, engines)


class _Turn(NamedTuple):
    """What an engine did alone: its rounds of every size, the bytes of its weights, its kernels."""

    rounds: dict[tuple[str, int], _Rounds]
    weights: int
    kernels: list[Record]


def _one_after_the_other(profile: EngineProfile, case: Case, held: Held) -> Iterator[Record]:
    turns: list[tuple[Variant, _Turn]] = []
    dense, *others = profile.variants()
    for variant in (dense, *others, dense):
        try:
            turns.append((variant, _alone(profile, case, held, variant)))
        except UnsupportedError as error:
            if not turns:
                raise
            yield _failure(case, variant, error)
    twice = len(turns) > 1 and turns[-1][0] == dense  # else it died the second time
    measured = dict(turns[: len(turns) - twice])
    weights = {variant: turn.weights for variant, turn in measured.items()}
    for kind, size in profile.sizes():
        first, last = (turn.rounds[kind, size] for _, turn in (turns[0], turns[-1]))
        seconds = {variant: turn.rounds[kind, size].seconds[0] for variant, turn in measured.items()}
        clocks = first.clocks[0], last.clocks[1]
        times = _Times(first.started, clocks, seconds, last.seconds[0] if twice else None)
        yield from _records(weights, replace(case, layer=profile.kind(kind), tokens=size), times)
    for turn in measured.values():
        yield from turn.kernels


def _alone(profile: EngineProfile, case: Case, held: Held, variant: Variant) -> _Turn:
    with held(variant) as engine:
        engine.ready()
        rounds = {what: _rounds([engine], *what, profile.rounds) for what in profile.sizes()}
        return _Turn(rounds, _weights(engine), list(_kernels(profile, case, {variant: engine})))


def _weights(engine: Engine) -> int:
    taken: float = engine.call("weights_gb")
    return round(1e9 * taken)


def _kernels(profile: EngineProfile, case: Case, engines: Engines) -> Iterator[Record]:
    """Yield the times of kernels; only for vLLM's own choice of CUDA graphs."""
    if profile.graphs is not None:
        return
    yield from _kernel_records(engines, "prefill", replace(case, benchmark=KERNELS, tokens=BATCHED_TOKENS))
    for size in profile.decode:
        yield from _kernel_records(engines, "decode", replace(case, benchmark=STEP_KERNELS, tokens=size))


def _failures(engines: Engines, case: Case) -> Iterator[Record]:
    """Wait for all engines; drop and record those of ours that do not start.

    Raises:
        UnsupportedError: The dense engine does not start, and times without it mean nothing.
    """
    for variant, engine in list(engines.items()):
        try:
            engine.ready()
        except UnsupportedError as error:
            if variant.pattern == DENSE_VARIANT:
                raise
            del engines[variant]
            yield _failure(case, variant, error)


def _failure(case: Case, variant: Variant, error: UnsupportedError) -> Record:
    return _record(case, variant, now(), (environment.NO_CLOCKS, environment.NO_CLOCKS), why_not=str(error))


def _record(case: Case, variant: Variant, started: str, clocks: tuple[Clocks, Clocks], **found: Any) -> Record:
    return Record(
        case,
        environment.machine(),
        started,
        *clocks,
        variant.label,
        OURS if variant.backend else STOCK,
        algorithm=variant.backend,
        ideal_speedup=ideal_speedup(variant.pattern),
        **found,
    )


def _engine_options(profile: EngineProfile, model: str, dtype: str, variant: Variant, parent: Path) -> EngineOptions:
    """Write the checkpoint of a variant, unless it is there already, and say how to serve it."""
    config = model_config(model, profile.layers)
    folder = parent / variant.pattern.replace(":", "of")
    if not folder.exists():
        device = torch.device("cuda", torch.cuda.current_device())
        write_checkpoint(folder, config, parse_dtype(dtype), Pattern.parse(variant.pattern), device)
        torch.cuda.empty_cache()
    arguments: dict[str, Any] = {"quantization": "slidesparse"} if dtype == "bf16" and variant.backend else {}
    if profile.graphs is not None:
        arguments["compilation_config"] = {"max_cudagraph_capture_size": profile.graphs}
    # A key and a value of two bytes for every token that is held at a time, and some more to round to blocks. Prompts
    # that end with their first token free their blocks for the next ones, so two batches of those are enough.
    token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    tokens = max(min(max(profile.prefill), 2 * BATCHED_TOKENS), DECODE_TOKENS * max(profile.decode))
    # Engines that start side by side would measure their layers on a busy GPU; they go by what is known.
    ours = {"backend": variant.backend, "tune": "auto" if profile.alone else "off"}
    additional = {"slidesparse": ours} if variant.backend else {}
    return EngineOptions(
        folder, bool(variant.backend), additional, arguments, kv_cache_gb=1.2e-9 * token_bytes * tokens
    )


@dataclass(frozen=True)
class _Times:
    """Seconds of every round by variant; dense, the first one, is timed again after all others, or has died by then."""

    started: str
    clocks: tuple[Clocks, Clocks]
    seconds: Mapping[Variant, Sequence[float]]
    again: Sequence[float] | None

    @property
    def noise(self) -> float | None:
        if self.again is None:
            return None
        first, second = (statistics.median(times) for times in (next(iter(self.seconds.values())), self.again))
        return abs(first - second) / first


class _Rounds(NamedTuple):
    """Seconds of every round, for each of some engines; the clocks are read while the last one works."""

    started: str
    clocks: tuple[Clocks, Clocks]
    seconds: tuple[list[float], ...]


def _rounds(engines: Sequence[Engine], kind: str, size: int, rounds: int) -> _Rounds:
    started, before = now(), environment.clocks()
    *others, last = engines
    seconds: list[list[float]] = []
    after = before
    for turn in range(rounds + 1):
        taken = [engine.call(kind, size, turn) for engine in others]
        last.ask(kind, size, turn)
        after = environment.clocks()
        seconds.append([*taken, last.answer()])
    counted = seconds[1:]  # the first one warms up: plans, allocations, clocks
    return _Rounds(started, (before, after), tuple(map(list, zip(*counted, strict=True))))


def _records(weights: Mapping[Variant, int], case: Case, times: _Times) -> Iterator[Record]:
    for variant, seconds in times.seconds.items():
        p20, median, p80 = (1e6 * quantile for quantile in _quantiles(seconds))
        yield _record(
            case,
            variant,
            times.started,
            times.clocks,
            timing=Timing(median, p20, p80, len(seconds), 1, "engine"),
            noise=times.noise,
            n_bytes=weights[variant],
        )


def _quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return fifths[0], statistics.median(seconds), fifths[-1]


def _kernel_records(engines: Engines, kind: str, case: Case) -> Iterator[Record]:
    started, clocks = now(), environment.clocks()
    for variant, engine in engines.items():
        for name, time_us in by_class(engine.call("kernels", kind, case.tokens)).items():
            if not time_us:  # of a kind that no kernel is of
                continue
            timing = Timing(time_us, time_us, time_us, 1, 1, "profiler")
            yield _record(replace(case, layer=name), variant, started, (clocks, clocks), timing=timing)


def by_class(kernels: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Return microseconds by what kernels do, from the time and the launches of each.

    >>> by_class({"flash::Kernel": (1.0, 1), "sparse_gemm": (5.0, 4), "held_kernel": (2.0, 4), "copy": (0.5, 1)})
    {'attention': 1.0, 'gemm': 5.0, 'elementwise': 2.0, 'rest': 0.5}
    """
    times = dict.fromkeys((name for name, _ in CLASSES), 0.0)
    for kernel, (time_us, _) in kernels.items():
        times[next(name for name, pattern in CLASSES if pattern.search(kernel))] += time_us
    return times
