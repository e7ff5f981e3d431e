"""How an engine that serves is started, whichever way it is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slidesparse_bench.engine.vllm_engine import BATCHED_TOKENS, EngineOptions
from slidesparse_bench.serve.serve_load import LONGEST
from slidesparse_bench.served_records import VLLM

SEQUENCES = 256
"""Requests that run at a time; more wait."""

SHARE = 0.9
"""Of the GPU's memory, as vLLM takes it."""

TIMELINE_DELAY = 60
"""Engine steps of the mixed load before its timeline begins: those at its start take whole batches of prompts."""


@dataclass(frozen=True)
class ServeOptions(EngineOptions):
    """One engine that serves.

    Attributes:
        gpus: UUIDs of those that it runs on.
        timeline: Where it writes profiles; None: it makes none.
        timeline_steps: How many steps of a profile.
        http: Ask a server of its own over HTTP.
        log: Where the engine's output goes: that server's, which always has one, or in process its own.
        server: ``vllm`` or ``sglang``.
        environment: More variables of the engine's environment.
    """

    gpus: tuple[str, ...] = ()
    timeline: Path | None = None
    timeline_steps: int = 0
    http: bool = False
    log: Path | None = None
    server: str = VLLM
    environment: dict[str, str] = field(default_factory=dict)


def engine_settings(options: ServeOptions) -> dict[str, Any]:
    """Arguments of the engine, by the names of vLLM's ``EngineArgs``."""
    settings: dict[str, Any] = {
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


def server_arguments(options: ServeOptions, host: str, port: int, name: str) -> list[str]:
    """The same settings as a user writes them after ``vllm serve``, with a name for the model.

    >>> server_arguments(ServeOptions(Path("m"), False, share=0.9), "127.0.0.1", 8000, "m")[:6]
    ['m', '--host', '127.0.0.1', '--port', '8000', '--served-model-name']
    """
    settings = engine_settings(options)
    given = [settings.pop("model"), "--host", host, "--port", str(port), "--served-model-name", name]
    return given + written(settings)


def written(settings: Mapping[str, Any]) -> list[str]:
    """Settings as options of a command line."""
    options: list[str] = []
    for setting, value in settings.items():
        option = setting.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, dict):
            options += [f"--{option}", json.dumps(value)] if value else []
        else:
            options += [f"--{option}", str(value)]
    return options
