"""Ask SGLang: its engine in process, or its server over HTTP with the client of its own benchmark."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path

from slidesparse_bench.serve.serve_http import MODEL, OverHttp, served
from slidesparse_bench.serve.serve_inside import Inside
from slidesparse_bench.serve.serve_load import Request, Served
from slidesparse_bench.serve.serve_options import ServeOptions, engine_settings

SWITCHES = ("disable_ignore_eos", "disable_stream", "return_logprob", "return_routed_experts")
NUMBERS = {"temperature": 0.0, "top_p": 1.0, "logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": None}
CLIENT = Namespace(**dict.fromkeys(SWITCHES, False), **NUMBERS)
"""What the client reads of its command line."""
NO_TEXT = "SGLang's client saw no text, by which it counts tokens"


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


class SGLangOverHttp(OverHttp):
    """A server and a client of it."""

    cli, path = ("-m", "sglang.launch_server"), "/generate"

    @classmethod
    async def start(cls, options: ServeOptions) -> OverHttp:
        """Start a server, whose model gets a tokenizer, and wait for it."""
        write_tokenizer(options.folder)
        return await super().start(options)

    async def answer(self, request: Request, name: str, arrival: float) -> Served:
        """Ask for one answer; ``arrival`` is on the clock of time.perf_counter, now or before."""
        from sglang.benchmark.serving import RequestFuncInput, async_request_sglang_generate, set_global_args

        set_global_args(CLIENT)
        prompt = list(request.prompt)  # token ids go through as they are
        asked = RequestFuncInput(prompt, self.url, len(prompt), request.output, MODEL, None, None, {"rid": name})
        output = await async_request_sglang_generate(asked)
        if output.success and not output.ttft:
            return Served((), 0, NO_TEXT)
        return served(output, output.output_len, arrival)


def write_tokenizer(folder: Path) -> None:
    """Give a checkpoint a tokenizer with a word for each token: SGLang's client counts a token when its text comes."""
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    model = {"type": "WordLevel", "vocab": {f"w{index}": index for index in range(size)}, "unk_token": "w0"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    words = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(parts | words), encoding="utf-8")
