"""Completions with the log-probabilities of their tokens, as vLLM's server gives them to lm-eval, of any model at hand.

``tests/integrations/test_vllm_completions.py`` holds these answers against those that vLLM's own code makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import torch

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Tokens [1, n] -> logits [1, n, vocabulary]."""

Score = tuple[int, dict[int, float] | None]
"""A token, and the log-probabilities of itself and of the likeliest; None for a first one, which follows nothing."""

ASKED = {"model", "prompt", "seed", "temperature", "max_tokens"}
TO_SCORE, TO_WRITE = ASKED | {"echo", "logprobs"}, ASKED | {"stop"}
"""What lm-eval sends to have a prompt scored, and to have it continued."""


@dataclass(frozen=True)
class Written:
    """What a model wrote after a prompt, and why it stopped."""

    tokens: list[int]
    text: str
    finish_reason: str
    stop_reason: str | None = None


def answer(logits: Logits, tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What a server says to a request with a batch of prompts, which are tokens."""
    written = [write(logits, tokenizer, prompt, asked) for prompt in asked["prompt"]]
    choices = [choice(logits, tokenizer, asked, index, one) for index, one in enumerate(written)]
    read, wrote = (sum(map(len, lists)) for lists in (asked["prompt"], [one.tokens for one in written]))
    usage = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
    return {"object": "text_completion", "model": asked["model"], "choices": choices, "usage": usage}


def write(logits: Logits, tokenizer: Any, prompt: list[int], asked: dict[str, Any]) -> Written:
    """Continue a prompt by the likeliest tokens; what is written ends before the end token or a stop string."""
    tokens: list[int] = []
    while len(tokens) < asked["max_tokens"]:
        tokens.append(int(logits(torch.tensor([[*prompt, *tokens]]))[0, -1].argmax()))
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if tokens[-1] == tokenizer.eos_token_id:
            return Written(tokens, text, "stop")
        if found := [stop for stop in asked.get("stop") or [] if stop in text]:
            return Written(tokens, text[: text.index(found[0])], "stop", found[0])
    return Written(tokens, text, "length")


def choice(logits: Logits, tokenizer: Any, asked: dict[str, Any], index: int, written: Written) -> dict[str, Any]:
    """One answer: with ``echo`` the prompt and what follows, with ``logprobs`` the scores of both."""
    prompt = asked["prompt"][index]
    echo = asked.get("echo", False)
    scores = None
    if asked.get("logprobs") is not None:
        found = score(logits, [*prompt, *written.tokens])
        scores = tell(tokenizer, found if echo else found[len(prompt) :])
    text = tokenizer.decode(prompt, skip_special_tokens=True) + written.text if echo else written.text
    ended = {"finish_reason": written.finish_reason, "stop_reason": written.stop_reason}
    return {"index": index, "text": text, "logprobs": scores, **ended}


def score(logits: Logits, tokens: Sequence[int]) -> list[Score]:
    """The scores of all tokens."""
    rows = logits(torch.tensor([tokens]))[0].float().log_softmax(-1)
    found: list[Score] = [(tokens[0], None)]
    for token, row in zip(tokens[1:], rows, strict=False):
        found.append((token, {token: float(row[token]), int(row.argmax()): float(row.max())}))
    return found


def tell(tokenizer: Any, scores: list[Score]) -> dict[str, Any]:
    """Scores in the form of the protocol."""
    words = [tokenizer.decode([token]) for token, _ in scores]
    best = [row and {tokenizer.decode([token]): value for token, value in row.items()} for _, row in scores]
    offsets = [sum(map(len, words[:i])) for i in range(len(words))]
    own = [row and row[token] for token, row in scores]
    return {"text_offset": offsets, "token_logprobs": own, "tokens": words, "top_logprobs": best}


@contextmanager
def server(logits: Logits, tokenizer: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve completions; gives the address, and the requests that have come."""
    requests: list[dict[str, Any]] = []
    one_at_a_time = Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, form: str, *values: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_error(404)  # as vLLM without --enable-tokenizer-info-endpoint

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_at_a_time, torch.no_grad():
                requests.append(asked)
                body = json.dumps(answer(logits, tokenizer, asked)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # lm-eval connects for all of its requests at once

    with Server(("127.0.0.1", 0), Handler) as served:
        Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}/v1/completions", requests
        served.shutdown()
