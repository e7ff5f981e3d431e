"""How an engine that serves is started."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slidesparse_bench.engine.engine_process import EngineOptions
from slidesparse_bench.serve.serve_load import LONGEST
from slidesparse_bench.served_records import SGLANG, VLLM

BATCHED_TOKENS = 16384
"""The largest batch."""

SEQUENCES = 256
"""Requests that run at a time; more wait."""

SHARE = 0.9
"""Of the GPU's memory, as vLLM takes it."""


@dataclass(frozen=True)
class ServeOptions(EngineOptions):
    """One engine that serves.

    Attributes:
        gpus: UUIDs of those that it runs on.
        log: Where the engine's output goes.
        server: ``vllm`` or ``sglang``.
        environment: More variables of the engine's environment.
    """

    gpus: tuple[str, ...] = ()
    log: Path | None = None
    server: str = VLLM
    environment: dict[str, str] = field(default_factory=dict)


def engine_settings(options: ServeOptions) -> dict[str, Any]:
    """Arguments of the engine, by the names of vLLM's ``EngineArgs`` or SGLang's ``ServerArgs``.

    Memory, chunks of prompts and CUDA graphs are SGLang's own choice. Its other way to sample needs a compiler.
    """
    if options.server == SGLANG:
        settings: dict[str, Any] = {"model_path": str(options.folder), "context_length": LONGEST}
        settings |= {"max_running_requests": SEQUENCES, "disable_radix_cache": True, "random_seed": 0}
        settings |= {"sampling_backend": "pytorch", "grammar_backend": "none"}
        own = {"json_model_override_args": json.dumps(options.additional)} if options.additional else {}
        return settings | own | options.arguments
    settings = {
        "model": str(options.folder),
        "skip_tokenizer_init": True,  # random weights have none
        "max_model_len": LONGEST,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "max_num_seqs": SEQUENCES,
        "gpu_memory_utilization": options.share,
        "enable_prefix_caching": False,  # random prompts repeat nothing
        "additional_config": options.additional,
    }
    return settings | options.arguments
