"""Training loop: AdamW steps on text windows until the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from slidesparse.base.log import LOG
from slidesparse.base.progress import progress_bar
from slidesparse.base.ranks import Ranks
from slidesparse.recovery.memory import Fit
from slidesparse.recovery.networks import DenseNetwork, StudentNetwork, reshard
from slidesparse.recovery.options import RecoverOptions, lr_share
from slidesparse.recovery.state import Progress, State
from slidesparse.recovery.trained import hold_zeros
from slidesparse.recovery.windows import Windows

BETAS = (0.9, 0.95)
CLIP = 1.0
"""AdamW's betas and the largest norm of a gradient, as is usual for large models; there is no weight decay."""

MOST_LEFT_OUT = 10
"""Consecutive steps without a finite loss that end a run."""


@dataclass
class Training:
    """A run on two networks that are divided and filled.

    Attributes:
        student: The pruned network.
        dense: The network that it is trained toward.
        windows: Text windows.
        parameters: The student's trained parameters, by name.
        held: Names of those whose zeros stay.
        lr: Peak learning rate.
    """

    student: StudentNetwork
    dense: DenseNetwork
    windows: Windows
    parameters: Mapping[str, nn.Parameter]
    held: set[str]
    options: RecoverOptions
    lr: float
    fit: Fit
    ranks: Ranks
    device: torch.device

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=self.lr, betas=BETAS, weight_decay=0.0, fused=self.device.type == "cuda"
        )

    def run(self, state: State, progress: Progress) -> None:
        """Train until the budget is spent, or no step has a finite loss any more; save the state at intervals."""
        options, first, begun, shown = self.options, progress.step, time.monotonic(), 0
        spent, saved = options.spent(progress.step, progress.seconds), time.monotonic()
        tokens, seconds = (options.steps or 0) * options.step_tokens, round(60 * (options.minutes or 0))
        unit = "% of the budget" if tokens and seconds else "tokens" if tokens else "seconds"
        whole = 100 if tokens and seconds else tokens or seconds
        with progress_bar("recover", whole, unit=unit) as advance:
            while spent < 1 and progress.in_a_row < MOST_LEFT_OUT:
                started = time.monotonic()
                try:
                    loss, finite = self._step(progress.step, lr_share(spent) * self.lr)
                except KeyboardInterrupt:
                    counts = {int(one["step"]) for one in self.optimizer.state.values()}
                    if self.ranks.world == 1 and counts == {progress.step - progress.left_out}:  # not within AdamW's
                        state.save(progress, self.ranks)
                    raise
                progress.step += 1
                progress.in_a_row = 0 if finite else progress.in_a_row + 1
                progress.left_out += not finite
                if finite:
                    progress.losses.append(round(loss, 6))
                progress.seconds = self._same(progress.seconds + time.monotonic() - started)
                spent = options.spent(progress.step, progress.seconds)
                speed = (progress.step - first) * options.step_tokens / (time.monotonic() - begun)
                advance(round(spent * whole) - shown, f"loss {loss:.4f}, {speed:.0f} tokens/s")
                shown = round(spent * whole)
                if self._same(time.monotonic() - saved) > 60 * options.save_minutes:
                    state.save(progress, self.ranks)
                    saved = time.monotonic()
        if progress.left_out and self.ranks.is_first:
            LOG.warning("%d of %d steps were skipped: their loss was NaN or Inf", progress.left_out, progress.step)

    def _step(self, step: int, lr: float) -> tuple[float, bool]:
        ranks, options = self.ranks, self.options
        own = self.windows.step(step, options.windows)[ranks.rank :: ranks.world].to(self.device)
        micro_batches = own.split(self.fit.micro_batch)
        student = cast("Any", self.student)
        total = torch.zeros((), device=self.device)
        for index, ids in enumerate(micro_batches):
            last = index + 1 == len(micro_batches)
            student.set_requires_gradient_sync(last or self.fit.sync_each)
            student.set_reshard_after_backward(last or ranks.world > 1)
            loss = self.student(ids, self.dense(ids))
            (loss / own.numel()).backward()
            total += loss.detach()
        hold_zeros(self.parameters, self.held)
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), CLIP)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if ranks.world > 1:
            dist.all_reduce(total)
        mean, finite = float(total) / (own.numel() * ranks.world), math.isfinite(float(norm) + float(total))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return mean, finite

    def _same(self, seconds: float) -> float:
        """Return the first process's number to all, so that they save and end together."""
        if self.ranks.world == 1:
            return seconds
        shared = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the student on the evaluation windows.

        Returns:
            Means over their tokens: ``kl`` (dense || student), ``loss`` and ``dense_loss`` of the next token, all in
            nats, and ``same``, the share of tokens at which both models rank the same next token first.
        """
        windows, ranks = self.windows.evaluation, self.ranks
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        rounds = math.ceil(len(windows) / ranks.world)
        with torch.no_grad():
            for start in range(0, rounds, self.fit.micro_batch):
                # Every process takes part in every pass, as FSDP2 needs; a window that is there twice counts once.
                places = [i * ranks.world + ranks.rank for i in range(start, min(start + self.fit.micro_batch, rounds))]
                ids = windows[[place % len(windows) for place in places]].long().to(self.device)
                real = sum(place < len(windows) for place in places)
                sums += self.student(ids, self.dense(ids), counted=real)
        reshard(self.student)
        if ranks.world > 1:
            dist.all_reduce(sums)
        kl, loss, dense_loss, same = sums.tolist()
        tokens, next_ = windows.numel(), windows.numel() - len(windows)
        return {"kl": kl / tokens, "loss": loss / next_, "dense_loss": dense_loss / next_, "same": same / tokens}
