"""The windows of text that a run trains on and is measured by, and their order: a function of the seed alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slidesparse.errors import InputError
from slidesparse.files.mixed_texts import shares, weighted
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import write_tensors
from slidesparse.offline.calibrate.calibration import check_tokens, cut_windows, encode, load_tokenizer, tokens_before
from slidesparse.offline.calibrate.texts import as_text, read_documents
from slidesparse.recovery.options import RecoverOptions

GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it fill the unit interval evenly, so that any stretch of a run has the texts in their shares."""


class Windows:
    """Windows of several texts, int32 [n, window]: of each, those to train on; of all in their shares, those held.

    ``weights`` are those of the texts, and ``seed`` decides the order.
    """

    def __init__(self, train: Sequence[torch.Tensor], held: torch.Tensor, weights: Sequence[float], seed: int) -> None:
        self.train, self.held, self.seed = list(train), held, seed
        self.bounds = torch.tensor(weights, dtype=torch.float64).cumsum(0) / sum(weights)
        self.orders: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def count(self) -> int:
        """Windows to train on."""
        return sum(map(len, self.train))

    def step(self, step: int, windows: int) -> torch.Tensor:
        """Return the windows of a step: int64 [windows, window].

        Each text is gone through in an order of its own, and then again in another one.
        """
        places = torch.arange((step + 1) * windows, dtype=torch.float64)
        texts = torch.searchsorted(self.bounds, (places * GOLDEN).frac(), right=True).clamp_(max=len(self.train) - 1)
        taken = [int(count) for count in torch.bincount(texts[: step * windows], minlength=len(self.train))]
        rows = []
        for text in texts[step * windows :].tolist():
            rows.append(self._window(text, taken[text]))
            taken[text] += 1
        return torch.stack(rows).long()

    def _window(self, text: int, place: int) -> torch.Tensor:
        windows = self.train[text]
        round_, index = divmod(place, len(windows))
        key = (text, round_)
        if key not in self.orders:
            self.orders = {one: order for one, order in self.orders.items() if one[0] != text}
            seed = (self.seed + 1_000_003 * (text + 1) + round_) % 2**63
            self.orders[key] = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
        return windows[self.orders[key][index]]

    def save(self, path: Path) -> None:
        """Write them, so that a run that goes on need not tokenise again."""
        tensors = {f"train.{i}": one for i, one in enumerate(self.train)} | {"held": self.held}
        write_tensors(path, tensors)

    @classmethod
    def load(cls, path: Path, options: RecoverOptions) -> Windows:
        """Read what :meth:`save` wrote."""
        reader, weights = TensorReader(path), [weighted(text).weight for text in options.texts]
        train = [reader.tensor(f"train.{i}") for i in range(len(weights))]
        return cls(train, reader.tensor("held"), weights, options.seed)


def read_windows(folder: Path, config: Any, options: RecoverOptions) -> Windows:
    """Read, tokenise and cut the texts of a run with the tokenizer of a checkpoint.

    Raises:
        InputError: A text cannot be read, or is too short.
        CheckpointError: The checkpoint has no tokenizer, or one with another vocabulary than the model's.
    """
    texts = [weighted(text) for text in options.texts]
    documents = [read_documents(text.file) for text in texts]
    tokenizer = load_tokenizer(folder)
    before = tokens_before(tokenizer) if options.bos else torch.tensor([], dtype=torch.int64)
    train, held = [], []
    for text, inside, count in zip(texts, documents, shares(texts, options.held), strict=True):
        tokens = encode(tokenizer, as_text(inside, tokenizer), show=None)
        check_tokens(tokens, config, folder)
        windows = cut_windows(tokens, options.window, before).to(torch.int32)
        if len(windows) < 2:
            got = f"{len(tokens)} tokens, {len(windows)} windows of {options.window}"
            needed = "two windows, one to train on and one to judge by"
            remedy = "use a longer text, or a shorter --window"
            raise InputError(f"{text.file} is too short", got=got, needed=needed, remedy=remedy)
        kept = max(1, min(max(count, 1), len(windows) // 8))  # at most an eighth
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(options.seed))
        held.append(windows[order[:kept]])
        train.append(windows[order[kept:]])
    return Windows(train, torch.cat(held), [text.weight for text in texts], options.seed)
