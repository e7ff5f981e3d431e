"""An engine of vLLM on two GPUs with data parallelism, in a process of its own.

``vllm.LLM`` refuses data parallelism for models without experts; the engine behind ``vllm serve`` does not.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from vllm_driver import settings_of

from slidesparse_bench.engine.engine_process import ENVIRONMENT, EngineOptions, answer_calls


def serve_on_two(connection: Connection, options: EngineOptions) -> None:
    """Answer the other process's calls of :class:`DataParallel`."""
    os.environ.update(ENVIRONMENT)
    answer_calls(connection, lambda: DataParallel(options))


class DataParallel:
    """The engine: each of two GPUs has the whole model."""

    def __init__(self, options: EngineOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._asked = 0
        self._engine = self._loop.run_until_complete(self._start(options))

    async def _start(self, options: EngineOptions) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**{"data_parallel_size": 2} | settings_of(options)))

    def tokens(self, prompt: Sequence[int], count: int, gpu: int) -> list[int]:
        """Return the greedy continuation of a prompt by the engine on one of the GPUs."""
        return self._loop.run_until_complete(self._tokens(prompt, count, gpu))

    async def _tokens(self, prompt: Sequence[int], count: int, gpu: int) -> list[int]:
        from vllm import SamplingParams

        self._asked += 1
        greedy = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, detokenize=False)
        given = {"prompt_token_ids": list(prompt)}
        answer: list[int] = []
        async for output in self._engine.generate(given, greedy, str(self._asked), data_parallel_rank=gpu):
            answer = list(output.outputs[0].token_ids)
        return answer
