"""Comparison of a compressed model with its dense one on the answers of chats, and its table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.progress import progress_bar
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.errors import InputError
from slidesparse.gemm.select import Choice
from slidesparse.gemm.speed import DENSE_FORM
from slidesparse.layer.linear import SlideLinear
from slidesparse.models.perplexity import logits_of
from slidesparse.offline.calibrate.calibration import ids_of, load_tokenizer, tokens_before, tokens_of
from slidesparse.offline.calibrate.chats import Chat, templated
from slidesparse.offline.evaluate import load_any
from slidesparse.recovery.loss import differences

FIRST = 16
"""Tokens of an answer that have to agree: longer ones hardly ever do, since one other token makes another answer."""

TOKENS = (16, 64, 256, 4096)
"""Numbers of tokens of which speeds are shown."""

LEAST = 4  # chats that are judged whatever the time


@dataclass(frozen=True)
class Figure:
    """A row of the table: a figure of both models, with the standard error of the compressed one's."""

    name: str
    dense: float | None
    compressed: float
    error: float | None = None

    def cells(self) -> tuple[str, str, str]:
        """Return the row as text, with two digits of the error."""
        digits = max(0, 1 - math.floor(math.log10(self.error))) if self.error else 2 if self.compressed < 100 else 0
        dense, error = (None if one is None else f"{one:.{digits}f}" for one in (self.dense, self.error))
        return self.name, dense or "-", f"{self.compressed:.{digits}f}{f' ± {error}' if error else ''}"


@torch.no_grad()
def judge(
    dense: Path, compressed: Path, chats: Sequence[Chat], device: torch.device, longest: int, seconds: float
) -> tuple[str, list[Figure]]:
    """Compare two checkpoints on the answers of chats, cut to ``longest`` tokens, as many as ``seconds`` suffice for.

    Errors are those of means over answers, since the tokens of one vary together.

    Returns:
        What was judged in words, and the figures.

    Raises:
        InputError: No chat has an answer within ``longest`` tokens, or a model predicts NaN.
    """
    tokenizer = load_tokenizer(dense)
    cut = [one for one in (_cut(chat, tokenizer, longest) for chat in chats) if one is not None]
    if not cut:
        raise InputError("chats to judge on", got="no answers", needed=f"answers within {longest} tokens")
    loaded = [load_any(Checkpoint(path), device) for path in (compressed, dense)]
    models = [*map(logits_of, loaded)]
    sums: list[torch.Tensor] = []
    with progress_bar("judge", len(cut), unit="chats") as advance:
        begun = time.monotonic()
        while len(sums) < min(len(cut), LEAST) or (len(sums) < len(cut) and time.monotonic() - begun < seconds):
            ids, start = cut[len(sums)]
            ours, theirs = (model(ids.to(device)[None])[0, start - 1 : -1].float() for model in models)
            of_tokens = torch.stack([one.double().cpu() for one in differences(ours, theirs, ids[start:].to(device))])
            sums.append(torch.tensor([1.0, of_tokens[3, :FIRST].all(), of_tokens.shape[1], *of_tokens.sum(1)]))
            advance(1)
    ones, agree, count, kl, loss, dense_loss, same = torch.stack(sums).double().T
    if not bool((kl + loss + dense_loss).isfinite().all()):
        raise InputError(f"{compressed} or {dense} predicts NaN or Inf", remedy="see slidesparse inspect")
    rise, error = _mean(loss - dense_loss, count)
    perplexities = (math.exp(_mean(one, count)[0]) for one in (dense_loss, loss))
    return f"{len(sums)} answers of {int(count.sum())} tokens", [
        Figure("perplexity", *perplexities),
        Figure("rise of perplexity, %", None, 100 * math.expm1(rise), 100 * math.exp(rise) * error),
        Figure("KL from the dense model, nats a token", None, *_mean(kl, count)),
        Figure("same next token as the dense model, %", None, *_mean(100 * same, count)),
        Figure(f"answers with the same first {FIRST} tokens, %", None, *_mean(100 * agree, ones)),
        *speeds([one.choice for one in loaded[0].modules() if isinstance(one, SlideLinear)]),
    ]


def speeds(choices: Sequence[Choice]) -> list[Figure]:
    """Return the speed of layers over dense ones, all together, by the times that loading took on a GPU."""
    times = [(one, one.measured) for one in choices if one.measured is not None]
    figures = []
    for m in TOKENS:
        pairs = [(layer.at(DENSE_FORM, m), layer.at(one.at(m), m)) for one, layer in times if m in layer.tokens]
        if pairs and all(map(all, pairs)):
            dense, ours = (sum(us or 0 for us in side) for side in zip(*pairs, strict=True))
            figures.append(Figure(f"speed of the linears here, {m} tokens", 1.0, dense / ours))
    return figures


def _cut(chat: Chat, tokenizer: Any, longest: int) -> tuple[torch.Tensor, int] | None:
    """Return the tokens of a chat, int64 [n], and the number before its answer; None if there is no room for one."""
    asked = templated([Chat(chat[:-1], chat.tools)], tokenizer, to_answer=True)
    prompt, ids = torch.tensor(ids_of(tokenizer, asked, add_special_tokens=False)[0]), tokens_of([chat], tokenizer)
    common = min(len(prompt), len(ids))
    start, before = int((prompt[:common] == ids[:common]).cumprod(0).sum()), tokens_before(tokenizer)
    if not torch.equal(ids[: len(before)], before):
        ids, start = torch.cat([before, ids]), start + len(before)
    return (ids[:longest], start) if 0 < start < min(len(ids), longest) else None


def _mean(sums: torch.Tensor, counts: torch.Tensor) -> tuple[float, float]:
    """Return the mean a token of sums of answers, float64 [answers], and its standard error, that of a ratio."""
    mean = sums.sum() / counts.sum()
    spread = (sums - mean * counts).square().sum() * len(sums) / max(len(sums) - 1, 1)
    return float(mean), float(spread.sqrt() / counts.sum())
