"""Run a vLLM engine in a process of its own, which times the work that this process asks for.

Engines of several variants run at the same time, so that their measurements alternate on one GPU: while one works the
others wait. They also start at the same time, since starting takes most of a benchmark's minutes.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from slidesparse.base.python_stack import with_room
from slidesparse.errors import UnsupportedError, first_line

PROMPT = 1024
"""Tokens of a prompt in prefill."""

MOST_REQUESTS, TURN_TOKENS = 10, 20480
"""The most requests and tokens of a prefill in one turn. All engines have the same number, or the faster one would have
more times to choose from, and it is small, so that a slow phase of the host meets all engines."""

DECODE_PROMPT, DECODE_STEPS = 16, 64
"""Tokens of a prompt in decoding, and steps that are timed."""

MARGIN_STEPS = 8
"""Steps before the timed ones, in which prompts are read, and after them, in which the scheduler runs out of work."""

DECODE_TOKENS = 128
"""The most tokens of the key-value cache that a decoding sequence takes."""

BATCHED_TOKENS = 16384
SEQUENCES = 512

STOP_S = 20.0
"""An engine has so long to end by itself."""

FIRST_TOKEN, VOCABULARY = 10, 100_000
"""Token ids of random prompts."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # needs a compiler at run time; sampling is short, and the same for all
}


FarEnd: TypeAlias = Callable[[Connection, Any], None]
"""Runs in an engine's process, with that process's end of a pipe and the options."""


@dataclass(frozen=True)
class EngineOptions:
    """The options of one engine.

    Attributes:
        folder: Its checkpoint.
        plugin: Load slidesparse's plugin; without it the engine is stock vLLM.
        additional: The value of ``--additional-config``.
        arguments: More arguments of ``vllm.LLM``.
        kv_cache_gb: Memory of its key-value cache, in 1e9 bytes.
        share: Share of the GPU's memory that vLLM must find free when it starts.
    """

    folder: Path
    plugin: bool
    additional: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    kv_cache_gb: float = 6.0
    share: float = 0.1


class Engine:
    """An engine in another process, as this process sees it: calls run there, one at a time.

    Args:
        options: The engine to start. The constructor returns at once; :meth:`ready` waits.
        far_end: The function that runs in the other process: :func:`answer_calls` with a driver.
    """

    def __init__(self, options: EngineOptions, far_end: FarEnd | None = None) -> None:
        context = get_context("spawn")
        self._near, far = context.Pipe()
        self._process = context.Process(target=far_end or _serve, args=(far, options))
        self._process.start()
        far.close()

    def ready(self, timeout_s: float = 600.0) -> None:
        """Wait until the engine can be used.

        Raises:
            UnsupportedError: The engine did not start.
        """
        self.answer(timeout_s)

    def ask(self, name: str, *arguments: Any) -> None:
        """Start a method of :class:`Driver` in the other process; :meth:`answer` waits for it."""
        with suppress(OSError):  # that process has ended, as its answer will say
            self._near.send((name, arguments))

    def answer(self, timeout_s: float = 600.0) -> Any:
        """Wait for the method that was asked for last, and return its value.

        Raises:
            UnsupportedError: It failed, or took too long.
        """
        if not self._near.poll(timeout_s):
            raise UnsupportedError("the vLLM engine does not answer", got=f"nothing in {timeout_s:.0f} s")
        try:
            value, error = self._near.recv()
        except (EOFError, OSError):
            value, error = None, "its process ended; its output says why"
        if error is not None:
            raise UnsupportedError("the vLLM engine failed", got=error)
        return value

    def call(self, name: str, *arguments: Any) -> Any:
        """Ask for a method of :class:`Driver`, and return its value."""
        self.ask(name, *arguments)
        return self.answer()

    def stop(self) -> None:
        """Ask the engine's process to end, kill it after :data:`STOP_S`, and wait until it has ended."""
        with suppress(OSError):
            self._near.send(None)
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()  # until then it has its memory, and the next engine may find none


@with_room  # for stock vLLM too: the frames of this benchmark above an engine must not decide which is faster
def _serve(connection: Connection, options: EngineOptions) -> None:
    os.environ.update(ENVIRONMENT)
    if all(options.arguments.get(f"{kind}_parallel_size", 1) == 1 for kind in ("tensor", "pipeline")):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler must see the kernels
    if not options.plugin:
        os.environ["VLLM_PLUGINS"] = "none"
    answer_calls(connection, lambda: Driver(options))


def answer_calls(
    connection: Connection, make: Callable[[], Any], tell: Callable[[Exception], str] = first_line
) -> None:
    """Make a driver, and call its methods as the other process asks, until it sends None.

    The first answer, without a value, says that the driver was made, or why it was not.

    Args:
        connection: The near end's pipe.
        make: Makes the driver.
        tell: Says what an error is, in one line.
    """
    driver: Any = None
    message: tuple[str, tuple[Any, ...]] | None = ("start", ())
    while message is not None:
        try:
            if driver is None:
                driver, value = make(), None
            else:
                value = getattr(driver, message[0])(*message[1])
            connection.send((value, None))
        except Exception as error:  # any error must reach the other process
            traceback.print_exc()
            connection.send((None, tell(error)))
            if driver is None:
                return
        message = connection.recv()


class Driver:
    """The engine, in its own process, and the calls that it answers."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM

        settings: dict[str, Any] = {
            "model": str(options.folder),
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "max_num_batched_tokens": BATCHED_TOKENS,
            "max_num_seqs": SEQUENCES,
            "gpu_memory_utilization": options.share,
            "kv_cache_memory_bytes": int(options.kv_cache_gb * 1e9),
            "enable_prefix_caching": False,  # random prompts repeat nothing
            "disable_log_stats": True,
            "additional_config": options.additional,
        }
        self.llm = LLM(**settings | options.arguments)
        self._cores = sorted(os.sched_getaffinity(0))

    def prefill(self, tokens: int, turn: int) -> float:
        """Return the seconds of a prefill of ``tokens`` tokens: prompts of :data:`PROMPT`, one output token each.

        :func:`undisturbed` of ten requests, of fewer from 4096 tokens on, of one from 16384 on.
        """
        self._take_core(turn)
        prompt = min(PROMPT, tokens)
        prompts = _random_prompts(tokens // prompt, prompt, seed=turn)
        taken = []
        for _ in range(max(1, min(MOST_REQUESTS, TURN_TOKENS // tokens))):
            start = time.perf_counter()
            self._generate(prompts, 1)
            taken.append(time.perf_counter() - start)
        return undisturbed(taken)

    def decode(self, sequences: int, turn: int) -> float:
        """Return the seconds of one decoding step of ``sequences``: :func:`undisturbed` of :data:`DECODE_STEPS`."""
        self._take_core(turn)
        with self._decoding(sequences, seed=turn) as step:
            times = [time.perf_counter()]
            for _ in range(DECODE_STEPS):
                step()
                times.append(time.perf_counter())
        return undisturbed([after - before for before, after in pairwise(times)])

    def tokens(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return greedy continuations of some prompts."""
        outputs = self._generate(prompts, count)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def first_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> list[dict[int, float]]:
        """Return token -> logarithm of its probability, for the ``count`` likeliest first tokens of some prompts."""
        outputs = self._generate(prompts, 1, logprobs=count)
        return [{t: entry.logprob for t, entry in output.outputs[0].logprobs[0].items()} for output in outputs]

    def kernels(self, kind: str, size: int) -> dict[str, tuple[float, int]]:
        """Return microseconds and launches of every kernel in one prefill, or in one decoding step, a mean."""
        if kind == "prefill":
            prompt = min(PROMPT, size)
            prompts = _random_prompts(size // prompt, prompt, 1)
            return _profiled(lambda: self._generate(prompts, 1), 1)
        with self._decoding(size, 1) as step:
            return _profiled(step, DECODE_STEPS)

    def weights_gb(self) -> float:
        """Return the bytes of parameters and buffers of the model, in 1e9; the first worker's."""
        first, *_ = self.llm.apply_model(_bytes)
        return float(first) / 1e9

    def _take_core(self, turn: int) -> None:
        """Compute on one core: all engines do a turn on the same one, the next turn on the next.

        Some cores of a shared host are slow for many seconds, and a process stays on the one it has.
        """
        os.sched_setaffinity(0, {self._cores[turn % len(self._cores)]})

    @contextmanager
    def _decoding(self, sequences: int, seed: int) -> Iterator[Callable[[], Any]]:
        """Give an engine step in which all sequences decode; it may be called :data:`DECODE_STEPS` times."""
        engine = self.llm.llm_engine
        sampling = _greedy(DECODE_STEPS + 2 * MARGIN_STEPS)
        self.llm.enqueue(_inputs(_random_prompts(sequences, DECODE_PROMPT, seed)), sampling, use_tqdm=False)
        for _ in range(MARGIN_STEPS):
            engine.step()
        yield engine.step
        while engine.has_unfinished_requests():
            engine.step()

    def _generate(self, prompts: Sequence[Sequence[int]], output: int, **settings: Any) -> list[Any]:
        answer: list[Any] = self.llm.generate(_inputs(prompts), _greedy(output, **settings), use_tqdm=False)
        return answer


def undisturbed(seconds: Sequence[float]) -> float:
    """Return the time that one request or step in five undercuts; of fewer than five, the fastest.

    A host has phases, of tenths of a second, in which everything takes up to twice as long, in stock vLLM too and with
    one engine alone on the machine (results/h200/vllm/stack-depth.txt); a median follows them.

    >>> undisturbed([3.0, 1.0, 2.0, 9.0, 8.0])
    2.0
    """
    return sorted(seconds)[len(seconds) // 5]


def _random_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn: list[list[int]] = torch.randint(FIRST_TOKEN, VOCABULARY, (count, tokens), generator=generator).tolist()
    return drawn


def _inputs(prompts: Sequence[Sequence[int]]) -> list[Any]:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def _greedy(output: int, **settings: Any) -> Any:
    """Return sampling parameters for ``output`` tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0, detokenize=False, **settings)


def _profiled(call: Callable[[], Any], times: int) -> dict[str, tuple[float, int]]:
    """Return microseconds and launches a call of every kernel, over ``times`` calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            call()
    times_us: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profiler.events() or ():
        if event.device_type is not None and event.device_type.name == "CUDA":
            times_us[event.name] += event.device_time
            launches[event.name] += 1
    return {name: (time_us / times, round(launches[name] / times)) for name, time_us in times_us.items()}


def _bytes(model: Any) -> int:
    packed = [vars(module)["slide"] for module in model.modules() if "slide" in vars(module)]  # they are no submodules
    return sum(tensor.nbytes for each in (model, *packed) for tensor in (*each.parameters(), *each.buffers()))
