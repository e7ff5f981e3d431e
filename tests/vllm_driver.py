"""A process of the GPU tests that serves one model in vLLM, and what it can be asked."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from slidesparse_bench.engine.engine_process import ENVIRONMENT, EngineOptions, answer_calls
from slidesparse_bench.serve.serve_load import FIRST_TOKEN, VOCABULARY


def serve(connection: Connection, options: EngineOptions) -> None:
    """Answer the other process's calls of :class:`Driver`."""
    os.environ.update(ENVIRONMENT)
    if all(options.arguments.get(f"{kind}_parallel_size", 1) == 1 for kind in ("tensor", "pipeline")):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler must see the kernels
    if not options.plugin:
        os.environ["VLLM_PLUGINS"] = "none"
    answer_calls(connection, lambda: Driver(options))


def settings_of(options: EngineOptions) -> dict[str, Any]:
    """The arguments of vLLM with which an engine is started; those of the options count."""
    return {
        "model": str(options.folder),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "gpu_memory_utilization": options.share,
        "kv_cache_memory_bytes": 1_000_000_000,
        "additional_config": options.additional,
    } | options.arguments


class Driver:
    """The engine, in its own process, and the calls that it answers."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM

        self.llm = LLM(**{"disable_log_stats": True} | settings_of(options))

    def tokens(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return greedy continuations of some prompts."""
        return [list(output.outputs[0].token_ids) for output in self._generate(prompts, count)]

    def first_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> list[dict[int, float]]:
        """Return token -> logarithm of its probability, for the ``count`` likeliest first tokens of some prompts."""
        outputs = self._generate(prompts, 1, logprobs=count)
        return [{t: entry.logprob for t, entry in output.outputs[0].logprobs[0].items()} for output in outputs]

    def kernels(self, tokens: int) -> dict[str, int]:
        """Return name -> launches of every kernel in the prefill of a random prompt of so many tokens."""
        from torch.profiler import ProfilerActivity, profile

        prompt = random.Random(1).choices(range(FIRST_TOKEN, VOCABULARY), k=tokens)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._generate([prompt], 1)
        events = (event for event in profiler.events() or () if event.device_type is not None)
        return dict(Counter(event.name for event in events if event.device_type.name == "CUDA"))

    def _generate(self, prompts: Sequence[Sequence[int]], output: int, **settings: Any) -> list[Any]:
        from vllm import SamplingParams

        greedy = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0, detokenize=False, **settings)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answer: list[Any] = self.llm.generate(asked, greedy, use_tqdm=False)
        return answer


def serve_on_two(connection: Connection, options: EngineOptions) -> None:
    """Answer the other process's calls of :class:`DataParallel`."""
    os.environ.update(ENVIRONMENT)
    answer_calls(connection, lambda: DataParallel(options))


class DataParallel:
    """The engine on two GPUs, each of which has the whole model.

    ``vllm.LLM`` refuses data parallelism for models without experts; the engine behind ``vllm serve`` does not.
    """

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
