"""Ask a vLLM engine from the process that it was started in, which sees every step of the engine.

The engine core runs in another process yet, as a server's does: what it answers, asyncio takes in here and hands to
each request's own task, as vLLM's HTTP front end does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from slidesparse_bench.serve.serve_load import Request, Served
from slidesparse_bench.serve.serve_measured import StepLog
from slidesparse_bench.serve.serve_options import ServeOptions, engine_settings


class Inside:
    """An engine of this process.

    Args:
        llm: vLLM's asynchronous engine, or SGLang's.
        steps: What it tells of its steps; None where it tells nothing.
    """

    def __init__(self, llm: Any, steps: StepLog | None) -> None:
        self.llm, self.steps = llm, steps

    @classmethod
    async def start(cls, options: ServeOptions) -> Inside:
        """Start an engine."""
        from vllm import AsyncLLMEngine
        from vllm.engine.arg_utils import AsyncEngineArgs

        steps = StepLog()
        settings: dict[str, Any] = {
            "disable_log_stats": True,  # but for our own
            "cudagraph_metrics": True,  # how many tokens a step has
        }
        arguments = AsyncEngineArgs(**engine_settings(options) | settings)
        return cls(AsyncLLMEngine.from_engine_args(arguments, stat_loggers=[lambda config, index: steps]), steps)

    async def answer(self, request: Request, name: str, arrival: float) -> Served:
        """Ask for one answer; ``arrival`` is on the clock of time.perf_counter, now or before."""
        times, tokens = [], 0
        async for part in self.llm.generate(_input(request.prompt), _sampling(request.output), name):
            times.append(time.perf_counter() - arrival)
            tokens += len(part.outputs[0].token_ids)
        return Served(tuple(times), tokens)

    async def close(self) -> None:
        """End the engine."""
        self.llm.shutdown()


def _input(prompt: Sequence[int]) -> Any:
    """A prompt as vLLM's server hands it on, once it is tokens."""
    from vllm.inputs import tokens_input

    return tokens_input(list(prompt))


def _sampling(tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
