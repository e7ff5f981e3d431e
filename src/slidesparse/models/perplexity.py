"""Perplexity of a causal language model on a text, by the standard definition with a strided window.

``exp(- 1/n sum_i log p(x_i | context of x_i))`` over all tokens but the first. A model reads text windows of ``window``
tokens; they start ``stride`` tokens apart, and each scores only the tokens that no earlier one scored. So every token
is scored once, and every one after the first window sees at least ``window - stride`` tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from slidesparse.errors import InputError

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Token numbers int64 [batch, length] -> logits [batch, length, vocabulary]."""

CHUNK = 1 << 25
"""Logits in float32 at a time, 128 MiB: a whole text window has a gigabyte with a vocabulary of 150 thousand."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a model on a text.

    Attributes:
        nats: Sum of the negative log-likelihoods.
        tokens: Tokens scored, all but the first.
        n_bytes: Length of the text in UTF-8, or 0 when it is not known.
        window: Tokens read at a time.
        stride: Tokens between the starts of windows.
    """

    nats: float
    tokens: int
    n_bytes: int
    window: int
    stride: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which do not depend on the tokenizer; None without the length of the text."""
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else None


class Window(NamedTuple):
    """A window of text: tokens ``start`` to ``end``, of which the last ``scored`` count."""

    start: int
    end: int
    scored: int


def windows(tokens: int, window: int, stride: int, done: int = 1) -> Iterator[Window]:
    """Yield the windows that cover a text after its first ``done`` tokens: by default the first has no context.

    >>> [(w.start, w.end, w.scored) for w in windows(10, 4, 3)]
    [(0, 4, 3), (3, 7, 3), (6, 10, 3)]
    """
    start = 0
    while done < tokens:
        end = min(start + window, tokens)
        yield Window(start, end, end - done)
        start, done = start + stride, end


def check_windows(window: int | None, stride: int | None) -> None:
    """Raise an InputError for windows of less than two tokens, or strides that skip tokens; None: not known yet."""
    if window is not None and window < 2:
        raise InputError("tokens of a window (--window)", got=window, needed="2 or more")
    if stride is not None and (stride < 1 or (window is not None and stride >= window)):
        needed = "1 or more" if window is None else f"1 to {window - 1}"
        raise InputError("stride of the windows (--stride)", got=stride, needed=f"{needed}, less than the window")


@torch.no_grad()
def measure_perplexity(
    logits: Logits,
    tokens: torch.Tensor,
    window: int,
    stride: int,
    *,
    n_bytes: int = 0,
    batch: int = 1,
    advance: Callable[[int], None] = lambda _: None,
    before: torch.Tensor | None = None,
) -> Perplexity:
    """Score a text.

    Args:
        logits: The model.
        tokens: int64 [n], n >= 2, on the model's device.
        window: Tokens that the model reads at a time, at least 2.
        stride: From 1 to ``window - 1``; smaller is slower and gives every token more context.
        n_bytes: Length of the text, for bits per byte.
        batch: Windows at a time.
        advance: Called with the number of tokens that were scored.
        before: Tokens put before each window, such as BOS: int64 [k], k < window. They are not scored, and the text's
            first token then is.

    Raises:
        InputError: The sizes do not fit, or the model answers with NaN.
    """
    if len(tokens) < 2:
        raise InputError("the text is too short to score", got=f"{len(tokens)} tokens", needed="2 or more")
    check_windows(window, stride)
    if batch < 1:
        raise InputError("windows at a time", got=batch, needed="1 or more")
    nats, scored = 0.0, 0
    before = tokens[:0] if before is None else before
    if not len(before) < window or (len(before) and stride > window - len(before)):
        raise InputError(
            "tokens of a window (--window)", got=window, needed=f"more than {len(before)}, with which each begins"
        )
    cover = list(windows(len(tokens), window - len(before), stride, 0 if len(before) else 1))
    for readings in _batches(cover, batch):
        ids = torch.stack([torch.cat([before, tokens[w.start : w.end]]) for w in readings])
        losses = map(_token_losses, logits(ids)[:, :-1], ids[:, 1:])
        total = sum(float(row[-w.scored :].sum(dtype=torch.float64)) for row, w in zip(losses, readings, strict=True))
        if not math.isfinite(total):
            raise InputError(
                f"the model answers with NaN or Inf at tokens {readings[0].start} to {readings[-1].end}",
                remedy="check its weights with slidesparse inspect, or try another --dtype",
            )
        nats, scored = nats + total, scored + sum(w.scored for w in readings)
        advance(sum(w.scored for w in readings))
    return Perplexity(nats, scored, n_bytes, window, stride)


def _token_losses(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each next token, float32 [tokens], of logits [tokens, vocabulary]."""
    size = max(1, CHUNK // logits.shape[-1])
    pairs = zip(logits.split(size), following.split(size), strict=True)
    return torch.cat([F.cross_entropy(part.to(torch.float32), token, reduction="none") for part, token in pairs])


def _batches(readings: list[Window], size: int) -> Iterator[list[Window]]:
    """Yield batches of at most ``size`` windows of equal length; only the last window of a text can be shorter."""
    full = [w for w in readings if w.end - w.start == readings[0].end - readings[0].start]
    yield from (full[i : i + size] for i in range(0, len(full), size))
    if len(full) < len(readings):
        yield readings[len(full) :]


def logits_of(model: nn.Module) -> Logits:
    """Return the logits function of a transformers causal language model."""
    called: Any = model
    return lambda ids: called(input_ids=ids, use_cache=False).logits
