"""What a writer of chats asks of vLLM, against vLLM's own classes without its engine."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slidesparse.recovery.writers import SAMPLING, VllmWriter

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


def test_vllm_has_what_a_writer_asks_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    asked: list[Any] = []

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        assert named.keys() <= {one.name for one in fields(EngineArgs)}
        starts.bind(self, *arguments, **named)

    def generate(self: Any, *arguments: Any, **named: Any) -> list[Any]:
        asked.append(runs.bind(self, *arguments, **named).arguments)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1, 2))])] * 2

    starts, runs = inspect.signature(vllm.LLM.__init__), inspect.signature(vllm.LLM.generate)
    monkeypatch.setattr(vllm.LLM, "__init__", begin)
    monkeypatch.setattr(vllm.LLM, "generate", generate)
    writer = VllmWriter(Path("model"), 12, "cuda", [9])
    assert writer.answer([[1, 2], [3]], max_tokens=4, seed=7) == [[1, 2], [1, 2]]
    assert asked[0]["prompts"] == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    for drawn, seed in zip(asked[0]["sampling_params"], (7, 8), strict=True):
        assert (drawn.seed, drawn.max_tokens, drawn.temperature) == (seed, 4, SAMPLING["temperature"])
        assert drawn.stop_token_ids == [9]
