"""What is judged: a model in this process, or one behind a server's completions API. Both answer the same prompts."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
import torch.nn.functional as F

LOOK_EVERY = 16
"""Tokens between two looks at which answers have ended."""

LOGITS_AT_ONCE = 2**29
"""Float32 logits at a time when text is scored, 2 GB."""


class Model(Protocol):
    """A model that goes on from prompts and scores text."""

    def answers(self, prompts: Sequence[str], tokens: int, stop: str, samples: int, heat: float) -> list[list[str]]:
        """Return for each prompt its greedy answer, then ``samples`` at temperature ``heat``, each cut at ``stop``."""

    def losses(self, windows: torch.Tensor) -> list[float]:
        """Return the mean loss of each window in nats a token."""


class Local:
    """A transformers model in this process.

    Args:
        model: On its device, in eval mode.
        tokenizer: Its tokenizer.
        rows: Answers that are written at a time; memory grows with them.
    """

    def __init__(self, model: Any, tokenizer: Any, rows: int = 2048) -> None:
        self.model, self.tokenizer, self.rows = model, tokenizer, rows
        self.device = next(model.parameters()).device
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.ends = torch.tensor(sorted({tokenizer.eos_token_id, *ends} - {None}), device=self.device)
        self.generator = torch.Generator(self.device)

    @torch.inference_mode()
    def answers(self, prompts: Sequence[str], tokens: int, stop: str, samples: int, heat: float) -> list[list[str]]:
        self.generator.manual_seed(0)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        at_once = max(self.rows // (1 + samples), 1)
        found: list[list[str]] = [[] for _ in prompts]
        for start in range(0, len(order), at_once):
            some = order[start : start + at_once]
            texts = self._write([prompts[i] for i in some], tokens, stop, samples, heat)
            for place, i in enumerate(some):
                found[i] = texts[place * (1 + samples) : (place + 1) * (1 + samples)]
        return found

    def _write(self, prompts: list[str], tokens: int, stop: str, samples: int, heat: float) -> list[str]:
        """Write all answers to some prompts together; those that have ended leave the batch."""
        ids = [self.tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
        longest = max(map(len, ids))
        padded = torch.tensor([[0] * (longest - len(one)) + one for one in ids], device=self.device)
        lengths = torch.tensor([[len(one)] for one in ids], device=self.device)
        mask = (torch.arange(longest, device=self.device) >= longest - lengths).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = self.model(padded, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        cache, each = out.past_key_values, 1 + samples
        if each > 1:
            cache.batch_repeat_interleave(each)
        logits = out.logits[:, -1].repeat_interleave(each, 0)
        mask, place = mask.repeat_interleave(each, 0), lengths.repeat_interleave(each, 0)
        greedy = torch.arange(len(logits), device=self.device) % each == 0
        rows = torch.arange(len(logits), device=self.device)
        written = torch.full((len(logits), tokens), int(self.ends[0]), device=self.device)
        for step in range(tokens):
            chosen = self._choose(logits, greedy, heat)
            written[rows, step] = chosen
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                going = self._going(written[rows, : step + 1], stop)
                if not len(going):
                    break
                if len(going) < len(rows):
                    cache.batch_select_indices(going)
                    rows, greedy, chosen, mask, place = (x[going] for x in (rows, greedy, chosen, mask, place))
            out = self.model(
                chosen[:, None], attention_mask=mask, position_ids=place, past_key_values=cache, use_cache=True
            )
            logits, place = out.logits[:, -1], place + 1
        return [self._text(one).split(stop)[0] for one in written.tolist()]

    def _choose(self, logits: torch.Tensor, greedy: torch.Tensor, heat: float) -> torch.Tensor:
        """Return the next token of each row: the likeliest, or one drawn by the Gumbel trick."""
        wide = logits.float()
        if bool(greedy.all()):
            return wide.argmax(1)
        noise = torch.empty_like(wide).exponential_(generator=self.generator).log_().neg_()
        return torch.where(greedy[:, None], wide, wide / heat + noise).argmax(1)

    def _going(self, written: torch.Tensor, stop: str) -> torch.Tensor:
        """Return the rows that have not ended. Only their last tokens can hold a new end."""
        tail = written[:, -2 * LOOK_EVERY :]
        ended = torch.isin(tail, self.ends).any(1).tolist()
        texts = self.tokenizer.batch_decode(tail)
        going = [row for row, text in enumerate(texts) if not ended[row] and stop not in text]
        return torch.tensor(going, device=self.device, dtype=torch.long)

    def _text(self, ids: list[int]) -> str:
        ends = set(self.ends.tolist())
        last = next((at for at, token in enumerate(ids) if token in ends), len(ids))
        return self.tokenizer.decode(ids[:last], skip_special_tokens=True)

    @torch.inference_mode()
    def losses(self, windows: torch.Tensor) -> list[float]:
        return [
            float(row.mean(dtype=torch.float64))
            for ids, logits in self._logits(windows)
            for row in F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        ]

    @torch.inference_mode()
    def divergences(self, dense: Local, windows: torch.Tensor) -> list[float]:
        """Return the mean of ``KL(dense || this)`` of each window, in nats a token."""
        found = []
        for (_, own), (_, wanted) in zip(self._logits(windows), dense._logits(windows), strict=True):
            own, wanted = F.log_softmax(own, -1), F.log_softmax(wanted, -1)
            rows = F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)
            found += rows.double().mean(1).tolist()
        return found

    def _logits(self, windows: torch.Tensor) -> Any:
        """Yield some windows and their float32 logits but the last, as many as fit."""
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        at_once = max(LOGITS_AT_ONCE // (windows.shape[1] * vocabulary), 1)
        for some in windows.split(at_once):
            ids = some.to(self.device)
            yield ids, self.model(ids, use_cache=False).logits[:, :-1].float()


class Served:
    """A model behind an OpenAI-compatible server, such as ``vllm serve``.

    Args:
        url: Up to and with ``/v1``.
        tokenizer: That of the checkpoint which is served; prompts are sent as token numbers.
        workers: Requests at a time.
    """

    def __init__(self, url: str, tokenizer: Any, workers: int = 256) -> None:
        self.url, self.tokenizer, self.workers = url.rstrip("/"), tokenizer, workers
        with urllib.request.urlopen(f"{self.url}/models", timeout=60) as answer:
            self.name = json.load(answer)["data"][0]["id"]

    def answers(self, prompts: Sequence[str], tokens: int, stop: str, samples: int, heat: float) -> list[list[str]]:
        def ask(job: tuple[list[int], int]) -> str:
            ids, number = job
            asked = {"prompt": ids, "max_tokens": tokens, "stop": [stop], "seed": number}
            return self._ask(asked | {"temperature": heat if number else 0.0})["text"]

        ids = [self.tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
        texts = self._all(ask, [(one, number) for one in ids for number in range(1 + samples)])
        return [texts[at : at + 1 + samples] for at in range(0, len(texts), 1 + samples)]

    def losses(self, windows: torch.Tensor) -> list[float]:
        def score(ids: list[int]) -> float:
            answer = self._ask({"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0})
            known = zip(answer["prompt_logprobs"][1:], ids[1:], strict=True)
            return -math.fsum(one[str(token)]["logprob"] for one, token in known) / (len(ids) - 1)

        return self._all(score, windows.tolist())

    def _all(self, ask: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(ask, jobs))

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        # Without these a server takes those of the model's generation_config.json.
        plain = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
        data = json.dumps({"model": self.name, **plain, **body}).encode()
        request = urllib.request.Request(f"{self.url}/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["choices"][0]
