"""Outcome of ``slidesparse recover``: figures of a run, as JSON and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slidesparse.base.progress import advice
from slidesparse.offline.evaluate import warn_of_few
from slidesparse.recovery.training import MOST_LEFT_OUT


@dataclass(frozen=True)
class Recovery:
    """Outcome of a run.

    Attributes:
        destination: The new checkpoint.
        kept: Its weights: ``after`` training, or ``before`` where training did not help.
        steps: Steps made; ``left_out`` of them were skipped, since their loss was not finite.
        tokens: Tokens trained on, in ``seconds``.
        lr: Peak learning rate.
        ended_early: Whether no step had a finite loss any more.
        eval_tokens: Tokens of the evaluation windows.
        before: Figures of the pruned model (:meth:`slidesparse.recovery.training.Training.evaluate`).
        after: The same figures of the trained model.
        losses: Mean loss of each step that was not skipped, in nats.
    """

    destination: str
    kept: str
    steps: int
    tokens: int
    seconds: float
    lr: float
    left_out: int
    ended_early: bool
    eval_tokens: int
    before: dict[str, float]
    after: dict[str, float]
    losses: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the losses, of which there may be many."""
        return {name: value for name, value in asdict(self).items() if name != "losses"}

    def describe(self) -> str:
        """Return the outcome as text."""
        b, a, speed = self.before, self.after, round(self.tokens / max(self.seconds, 1e-9))
        lines = [
            f"trained on {self.tokens} tokens in {self.seconds:.0f} s, {speed} tokens/s, learning rate {self.lr:.2g}",
            f"KL from the dense model: {b['kl']:.4f} -> {a['kl']:.4f} nats ({self.eval_tokens} evaluation tokens)",
            f"loss: dense {b['dense_loss']:.4f}, pruned {b['loss']:.4f}, trained {a['loss']:.4f}",
            f"same next token as the dense model: {b['same']:.1%} -> {a['same']:.1%}",
            *warn_of_few(self.eval_tokens, "use more text, or a larger --eval-windows"),
        ]
        if self.left_out:
            lines.append(f"{self.left_out} steps were skipped: their loss was NaN or Inf")
        if self.ended_early:
            early = f"training ended early, after {MOST_LEFT_OUT} such steps in a row"
            lines.append("; ".join([early, *advice(["use a lower --lr"])]))
        if self.kept == "after":
            end = f"{self.destination} holds the trained weights"
            then = "quantise it with slidesparse prune, calibrated"
        else:
            end = f"Training did not help; {self.destination} holds the untrained weights"
            then = "try more text and --tokens, or another --lr"
        return "\n".join([*lines, "; ".join([end, *advice([then])])])
