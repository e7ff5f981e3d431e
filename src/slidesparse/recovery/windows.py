"""Text windows of a run, to train on and to evaluate on, in an order that depends only on the seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.log import LOG
from slidesparse.errors import InputError
from slidesparse.files.data_digest import data_digest
from slidesparse.files.mixed_texts import shares, weighted
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.tensor_writer import write_tensors
from slidesparse.offline.calibrate.calibration import (
    check_tokens,
    cut_windows,
    load_tokenizer,
    tokens_before,
    tokens_of,
)
from slidesparse.offline.calibrate.texts import Document, read_documents
from slidesparse.recovery.options import RecoverOptions

GOLDEN = (math.sqrt(5) - 1) / 2
"""Golden ratio: its multiples fill the unit interval evenly, so any part of a run has the texts in their shares."""


class Windows:
    """Text windows, int32 [n, window]: those of each text to train on, and the evaluation windows of all texts.

    ``weights`` are the shares of the texts in training, and ``seed`` decides the order.
    """

    def __init__(
        self, train: Sequence[torch.Tensor], evaluation: torch.Tensor, weights: Sequence[float], seed: int
    ) -> None:
        self.train, self.evaluation, self.seed = list(train), evaluation, seed
        self.bounds = torch.tensor(weights, dtype=torch.float64).cumsum(0) / sum(weights)
        self.orders: dict[tuple[int, int], torch.Tensor] = {}
        self.counted: tuple[int, Any] = (0, 0)  # a place of the order, and the windows of each text before it

    @property
    def count(self) -> int:
        """Windows to train on."""
        return sum(map(len, self.train))

    def step(self, step: int, windows: int) -> torch.Tensor:
        """Return the windows of a step: int64 [windows, window].

        Each text is read in an order of its own, and then again in another one. Steps in sequence take time in
        proportion to their windows; any other step also counts the windows before it.
        """
        start = step * windows
        place, taken = self.counted if self.counted[0] <= start else (0, 0)
        taken = taken + torch.bincount(self.texts(place, start), minlength=len(self.train))
        self.counted, rows, counts = (start, taken), [], taken.tolist()
        for text in self.texts(start, start + windows).tolist():
            rows.append(self._window(text, counts[text]))
            counts[text] += 1
        return torch.stack(rows).long()

    def texts(self, start: int, end: int) -> torch.Tensor:
        """Return the text at each place of the training order, from ``start`` to ``end``: int64 [end - start]."""
        places = torch.arange(start, end, dtype=torch.float64)
        return torch.searchsorted(self.bounds, (places * GOLDEN).frac(), right=True).clamp_(max=len(self.train) - 1)

    def _window(self, text: int, place: int) -> torch.Tensor:
        windows = self.train[text]
        round_, index = divmod(place, len(windows))
        key = (text, round_)
        if key not in self.orders:
            self.orders = {one: order for one, order in self.orders.items() if one[0] != text}
            seed = (self.seed + 1_000_003 * (text + 1) + round_) % 2**63
            self.orders[key] = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
        return windows[self.orders[key][index]]

    def digest(self) -> str:
        """Return a digest of the windows and their shares, by which a run that goes on knows its texts."""
        parts = [*map(data_digest, [*self.train, self.evaluation, self.bounds])]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def save(self, path: Path) -> None:
        """Write the windows for the other processes of a run."""
        tensors = {f"train.{i}": one for i, one in enumerate(self.train)} | {"evaluation": self.evaluation}
        write_tensors(path, tensors)

    @classmethod
    def load(cls, path: Path, options: RecoverOptions) -> Windows:
        """Read the windows that :meth:`save` wrote."""
        reader, weights = TensorReader(path), [weighted(text).weight for text in options.texts]
        train = [reader.verified(f"train.{i}") for i in range(len(weights))]
        return cls(train, reader.verified("evaluation"), weights, options.seed)


def read_windows(folder: Path, config: Any, options: RecoverOptions) -> Windows:
    """Read the texts of a run, tokenise them with a checkpoint's tokenizer, and cut them into windows.

    Raises:
        InputError: A text cannot be read, or is too short.
        CheckpointError: The checkpoint has no tokenizer, or one with another vocabulary than the model's.
    """
    texts = [weighted(text) for text in options.texts]
    documents = _once([read_documents(text.file) for text in texts])
    tokenizer = load_tokenizer(folder)
    before = tokens_before(tokenizer) if options.bos else torch.tensor([], dtype=torch.int64)
    train, evaluation = [], []
    for text, inside, count in zip(texts, documents, shares(texts, options.eval_windows), strict=True):
        tokens = tokens_of(inside, tokenizer, show=None)
        check_tokens(tokens, config, folder)
        windows = cut_windows(tokens, options.window, before).to(torch.int32)
        if len(windows) < 2:
            got = f"{len(tokens)} tokens, {len(windows)} windows of {options.window}"
            needed = "two windows, one to train on and one to evaluate on"
            what = "is too short" if inside else "holds only documents of another text"
            remedy = "use a longer text, or a shorter --window" if inside else "leave it out"
            raise InputError(f"{text.file} {what}", got=got, needed=needed, remedy=remedy)
        kept_out = max(1, min(max(count, 1), len(windows) // 8))  # at most an eighth
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(options.seed))
        evaluation.append(windows[order[:kept_out]])
        train.append(windows[order[kept_out:]])
    return Windows(train, torch.cat(evaluation), [text.weight for text in texts], options.seed)


def _once(texts: Sequence[Sequence[Document]]) -> list[list[Document]]:
    """Return the documents of texts, each once: a repeated one would be trained and evaluated on."""
    placed = [(place, one) for place, text in enumerate(texts) for one in text]
    words = ((json.dumps([one, getattr(one, "tools", None)]).encode(), place, one) for place, one in placed)
    once: dict[bytes, tuple[int, Document]] = {}
    for said, place, one in words:
        once.setdefault(hashlib.sha256(said).digest(), (place, one))
    if len(once) < len(placed):
        LOG.warning("%d documents of the texts are repetitions, and left out", len(placed) - len(once))
    return [[one for at, one in once.values() if at == place] for place in range(len(texts))]
