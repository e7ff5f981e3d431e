"""The test server of lm-eval's tests answers as vLLM's server does, from the same tokens and scores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from checkpoints import SIGNS, add_tokenizer
from scored_completions import TO_SCORE, TO_WRITE, answer, score, write

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

PROMPT = "two and two: "
SCORE = {"echo": True, "logprobs": 1, "max_tokens": 1}
WRITE = {"stop": ["o"], "max_tokens": 9}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    add_tokenizer(tmp_path)
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


def logits(ids: torch.Tensor) -> torch.Tensor:
    """Likes the sign three after the last one best, unless something better came before."""
    table = torch.randn(len(SIGNS) + 3, len(SIGNS) + 3, generator=torch.Generator().manual_seed(0))
    following = 4.0 * torch.nn.functional.one_hot((ids + 3) % len(table), len(table))
    return table[ids].cumsum(1) / 4 + following


@pytest.mark.parametrize("settings", [SCORE, WRITE, WRITE | {"stop": ["never"]}], ids=["score", "write", "to the end"])
def test_it_answers_as_vllms_server(tokenizer: Any, settings: dict[str, Any]) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    prompts = [tokenizer.encode(PROMPT), tokenizer.encode("abc")]
    asked = {"model": "tiny", "prompt": prompts, "seed": 1234, "temperature": 0, **settings}
    assert set(asked) == (TO_SCORE if "echo" in settings else TO_WRITE)
    request = CompletionRequest(**asked)
    assert not request.model_extra  # vLLM knows all that lm-eval asks for

    def engine(prompt: list[int]) -> Any:
        """What vLLM's engine hands to its server."""
        written = write(logits, tokenizer, prompt, asked)
        found = [row and {t: Logprob(v) for t, v in row.items()} for _, row in score(logits, prompt + written.tokens)]
        ended = {"finish_reason": written.finish_reason, "stop_reason": written.stop_reason}
        scores = found[len(prompt) :] if request.logprobs else None
        output = CompletionOutput(0, written.text, written.tokens, None, scores, **ended)
        of_prompt = found[: len(prompt)] if request.logprobs else None
        return RequestOutput("1", tokenizer.decode(prompt), prompt, of_prompt, [output], finished=True)

    server = object.__new__(OpenAIServingCompletion)
    for name in ("return_tokens_as_token_ids", "enable_prompt_tokens_details", "enable_per_request_metrics"):
        setattr(server, name, False)
    server.system_fingerprint = None
    said = server.request_output_to_completion_response(
        [engine(prompt) for prompt in prompts], request, "1", 0, "tiny", tokenizer, SimpleNamespace()
    )
    ours = answer(logits, tokenizer, asked)
    assert restricted(said.model_dump(), ours) == ours


def restricted(found: Any, like: Any) -> Any:
    """What another answer has too."""
    if isinstance(like, dict):
        return {key: restricted(found[key], value) for key, value in like.items()}
    if isinstance(like, list):
        assert len(found) == len(like)
        return [restricted(*pair) for pair in zip(found, like, strict=True)]
    return found


def test_what_it_writes_ends_where_it_should(tokenizer: Any) -> None:
    prompt = tokenizer.encode("abc")
    ends = {(one := write(logits, tokenizer, prompt, WRITE | {"stop": [stop]})).text: one for stop in ("o", "never")}
    assert {(one.finish_reason, one.stop_reason) for one in ends.values()} == {("stop", "o"), ("length", None)}
    shorter, longer = sorted(ends, key=len)
    assert longer.startswith(shorter + "o")
