"""Divergence of predictions from the dense model's, over the whole vocabulary and in chunks of tokens.

A vocabulary of 150 thousand makes 600 kB of float32 logits a token. So logits exist only for a chunk of tokens: the
hidden states of both models are multiplied by the output embeddings, and in training the gradients of the student's
hidden states and output embedding are computed in the same pass, before the next chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 1 << 28
"""Logits of a chunk: 1 GiB of float32. About five such tensors are in memory at a time."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model as the factors of its logits.

    ``hidden`` are the hidden states after the last norm [tokens, width]; ``head`` and ``bias`` are those of the output
    embedding, [vocabulary, width] and [vocabulary], of the same type; ``cap`` is Gemma 2's in
    ``cap * tanh(logits / cap)``.
    """

    hidden: torch.Tensor
    head: torch.Tensor
    cap: float | None = None
    bias: torch.Tensor | None = None

    def first(self, tokens: int) -> Predictions:
        """Return the predictions for the first tokens."""
        return replace(self, hidden=self.hidden[:tokens])

    def logits(self, rows: slice) -> torch.Tensor:
        """Return the logits of some tokens: float32 [rows, vocabulary]."""
        logits = wide_product(self.hidden[rows], self.head.t())
        logits = logits if self.bias is None else logits + self.bias
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b`` in float32: a GPU accumulates 16-bit products in float32 anyway, and rounds only to store."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def chunks(tokens: int, vocabulary: int, chunk: int = CHUNK) -> Iterator[slice]:
    """Yield the rows of each chunk of at most ``chunk`` logits."""
    size = max(1, chunk // vocabulary)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def divergence(logits: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return KL(dense || student) of logits [rows, vocabulary], summed, and its gradient by the student's logits."""
    log_q, log_p = F.log_softmax(logits, -1), F.log_softmax(dense, -1)
    p = log_p.exp()
    total = log_p.sub_(log_q).mul_(p).sum(-1).sum()
    return total, log_q.exp_().sub_(p)


def distillation(
    student: Predictions, dense: Predictions, chunk: int = CHUNK, by: Callable[..., Any] = divergence
) -> torch.Tensor:
    """Return KL(dense || student) summed over tokens, a float32 scalar with gradients; ``by`` may be compiled."""
    total: torch.Tensor = _Distillation.apply(student.hidden, student.head, student.bias, student.cap, dense, chunk, by)
    return total


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, cap: float | None,
        dense: Predictions, chunk: int, by: Callable[..., Any],
    ) -> torch.Tensor:  # fmt: skip
        student = Predictions(hidden.detach(), head.detach(), cap, None if bias is None else bias.detach())
        wants_hidden, wants_head, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_head = torch.zeros_like(head, dtype=torch.float32) if wants_head else None
        of_bias = head.new_zeros(len(head), dtype=torch.float32) if wants_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in chunks(len(hidden), len(head), chunk):
            logits = student.logits(rows)
            kl, slope = by(logits, dense.logits(rows))
            total += kl
            if cap is not None:
                slope *= 1 - (logits / cap).square()
            if of_bias is not None:
                of_bias += slope.sum(0)
            slope = slope.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[rows] = slope @ student.head
            if of_head is not None:
                of_head += wide_product(slope.t(), student.hidden[rows])
        ctx.save_for_backward(of_hidden, of_head, of_bias)
        ctx.types = hidden.dtype, head.dtype, head.dtype
        return total

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.types, strict=True)
        return *(None if one is None else (one * slope).to(dtype) for one, dtype in pairs), None, None, None, None


def differences(logits: torch.Tensor, dense: torch.Tensor, following: torch.Tensor) -> list[torch.Tensor]:
    """Return KL(dense || student), both losses, and whether both rank the same token first, each [tokens].

    Logits are [tokens, vocabulary]; ``following`` are the next tokens, int64 [tokens], where -100 has no loss.
    """
    log_q, log_p = (F.log_softmax(one, -1) for one in (logits, dense))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    losses = (F.nll_loss(one, following, reduction="none") for one in (log_q, log_p))
    return [kl, *losses, log_q.argmax(-1) == log_p.argmax(-1)]


@torch.no_grad()
def compare(student: Predictions, dense: Predictions, ids: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """Compare predictions on the tokens of text windows, int64 [windows, window], in the order of ``hidden``.

    Returns:
        Sums over tokens, float64 [4]: KL(dense || student); the student's and the dense model's loss of the next token
        in nats (a window's last token has none); the tokens at which both rank the same next token first.
    """
    following = F.pad(ids[:, 1:], (0, 1), value=-100).flatten()
    sums = torch.zeros(4, dtype=torch.float64, device=ids.device)
    for rows in chunks(len(student.hidden), len(student.head), chunk):
        figures = differences(student.logits(rows), dense.logits(rows), following[rows])
        sums += torch.stack([one.sum(dtype=torch.float64) for one in figures])
    return sums
