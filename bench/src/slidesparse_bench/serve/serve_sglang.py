"""Ask SGLang: its engine in process, or its server over HTTP with the client of its own benchmark."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from slidesparse.integrations import NAME
from slidesparse_bench.engine.vllm_engine import BATCHED_TOKENS
from slidesparse_bench.serve.serve_http import MODEL, OverHttp, raise_file_limit, served
from slidesparse_bench.serve.serve_load import LONGEST, Request, Served
from slidesparse_bench.serve.serve_options import SEQUENCES, ServeOptions, written
from slidesparse_bench.serve.serve_server import HOST

CLIENT = Namespace(
    temperature=0.0,
    top_p=1.0,
    disable_ignore_eos=False,
    disable_stream=False,
    return_logprob=False,
    return_routed_experts=False,
    logprob_start_len=-1,
    top_logprobs_num=0,
    token_ids_logprob=None,
    header=None,
)
"""What the client reads of its command line."""

NO_TEXT = "SGLang's client saw no text, by which it counts tokens"


def engine_settings(options: ServeOptions) -> dict[str, Any]:
    """Arguments of the engine, by the names of SGLang's ``ServerArgs``; memory and CUDA graphs are its own choice."""
    settings: dict[str, Any] = {
        "model_path": str(options.folder),
        "context_length": LONGEST,
        "chunked_prefill_size": BATCHED_TOKENS,
        "max_prefill_tokens": BATCHED_TOKENS,
        "max_running_requests": SEQUENCES,
        "disable_radix_cache": True,  # random prompts repeat nothing
        "sampling_backend": "pytorch",  # the other needs a compiler at run time
        "grammar_backend": "none",
        "random_seed": 0,
    }
    if options.additional:
        settings["json_model_override_args"] = json.dumps({NAME: options.additional[NAME]})
    return settings | options.arguments


def server_arguments(options: ServeOptions, host: str, port: int, name: str) -> list[str]:
    """The same settings as a user writes them.

    >>> server_arguments(ServeOptions(Path("m"), False), "127.0.0.1", 8000, "m")[6:10]
    ['--model-path', 'm', '--context-length', '8256']
    """
    given = ["--host", host, "--port", str(port), "--served-model-name", name]
    return given + written(engine_settings(options))


class SGLangInside:
    """An engine of this process, whose scheduler runs in another."""

    steps = None  # it tells nobody of them

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @classmethod
    async def start(cls, options: ServeOptions) -> SGLangInside:
        """Start an engine."""
        import sglang

        return cls(sglang.Engine(**engine_settings(options), skip_tokenizer_init=True, log_level="info"))

    async def answer(self, request: Request, name: str, arrival: float) -> Served:
        """Ask for one answer; ``arrival`` is on the clock of time.perf_counter, now or before."""
        times, tokens = [], 0
        sampling = {"temperature": 0.0, "max_new_tokens": request.output, "ignore_eos": True}
        asked = {"input_ids": list(request.prompt), "sampling_params": sampling, "rid": name, "stream": True}
        async for part in await self.engine.async_generate(**asked):
            times.append(time.perf_counter() - arrival)
            tokens = part["meta_info"]["completion_tokens"]
        return Served(tuple(times), tokens)

    def require_alive(self) -> None:
        """Do nothing: SGLang ends this process with a scheduler that failed."""

    def engine_process(self) -> tuple[int, bool]:
        """The process that started the scheduler, this one, which is no part of it."""
        return os.getpid(), False

    async def close(self) -> None:
        """End the engine."""
        self.engine.shutdown()


class SGLangOverHttp(OverHttp):
    """A server and a client of it."""

    PATH = "/generate"

    @staticmethod
    def command(options: ServeOptions, port: int) -> list[str]:
        """What follows Python on the command line of a server, which gets a tokenizer: see :func:`write_tokenizer`."""
        write_tokenizer(options.folder)
        # Its own first request is a sentence, in which this tokenizer finds no word.
        return ["-m", "sglang.launch_server", *server_arguments(options, HOST, port, MODEL), "--skip-server-warmup"]

    @staticmethod
    def open_session() -> Any:
        """None: its client opens a session for each request."""
        from sglang.benchmark.serving import set_global_args

        raise_file_limit()
        set_global_args(CLIENT)

    async def answer(self, request: Request, name: str, arrival: float) -> Served:
        """Ask for one answer; ``arrival`` is on the clock of time.perf_counter, now or before."""
        from sglang.benchmark.serving import RequestFuncInput, async_request_sglang_generate

        asked = RequestFuncInput(
            prompt=list(request.prompt),  # type: ignore[arg-type] # token ids go through as they are
            api_url=self.url,
            prompt_len=len(request.prompt),
            output_len=request.output,
            model=MODEL,
            lora_name=None,
            image_data=None,
            extra_request_body={"rid": name},
        )
        output = await async_request_sglang_generate(asked)
        if output.success and not output.ttft:
            return Served((), 0, NO_TEXT)
        return served(output, output.output_len, arrival)


def write_tokenizer(folder: Path) -> None:
    """Give a checkpoint of random weights a tokenizer with a word for each token, unless it has one.

    SGLang's client counts a token when its text comes, so the server must have text to send.
    """
    if (folder / "tokenizer.json").exists():
        return
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    model = {"type": "WordLevel", "vocab": {f"w{index}": index for index in range(size)}, "unk_token": "w0"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    words = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(parts | words), encoding="utf-8")
