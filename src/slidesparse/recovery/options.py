"""Options of ``slidesparse recover``, and the learning-rate schedule of a run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from slidesparse.base.arguments import shown
from slidesparse.errors import InputError
from slidesparse.offline.calibrate.calibration import MAX_SEED
from slidesparse.weights.quant import QUANT_NAMES, QuantName, Rounding

Trained = Literal["body", "linears", "all"]
"""Parameters to train: all but the input and output embeddings; the linears (and experts) of the layers; or all of
them. Embeddings are a third of a small model, no pattern prunes them, and the rows of tokens that the text lacks can
only get worse."""

GradientCheckpointing = Literal["auto", "on", "off"]
"""Gradient checkpointing, which recomputes activations in the backward pass; ``auto``: where memory needs it."""

LR, WIDTH = 9e-6, 2048
"""Default learning rate at this width, 2.1e-5 at 896 channels. A published model of that width came nearest to its
dense one at 2e-5 to 4.6e-5 for 4:6, and less near at 1.2e-4 (docs/accuracy.md). Adam's best learning rate falls as one
over the width (maximal update parametrisation, arXiv 2203.03466)."""

WARM_UP, START, LEAST = 0.1, 0.05, 0.1
"""Warm-up as a share of the run; the first and the last learning rate as shares of the peak."""

AMOUNT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([kKMG]?)", re.ASCII)

WHOLE = {
    **{"batch": (1, 1 << 27), "window": (2, 1 << 20), "eval_windows": (1, 1 << 20), "micro_batch": (1, 1 << 20)},
    **{"tokens": (1, 10**15), "seed": (0, MAX_SEED)},
}
"""Options in whole numbers: the least and the most."""

MOST = 1e6
"""Most minutes, and the largest learning rate."""


def parse_amount(text: str, name: str = "--tokens") -> int:
    """Return a number with a suffix, such as ``20M``; ``name`` is the option in errors.

    >>> parse_amount("20M"), parse_amount("1.5k"), parse_amount("100K"), parse_amount("300")
    (20000000, 1500, 100000, 300)
    """
    parts = AMOUNT.fullmatch(text)
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
    amount = 0 if parts is None else round(float(parts[1]) * units[parts[2].upper()])
    if amount < 1:
        raise InputError(name, got=shown(text), needed="a number above 0, such as 300k, 20M or 1G")
    return amount


@dataclass(frozen=True)
class RecoverOptions:
    """Options of a run: arguments of :func:`slidesparse.recover`, by their names.

    ``micro_batch``, ``save_minutes`` and ``gradient_checkpointing`` do not change the result.

    Raises:
        InputError: A value is out of range or unknown.
    """

    texts: tuple[str, ...]
    tokens: int | None = None
    minutes: float | None = None
    lr: float | None = None
    batch: int = 65536
    window: int = 1024
    eval_windows: int = 64
    seed: int = 0
    train: Trained = "body"
    dtype: QuantName | None = None
    rounding: Rounding = "absmax"
    bos: bool = True
    micro_batch: int = 32
    save_minutes: float = 5.0
    gradient_checkpointing: GradientCheckpointing = "auto"

    def __post_init__(self) -> None:
        if not self.texts:
            remedy = "add --text FILE, as slidesparse chats writes"
            raise InputError("nothing to train on", needed="a text or chats", remedy=remedy)
        if self.tokens is None and self.minutes is None:
            raise InputError("the budget", needed="tokens or minutes", remedy="add --tokens 20M, or --minutes 15")
        for name, (least, most) in WHOLE.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InputError(_option(name), got=value, needed=f"{least} to {most}")
        for name in ("minutes", "lr", "save_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST:
                raise InputError(_option(name), got=value, needed=f"a number above 0, at most {MOST:g}")
        if self.batch < self.window:
            raise InputError("--batch", got=self.batch, needed=f"{self.window} tokens or more, those of a window")
        choices = {"train": Trained, "gradient_checkpointing": GradientCheckpointing, "rounding": Rounding}
        known = {name: get_args(kind) for name, kind in choices.items()} | {"dtype": QUANT_NAMES}
        for name, words in known.items():
            value = getattr(self, name)
            if value not in words and (name, value) != ("dtype", None):
                raise InputError(_option(name), got=shown(value), needed=" or ".join(words))
        if self.rounding == "6bit" and self.dtype != "int8":
            raise InputError("--rounding 6bit", got=f"--dtype {self.dtype}", needed="--dtype int8")

    @property
    def windows(self) -> int:
        """Text windows of a step."""
        return self.batch // self.window

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.windows * self.window

    @property
    def steps(self) -> int | None:
        """Steps of a budget in tokens."""
        return None if self.tokens is None else round(self.tokens / self.step_tokens)

    def spent(self, step: int, seconds: float) -> float:
        """Return the share of the budget that is spent after some steps and seconds of training: 1 at the end."""
        by_time = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return min(1.0, max(by_time, 0.0 if self.steps is None else step / (self.steps or 1)))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def default_lr(width: int) -> float:
    """Return the default peak learning rate for a model whose hidden state has ``width`` channels."""
    return LR * WIDTH / width


def lr_share(spent: float) -> float:
    """Return the learning rate as a share of its peak: linear warm-up, then cosine decay over the budget.

    >>> [round(lr_share(spent), 3) for spent in (0.0, 0.05, 0.1, 0.55, 1.0)]
    [0.05, 0.5, 1.0, 0.55, 0.1]
    """
    if spent < WARM_UP:
        return max(spent / WARM_UP, START)
    return LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * (spent - WARM_UP) / (1 - WARM_UP)))
