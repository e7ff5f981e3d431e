"""Cut a text file into windows of tokens for calibration, the same windows for the same seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.typed_json import parse_json
from slidesparse.errors import CheckpointError, InputError, UnsupportedError, first_line
from slidesparse.models.parts import text_config

SAMPLES = 128
MAX_LENGTH = 2048


@dataclass(frozen=True)
class Calibration:
    """The text that a calibrated method sees.

    Attributes:
        file: UTF-8 text; or ``.jsonl`` with one object a line whose ``text`` is a document; or a folder that
            ``datasets`` wrote with ``save_to_disk``, whose column ``text`` is taken (split ``train`` if it has splits).
        samples: Windows of text.
        length: Tokens of a window; None: 2048, or as many as the model has positions when these are fewer.
        seed: Seed of the random choice of windows.
    """

    file: str
    samples: int = SAMPLES
    length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.length is not None and self.length < 2):
            raise InputError(
                "calibration windows", got=f"{self.samples} of {self.length} tokens", needed="1 or more, of 2 or more"
            )


def read_text(path: str | Path) -> str:
    """Read the text of a file, or of a data set on disk: see :class:`Calibration`.

    Raises:
        InputError: It cannot be read, is not text, or is empty.
        UnsupportedError: It is a data set and ``datasets`` is not installed.
    """
    path = Path(path)
    text = "\n\n".join(_data_set(path)) if path.is_dir() else _file_text(path)
    if not text.strip():
        raise InputError(f"{path} holds no text")
    return text


def _file_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}", got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text", got=first_line(error), needed="UTF-8") from error
    if "\0" in text:
        raise InputError(f"{path} is not text", got="NUL characters", needed="UTF-8")
    return "\n\n".join(_documents(path, text)) if path.suffix == ".jsonl" else text


def _data_set(folder: Path) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        raise UnsupportedError(
            f"{folder} is a folder, and datasets is not installed", remedy="pip install datasets, or use a text file"
        ) from error
    try:
        loaded: Any = datasets.load_from_disk(str(folder))
        return [str(text) for text in (loaded["train"] if isinstance(loaded, dict) else loaded)["text"]]
    except (OSError, KeyError, ValueError) as error:
        raise InputError(
            f"{folder} is no data set with texts",
            got=first_line(error),
            needed="a folder that datasets' save_to_disk wrote, with a column text",
        ) from error


def _documents(path: Path, lines: str) -> list[str]:
    documents = []
    # Not splitlines(), which also splits at U+2028 and others that a JSON string may hold.
    for number, line in enumerate(lines.removesuffix("\n").split("\n"), start=1):
        where = f"{path}, line {number}"
        document = parse_json(line, where, non_finite=True)
        if not isinstance(document, dict) or not isinstance(document.get("text"), str):
            raise InputError(where, got=repr(line[:80]), needed='an object such as {"text": "..."}')
        documents.append(document["text"])
    return documents


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a local checkpoint.

    Raises:
        CheckpointError: It has none that transformers can load.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedError("transformers is not installed", remedy='pip install "slidesparse[hf]"') from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken file can raise anything in a library
        raise CheckpointError(
            f"{folder} has no tokenizer that can be loaded",
            got=first_line(error),
            needed="tokenizer.json and tokenizer_config.json in the folder; custom code is not run",
        ) from error


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    """Return the token numbers of a text: int64 [n]."""
    # verbose=False: the text is longer than the model reads at once, and is cut into windows afterwards.
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)


def positions(config: Any, at_most: int = MAX_LENGTH) -> int:
    """Return how many tokens a model can read at once, ``at_most`` when its config has no number or a larger one."""
    named = int(getattr(text_config(config), "max_position_embeddings", 0) or 0)
    return min(named, at_most) if named > 0 else at_most  # -1 is XLNet's, which has no limit


def sample_windows(
    tokens: torch.Tensor, samples: int, length: int, seed: int, source: str = "the text"
) -> torch.Tensor:
    """Return windows that do not overlap, in random order: int64 [samples, length].

    Args:
        tokens: int64 [n].
        samples: The number of windows.
        length: Tokens of each window.
        seed: Seed of the random choice.
        source: Name of the text in the error.

    Raises:
        InputError: The text is too short.
    """
    available = len(tokens) // length
    if available < samples:
        raise InputError(
            f"{source} is too short for calibration",
            got=f"{len(tokens)} tokens, {available} windows of {length}",
            needed=f"{samples} windows",
            remedy="use a longer text, or fewer or shorter windows (--samples, --length)",
        )
    chosen = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:samples]
    return tokens[: available * length].view(available, length)[chosen]


def digest(windows: torch.Tensor) -> str:
    """Return a hexadecimal digest of the windows, which changes with text, tokenizer, length and seed."""
    return hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()


def calibration_windows(folder: Path, config: Any, calibration: Calibration) -> torch.Tensor:
    """Cut the windows of a calibration with a checkpoint's own tokenizer: int64 [samples, length].

    Raises:
        InputError: The text cannot be used, or the windows are longer than the model reads.
        CheckpointError: The checkpoint has no tokenizer, or one that does not fit the model.
    """
    length = positions(config) if calibration.length is None else calibration.length
    if length > positions(config, at_most=length):
        raise InputError("calibration windows", got=f"{length} tokens", needed=f"at most {positions(config, length)}")
    text = read_text(calibration.file)
    tokens = encode(load_tokenizer(folder), text)
    vocabulary = int(getattr(text_config(config), "vocab_size", 0) or 0)
    if len(tokens) and vocabulary and int(tokens.max()) >= vocabulary:
        raise CheckpointError(
            f"the tokenizer of {folder} does not fit its model",
            got=f"token {int(tokens.max())}",
            needed=f"less than {vocabulary}",
        )
    return sample_windows(tokens, calibration.samples, length, calibration.seed, str(calibration.file))
