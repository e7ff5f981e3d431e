"""Ask an engine of SGLang from the process that it was started in."""

from __future__ import annotations

import time

from slidesparse_bench.serve.serve_inside import Inside
from slidesparse_bench.serve.serve_load import Request, Served
from slidesparse_bench.serve.serve_options import ServeOptions, engine_settings


class SGLangInside(Inside):
    """An engine of this process, which tells nobody of its steps; SGLang ends this process when its scheduler fails."""

    @classmethod
    async def start(cls, options: ServeOptions) -> SGLangInside:
        """Start an engine."""
        import sglang

        return cls(sglang.Engine(**engine_settings(options), skip_tokenizer_init=True, log_level="info"), None)

    async def answer(self, request: Request, name: str, arrival: float) -> Served:
        """Ask for one answer; ``arrival`` is on the clock of time.perf_counter, now or before."""
        times, tokens = [], 0
        sampling = {"temperature": 0.0, "max_new_tokens": request.output, "ignore_eos": True}
        asked = {"input_ids": list(request.prompt), "sampling_params": sampling, "rid": name, "stream": True}
        async for part in await self.llm.async_generate(**asked):
            times.append(time.perf_counter() - arrival)
            tokens = part["meta_info"]["completion_tokens"]
        return Served(tuple(times), tokens)
