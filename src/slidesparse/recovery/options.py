"""The options of ``slidesparse recover``, and the rate at each moment of a run."""

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
"""What is trained: everything but the input and output embeddings; the linears (and experts) of the layers alone; or
everything. The embeddings of a small model are a third of it, no pattern prunes them, and rows of tokens that the text
does not have can only get worse."""

Recompute = Literal["auto", "on", "off"]
"""Whether activations are computed again in the backward pass instead of being kept; ``auto``: where memory needs it.
"""

RATE, WIDTH = 9e-6, 2048
"""The usual rate of a model that is as wide as this, 2.1e-5 for 896 channels: of a published model of that width 4:6
came nearer to the dense one at 2e-5, hardly at 4.6e-5, and less near at 1.2e-4 (docs/accuracy.md). Adam's best rate
falls as one over the width (maximal update parametrisation, arXiv 2203.03466)."""

WARM_UP, START, LEAST = 0.1, 0.05, 0.1
"""The share of a run in which the rate rises, and the shares of the highest rate that it has first and last."""

AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMG]?)", re.ASCII)


def parse_amount(text: str, name: str = "--tokens") -> int:
    """Return a number with a suffix: ``20M`` is 20 million; ``name`` is that of the option.

    >>> parse_amount("20M"), parse_amount("1.5k"), parse_amount("100K"), parse_amount("300")
    (20000000, 1500, 100000, 300)
    """
    found = AMOUNT.fullmatch(text)
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
    amount = 0 if found is None else round(float(found[1]) * units[found[2].upper()])
    if amount < 1:
        raise InputError(name, got=shown(text), needed="a number above 0, such as 300k, 20M or 1G")
    return amount


@dataclass(frozen=True)
class RecoverOptions:
    """The options of a run; all but ``micro``, ``save_minutes`` and ``recompute`` decide the result.

    Attributes:
        texts: Texts and chats: ``FILE`` or ``FILE:WEIGHT``, as :func:`slidesparse.files.mixed_texts.weighted` reads.
        tokens: Budget in tokens; None where it is in minutes.
        minutes: Budget in minutes of training; None where it is in tokens.
        rate: Highest rate of AdamW; None: :func:`usual_rate`.
        batch: Tokens of a step, of all processes together.
        window: Tokens of a window.
        held: Windows that are kept from training, to judge by.
        seed: Of the order of windows, and of which of them are held.
        train: See :data:`Trained`.
        dtype: Round weights and activations as this type is served while training; None: do not.
        recipe: How INT8 weights are rounded.
        bos: Begin each window with what the tokenizer puts before a text.
        micro: Most windows that a GPU takes at once.
        save_minutes: Minutes between two saved states.
        recompute: See :data:`Recompute`.

    Raises:
        InputError: A number or a word cannot be used.
    """

    texts: tuple[str, ...]
    tokens: int | None = None
    minutes: float | None = None
    rate: float | None = None
    batch: int = 65536
    window: int = 1024
    held: int = 64
    seed: int = 0
    train: Trained = "body"
    dtype: QuantName | None = None
    recipe: Rounding = "absmax"
    bos: bool = True
    micro: int = 32
    save_minutes: float = 5.0
    recompute: Recompute = "auto"

    def __post_init__(self) -> None:
        if not self.texts:
            needed = "a text or chats"
            raise InputError("nothing to train on", needed=needed, remedy="add --chats, --text FILE or --self-chats N")
        if (self.tokens is None) == (self.minutes is None):
            raise InputError("the budget", needed="tokens or minutes", remedy="add --tokens 20M, or --minutes 15")
        for name, least in (("batch", 1), ("window", 2), ("held", 1), ("micro", 1), ("tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"--{name}", got=value, needed=f"{least} or more")
        for name in ("minutes", "rate", "save_minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"--{name.replace('_', '-')}", got=value, needed="a number above 0")
        if not 0 <= self.seed <= MAX_SEED:
            raise InputError("--seed", got=self.seed, needed=f"0 to {MAX_SEED}")
        if self.batch < self.window:
            raise InputError("--batch", got=self.batch, needed=f"{self.window} tokens or more, those of a window")
        if self.tokens is not None and self.tokens < self.step_tokens:
            needed = f"{self.step_tokens} or more, those of a step"
            raise InputError("--tokens", got=self.tokens, needed=needed, remedy="use a smaller --batch")
        choices = {"train": get_args(Trained), "recompute": get_args(Recompute), "recipe": get_args(Rounding)}
        for name, known in {**choices, "dtype": (None, *QUANT_NAMES)}.items():
            if getattr(self, name) not in known:
                words = " or ".join(str(one) for one in known if one is not None)
                raise InputError(f"--{name}", got=shown(getattr(self, name)), needed=words)
        if self.recipe == "6bit" and self.dtype != "int8":
            raise InputError("--recipe 6bit", got=f"--dtype {self.dtype}", needed="--dtype int8")

    @property
    def windows(self) -> int:
        """Windows of a step."""
        return self.batch // self.window

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.windows * self.window

    @property
    def steps(self) -> int | None:
        """Steps of a budget in tokens."""
        return None if self.tokens is None else round(self.tokens / self.step_tokens)

    def done(self, step: int, seconds: float) -> float:
        """Return the share of the budget that is spent after some steps and seconds of training: 1 at the end."""
        if self.minutes is not None:
            return min(1.0, seconds / (60 * self.minutes))
        return min(1.0, step / (self.steps or 1))


def usual_rate(width: int) -> float:
    """Return the usual rate for a model whose hidden state has ``width`` channels."""
    return RATE * WIDTH / width


def rate_share(done: float) -> float:
    """Return the share of the highest rate when a share of the budget is spent: up in a line, then down in a cosine.

    >>> [round(rate_share(done), 3) for done in (0.0, 0.05, 0.1, 0.55, 1.0)]
    [0.05, 0.5, 1.0, 0.55, 0.1]
    """
    if done < WARM_UP:
        return max(done / WARM_UP, START)
    return LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))
