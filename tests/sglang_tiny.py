"""Engines of SGLang that serve small models, each in a process of its own, and what they answered."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from vllm_tiny import LIKELIEST, TOKENS, Answers, Case, Served, checkpoint, prompts

from slidesparse.errors import UnsupportedError
from slidesparse.weights.pattern import Pattern
from slidesparse_bench.engine.engine_process import Engine, answer_calls
from slidesparse_bench.engine.vllm_checkpoint import model_config, write_checkpoint
from slidesparse_bench.serve.serve_options import ServeOptions, engine_settings

REAL = "Qwen2.5-7B"
"""Begins the name of a model of its shapes; a pattern follows."""

SHAPES = {"hidden_size": 3584, "intermediate_size": 1024, "num_attention_heads": 28, "num_key_value_heads": 4}
SHAPES |= {"head_dim": 128}
"""Of other models, as in Qwen2.5-7B but for the MLP: SGLang compiles kernels for each size when it first runs there."""

ARGUMENTS = dict.fromkeys(("context_length", "chunked_prefill_size", "max_prefill_tokens"), 1024) | {
    "max_running_requests": 8,
    "max_total_tokens": 20000,
    "mem_fraction_static": 0.9,
    "disable_cuda_graph": True,
}
DRAFT = "speculative_draft_model_path"


def make(folder: Path, case: Case) -> Path:
    """Return a case's checkpoint, made on the first call, and make its draft; not for two threads at a time."""
    if case.model.startswith(REAL):
        path = folder / case.model.replace(":", "of")
        if not path.exists():
            pattern = Pattern.parse(case.model.removeprefix(REAL).strip())
            write_checkpoint(path, model_config(REAL, 4), torch.int8, pattern, torch.device("cuda"))
        return path
    path, draft = named(folder, case, case.model), case.arguments.get(DRAFT)
    if draft is not None:
        named(folder, case, draft)
    return path


def named(folder: Path, case: Case, what: str) -> Path:
    """Return a checkpoint beside a case's, as ``vllm_tiny.checkpoint`` names them."""
    shapes = SHAPES | ({"intermediate_size": 1424} if case.family == "qwen2" else {})  # no multiple of 32
    return checkpoint(folder, case.family, case.dtype, what, **shapes)


def served(folder: Path, name: str, case: Case, options: dict[str, Any]) -> Served:
    """Serve a case; its checkpoint is there, its log goes beside it, and its steps are methods of :class:`Small`."""
    arguments = ARGUMENTS | case.arguments
    if DRAFT in arguments:
        arguments[DRAFT] = str(named(folder, case, arguments[DRAFT]))
    log, additional = folder / f"{name}.log", {"slidesparse": options} if case.sparse else {}
    more: dict[str, Any] = {"environment": {"XDG_CACHE_HOME": str(folder / "cache")}, "log": log, "server": "sglang"}
    engine = Engine(ServeOptions(make(folder, case), case.sparse, additional, arguments, **more), serve)
    answers: list[Any] = []
    try:
        engine.ready()
        answers += [engine.call(step) for step in case.steps]
        facts = engine.call("facts")
    except UnsupportedError as error:  # the test that asked for this case shows it
        return Served(answers, {}, f"{error}; {log.read_text(errors='replace')[-500:]}")
    finally:
        engine.stop()
    told = log.read_text(errors="replace")
    facts["sparse"] = set(re.findall(r"slidesparse: (\S+): sparse", told))
    facts["graphs"] = re.search("Capture .* (CUDA|cuda) graph end", told) is not None
    return Served(answers, facts | {"measured": "slidesparse: measured" in told})


def serve(connection: Connection, options: ServeOptions) -> None:
    """Answer the other process's calls of :class:`Small`."""
    assert options.log is not None
    os.environ.update(options.environment | {"HF_HUB_OFFLINE": "1"})
    os.environ["SGLANG_PLUGINS"] = "slidesparse" if options.plugin else "none"
    with options.log.open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    made: list[Small] = []
    try:
        answer_calls(connection, lambda: made.append(Small(options)) or made[0])
    finally:
        for small in made:
            small.engine.shutdown()


class Small:
    """An engine, and what is asked of it."""

    def __init__(self, options: ServeOptions) -> None:
        import sglang

        self.folder = options.folder
        self.engine = sglang.Engine(**engine_settings(options), skip_tokenizer_init=True, log_level="info")
        self.told = dict.fromkeys(("cached_tokens", "spec_verify_ct", "spec_num_correct_drafts"), 0)

    def ask(self) -> Answers:
        """Each prompt alone: then nothing depends on how requests happen to share a batch."""
        tokens, likeliest = self.tokens(), []
        for prompt in prompts():
            (first,) = self._generate([prompt], 1, return_logprob=True, top_logprobs_num=LIKELIEST)
            likeliest.append({token: value for value, token, _ in first["meta_info"]["output_top_logprobs"][0]})
        return Answers(tokens, likeliest)

    def tokens(self) -> list[list[int]]:
        return [answer["output_ids"] for prompt in prompts() for answer in self._generate([prompt], TOKENS)]

    def together(self) -> list[list[int]]:
        return [answer["output_ids"] for answer in self._generate(prompts(), TOKENS)]

    def reload(self) -> tuple[bool, str]:
        """Load its own weights again; returns whether that was done, and what the engine said."""
        done, said, *_ = self.engine.update_weights_from_disk(str(self.folder))
        return done, said

    def facts(self) -> dict[str, Any]:
        """What shows that the engine did what it was asked to do."""
        (state, *_) = self.engine.get_server_info()["internal_states"]
        return self.told | {"weights_gb": state["memory_usage"]["weight"], "chunk": state["chunked_prefill_size"]}

    def _generate(self, given: Sequence[Sequence[int]], tokens: int, **more: Any) -> list[dict[str, Any]]:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = self.engine.generate(input_ids=[list(one) for one in given], sampling_params=sampling, **more)
        for name in self.told:
            self.told[name] += sum(answer["meta_info"].get(name, 0) for answer in answers)
        return list(answers)
