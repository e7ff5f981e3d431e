"""The loop: windows in, a step of AdamW out, until the budget is spent."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from slidesparse.base.log import LOG
from slidesparse.base.progress import bars_shown, progress_bar
from slidesparse.base.ranks import Ranks
from slidesparse.recovery.memory import Fit
from slidesparse.recovery.networks import DenseNetwork, StudentNetwork, put_away
from slidesparse.recovery.options import RecoverOptions, rate_share
from slidesparse.recovery.state import Progress, State
from slidesparse.recovery.trained import hold_zeros
from slidesparse.recovery.windows import Windows

BETAS = (0.9, 0.95)
CLIP = 1.0
"""AdamW's betas and the largest norm of a gradient, as large models are trained with; no decay of weights."""

MOST_LEFT_OUT = 10
"""Steps without a finite loss in a row that end a run."""


class Training:
    """A run: both networks divided and filled, and the student's parameters that are trained.

    Zeros of those ``held`` stay; ``rate`` is the highest rate.
    """

    def __init__(
        self,
        student: StudentNetwork, dense: DenseNetwork, windows: Windows, parameters: Mapping[str, nn.Parameter],
        held: set[str], options: RecoverOptions, rate: float, fit: Fit, ranks: Ranks, device: torch.device,
    ) -> None:  # fmt: skip
        self.student, self.dense, self.windows, self.parameters, self.held = student, dense, windows, parameters, held
        self.options, self.rate, self.fit, self.ranks, self.device = options, rate, fit, ranks, device
        self.optimizer = torch.optim.AdamW(
            list(parameters.values()), lr=rate, betas=BETAS, weight_decay=0.0, fused=device.type == "cuda"
        )

    def run(self, state: State, progress: Progress) -> None:
        """Train until the budget is spent, or no step has a finite loss any more; save the state now and then."""
        options, report = self.options, _Report(self.options, progress)
        done, saved = options.done(progress.step, progress.seconds), time.monotonic()
        unit = "seconds" if options.tokens is None else "tokens"
        with progress_bar("recover", report.total, unit=unit) as advance:
            while done < 1 and progress.in_a_row < MOST_LEFT_OUT:
                begun = time.monotonic()
                try:
                    loss, finite = self._step(progress.step, rate_share(done) * self.rate)
                except KeyboardInterrupt:
                    counts = {int(one["step"]) for one in self.optimizer.state.values()}
                    if self.ranks.world == 1 and counts == {progress.step - progress.left_out}:  # not within AdamW's
                        state.save(progress, self.ranks)
                    raise
                progress.step += 1
                progress.in_a_row = 0 if finite else progress.in_a_row + 1
                progress.left_out += not finite
                if finite:
                    progress.losses = (*progress.losses, round(loss, 6))
                progress.seconds = self._same(progress.seconds + time.monotonic() - begun)
                done = options.done(progress.step, progress.seconds)
                report.step(advance, loss, done)
                if self._same(time.monotonic() - saved) > 60 * options.save_minutes:
                    state.save(progress, self.ranks)
                    saved = time.monotonic()
        if progress.left_out and self.ranks.is_first:
            words = "%d of %d steps were left out, since their loss was NaN or Inf"
            LOG.warning(words, progress.left_out, progress.step)

    def _step(self, step: int, rate: float) -> tuple[float, bool]:
        ranks, options = self.ranks, self.options
        own = self.windows.step(step, options.windows)[ranks.rank :: ranks.world].to(self.device)
        parts = own.split(self.fit.micro)
        student = cast("Any", self.student)
        total = torch.zeros((), device=self.device)
        for index, ids in enumerate(parts):
            last = index + 1 == len(parts)
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
            group["lr"] = rate
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

    def judge(self) -> dict[str, float]:
        """Judge the student by the held windows.

        Returns:
            Means over their tokens: ``kl`` (dense || student), ``loss`` and ``dense_loss`` of the next token, all in
            nats, and ``same``, the share of tokens for which both foresee the same.
        """
        held, ranks = self.windows.held, self.ranks
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        rounds = math.ceil(len(held) / ranks.world)
        with torch.no_grad():
            for start in range(0, rounds, self.fit.micro):
                # Every process takes part in every pass, as FSDP2 needs; a window that is there twice counts once.
                places = [i * ranks.world + ranks.rank for i in range(start, min(start + self.fit.micro, rounds))]
                ids = held[[place % len(held) for place in places]].long().to(self.device)
                real = sum(place < len(held) for place in places)
                sums += self.student(ids, self.dense(ids), counted=real)
        put_away(self.student)
        if ranks.world > 1:
            dist.all_reduce(sums)
        kl, loss, dense_loss, same = sums.tolist()
        tokens, next_ = held.numel(), held.numel() - len(held)
        return {"kl": kl / tokens, "loss": loss / next_, "dense_loss": dense_loss / next_, "same": same / tokens}


class _Report:
    """Shows how a run goes."""

    def __init__(self, options: RecoverOptions, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.begun, self.first = time.monotonic(), progress.step
        self.shown = 0
        self.total = (options.steps or 0) * options.step_tokens or round(60 * (options.minutes or 0))

    def step(self, advance: Callable[..., None], loss: float, done: float) -> None:
        """Show one more step."""
        steps, seconds = self.progress.step - self.first, time.monotonic() - self.begun
        words = f"loss {loss:.4f}, {steps * self.options.step_tokens / seconds:.0f} tokens/s"
        advance(round(done * self.total) - self.shown, words)
        self.shown = round(done * self.total)


def say(words: str) -> None:
    """Print a line of progress on standard error, unless the command is quiet."""
    if bars_shown(True):
        print(f"recover: {words}", file=sys.stderr, flush=True)
