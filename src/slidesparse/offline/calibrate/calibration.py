"""Calibration windows: a text cut into pieces of equal length, the same ones for the same seed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.log import LOG
from slidesparse.base.other_libraries import LOCAL, need, other_library
from slidesparse.base.paths import usable_path
from slidesparse.base.progress import progress_bar
from slidesparse.checkpoints.tokenizer_files import has_tokenizer_files
from slidesparse.errors import CheckpointError, InputError, first_line
from slidesparse.files.json_files import read_json
from slidesparse.files.mixed_texts import WeightedText, shares, weighted
from slidesparse.models.causal import vocabulary_of
from slidesparse.models.parts import text_config
from slidesparse.offline.calibrate.chats import Chat, vocabulary_digest
from slidesparse.offline.calibrate.standard_library import standard_library
from slidesparse.offline.calibrate.texts import DEFAULT, Document, as_text, read_documents
from slidesparse.pruning import get_pruner

SAMPLES = 128
MAX_LENGTH = 2048
LIBRARY = "Python's standard library"
"""The default text, in words."""

DEFAULT_LENGTH = 512
"""Tokens of a window of the default text: a CPU calibrates a small model on 128 of them in minutes."""

MAX_SEED = 2**63 - 1

FEW_TOKENS = 16_384
"""Calibration tokens below which a line says that they are few."""

STRETCH = 1 << 16
"""Characters of a text in one piece to tokenise: libraries tokenise many pieces with all cores."""

CUT = re.compile(r"\n\n(?=\S)")
"""Places to cut a text: most tokenizers end a token there. SentencePiece's add a blank to the next piece."""


@dataclass(frozen=True)
class Calibration:
    """The text of a calibrated method.

    Attributes:
        file: Source for :func:`offline.calibrate.texts.read_documents`; or ``default``, where there is no such file:
            :mod:`slidesparse.offline.calibrate.standard_library`.
        samples: Calibration windows, or as many as a shorter text has.
        length: Tokens of a calibration window; None: 2048 (512 of the default text), or the model's positions if fewer.
        seed: Seed of the random choice of windows, from 0 to 2^63 - 1.
        more: Other texts. Each, and ``file`` too, may end in ``:WEIGHT``: its share of the windows.
        bos: Begin each window with the tokenizer's special tokens, such as BOS.

    Raises:
        InputError: A number or the name of the file cannot be used.
    """

    file: str
    samples: int = SAMPLES
    length: int | None = None
    seed: int = 0
    more: tuple[str, ...] = ()
    bos: bool = True

    def __post_init__(self) -> None:
        for text in (self.file, *self.more):
            usable_path(text, "calibration text")
        object.__setattr__(self, "file", os.fspath(self.file))  # not normalised: ./a/b is no name of a data set
        if not isinstance(self.samples, int) or self.samples < 1:
            raise InputError("calibration windows (--samples)", got=repr(self.samples), needed="1 or more")
        if self.length is not None and (not isinstance(self.length, int) or self.length < 2):
            raise InputError("tokens of a calibration window (--length)", got=repr(self.length), needed="2 or more")
        if not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise InputError("calibration seed", got=repr(self.seed), needed=f"0 to {MAX_SEED}")

    @property
    def texts(self) -> list[WeightedText]:
        """All texts with their weights."""
        return [weighted(one) for one in (self.file, *self.more)]

    @property
    def names(self) -> str:
        """The names of all texts, without their folders."""
        return ", ".join(LIBRARY if is_default(one.file) else Path(one.file).name for one in self.texts)


def calibration_for(method: str, texts: Sequence[str], windows: Mapping[str, Any]) -> Calibration | None:
    """Return the calibration of a pruning method, by default on the default text; None for one that reads no text.

    ``windows`` holds the given fields of :class:`Calibration` besides its texts.
    """
    if not texts and not get_pruner(method).needs_calibration:
        if windows:
            got, remedy = ", ".join(windows), "use --method sparsegpt or wanda, or leave these out"
            raise InputError(f"{method} takes no calibration text", got=got, remedy=remedy)
        return None
    first, *more = texts or [DEFAULT]
    return Calibration(first, more=tuple(more), **windows)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a local checkpoint; a CheckpointError where transformers cannot."""
    tokenizers = need("transformers").AutoTokenizer
    try:
        with other_library():
            tokenizer = tokenizers.from_pretrained(str(folder), **LOCAL)
    except Exception as error:  # a broken file can raise anything in a library
        raise CheckpointError(
            f"{folder} has no tokenizer that can be loaded",
            got=first_line(error) if has_tokenizer_files(folder) else "no file of one",
            needed="tokenizer.json and tokenizer_config.json in the folder; custom code is not run",
            remedy="copy the tokenizer's files from where the weights are from",
        ) from error
    file = folder / "chat_template.json"  # of older multimodal models' processors
    if getattr(tokenizer, "chat_template", None) is None and file.exists():
        tokenizer.chat_template = read_json(file).get("chat_template")
    return tokenizer


def encode(tokenizer: Any, text: str, show: bool | None = False) -> torch.Tensor:
    """Return the token numbers of a text, without special tokens around it: int64 [n]; ``show`` is a bar's."""
    stretches, tokens = _stretches(text), [torch.tensor([], dtype=torch.int64)]
    with progress_bar("tokens", len(text), unit="characters", show=show) as advance:
        for start in range(0, len(stretches), 256):
            some = stretches[start : start + 256]
            # verbose=False: the text is longer than the model's positions, and is cut into windows afterwards.
            ids = ids_of(tokenizer, some, add_special_tokens=False, verbose=False)
            tokens += [torch.tensor(one, dtype=torch.int64) for one in ids]
            advance(sum(map(len, some)))
    return torch.cat(tokens)


def tokens_of(documents: Sequence[Document], tokenizer: Any, show: bool | None = False) -> torch.Tensor:
    """Return the token numbers of documents, with an empty line between texts: int64 [n].

    Of a chat that a model with this tokenizer wrote these are the numbers that it read and wrote: its template may make
    another text of the answer, without thoughts or special tokens.
    """
    chats = [one for one in documents if isinstance(one, Chat) and one.tokens]
    vocabulary = vocabulary_digest(tokenizer) if chats else ""
    kept = {id(one) for one in chats if one.has_tokens_of(vocabulary)}
    if others := len(chats) - len(kept):
        LOG.warning("%d chats were changed, or written with another tokenizer: they are read by the template", others)
    parts = [torch.tensor([], dtype=torch.int64)]
    for is_kept, group in groupby(documents, lambda one: id(one) in kept):
        if is_kept:
            parts += [torch.tensor(one.tokens) for one in group if isinstance(one, Chat)]
        else:
            parts.append(encode(tokenizer, as_text(group, tokenizer), show))
    return torch.cat(parts)


def _stretches(text: str) -> list[str]:
    """Cut a text after empty lines into pieces of at least :data:`STRETCH` characters."""
    stretches, start = [], 0
    while start < len(text):
        cut = CUT.search(text, start + STRETCH)
        end = len(text) if cut is None else cut.end()
        stretches.append(text[start:end])
        start = end
    return stretches


def ids_of(tokenizer: Any, text: str | list[str], **options: bool) -> list[Any]:
    """Return the token numbers of a text or a list of texts; any error becomes a CheckpointError."""
    try:
        return list(tokenizer(text, **options)["input_ids"])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # such as a panic of its Rust, in a regular expression that takes too long
        raise CheckpointError("the tokenizer cannot read the text", got=first_line(error)) from error


def tokens_before(tokenizer: Any) -> torch.Tensor:
    """Return the special tokens that a tokenizer puts before a text, such as Gemma's and Llama's BOS: int64 [n].

    Windows from the middle of a text begin with them too: models have seen nothing else at their first position, and
    some attend to it from everywhere. Many tokenizers have none.
    """
    whole, bare = (ids_of(tokenizer, "a", add_special_tokens=special) for special in (True, False))
    places = range(len(whole) - len(bare) + 1)
    return torch.tensor(whole[: next((i for i in places if whole[i : i + len(bare)] == bare), 0)], dtype=torch.int64)


def cut_windows(tokens: torch.Tensor, length: int, before: torch.Tensor) -> torch.Tensor:
    """Cut a text into windows that do not overlap and begin with ``before``: int64 [n, length].

    Args:
        tokens: int64 [tokens], with or without ``before`` at its start, as chat templates may add it.
        length: Tokens of each window.
        before: int64 [k], from :func:`tokens_before`; may be empty.
    """
    count = len(before)
    if count and torch.equal(tokens[:count], before):
        tokens = tokens[count:]
    room = length - count
    if room < 1:
        raise InputError("tokens of a window", got=length, needed=f"more than {count}, with which each begins")
    body = tokens[: len(tokens) // room * room].view(-1, room)
    return torch.cat([before.expand(len(body), count), body], 1) if count else body


def positions(config: Any, at_most: int = MAX_LENGTH) -> int:
    """Return the number of positions of a model, ``at_most`` if its config has none or more."""
    known = getattr(text_config(config), "max_position_embeddings", None)
    return min(known, at_most) if isinstance(known, int) and known > 0 else at_most  # XLNet's -1: no limit


def check_tokens(tokens: torch.Tensor, config: Any, folder: str | Path) -> None:
    """Raise a CheckpointError for tokens outside of a model's vocabulary."""
    vocabulary = vocabulary_of(config)
    if len(tokens) and vocabulary and int(tokens.max()) >= vocabulary:
        raise CheckpointError(
            f"the tokenizer of {folder} does not fit its model",
            got=f"token {int(tokens.max())}",
            needed=f"less than {vocabulary}",
        )


def sample_windows(
    tokens: torch.Tensor,
    samples: int,
    length: int,
    seed: int,
    source: str = "the text",
    before: Sequence[int] | torch.Tensor = (),
) -> torch.Tensor:
    """Return calibration windows of tokens [n], without overlap and in random order: int64 [samples, length].

    A shorter text has fewer, with a warning. A text without one whole window is an InputError.
    """
    windows = cut_windows(tokens, length, torch.as_tensor(before, dtype=tokens.dtype))
    if not len(windows):
        raise InputError(
            f"{source} is too short for calibration",
            got=f"{len(tokens)} tokens",
            needed=f"{length}, those of a window",
            remedy="use a longer text, or shorter windows (--length)",
        )
    if len(windows) < samples:
        LOG.warning("%s has %d of %d windows of %d tokens", source, len(windows), samples, length)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:samples]]


def digest(windows: torch.Tensor) -> str:
    """Return a hexadecimal digest of calibration windows, which changes with text, tokenizer, length and seed."""
    return hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()


def is_default(file: str) -> bool:
    """Return whether a name means the default text: a file of that name comes first."""
    return file == DEFAULT and not os.path.lexists(file)


def uses_default_text(calibration: Calibration | None) -> bool:
    """Return whether a calibration reads the default text."""
    return calibration is not None and any(is_default(one.file) for one in calibration.texts)


def calibration_windows(folder: Path, config: Any, calibration: Calibration) -> torch.Tensor:
    """Cut the windows of a calibration with a checkpoint's own tokenizer: int64 [samples, length]."""
    usual = positions(config, DEFAULT_LENGTH if uses_default_text(calibration) else MAX_LENGTH)
    length = usual if calibration.length is None else calibration.length
    if length > positions(config, at_most=length):
        raise InputError("calibration windows", got=f"{length} tokens", needed=f"at most {positions(config, length)}")
    counts = shares(calibration.texts, calibration.samples)
    documents = [standard_library() if is_default(one.file) else read_documents(one.file) for one in calibration.texts]
    tokenizer = load_tokenizer(folder)
    before = tokens_before(tokenizer) if calibration.bos else torch.tensor([], dtype=torch.int64)
    windows = []
    for one, count, inside in zip(calibration.texts, counts, documents, strict=True):
        tokens = tokens_of(inside, tokenizer)
        check_tokens(tokens, config, folder)
        windows.append(sample_windows(tokens, count, length, calibration.seed, one.file, before))
    mixed = torch.cat(windows)
    if mixed.numel() < FEW_TOKENS:
        LOG.warning("%d tokens are few to calibrate on: %d and more lose less", mixed.numel(), FEW_TOKENS)
    if len(windows) == 1:
        return mixed
    return mixed[torch.randperm(len(mixed), generator=torch.Generator().manual_seed(calibration.seed))]
