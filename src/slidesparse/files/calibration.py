"""Cut a text file into windows of tokens for calibration, the same windows for the same seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.other_libraries import other_library
from slidesparse.base.paths import usable_path
from slidesparse.base.typed_json import parse_json
from slidesparse.base.whole_file import require_regular
from slidesparse.errors import CheckpointError, InputError, UnsupportedError, first_line
from slidesparse.models.causal import text_config, vocabulary_of

SAMPLES = 128
MAX_LENGTH = 2048
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Calibration:
    """The text that a calibrated method sees.

    Attributes:
        file: UTF-8 text; or ``.jsonl`` with one object a line whose ``text`` is a document; or ``.json`` with a list of
            such objects; or a folder that ``datasets`` wrote with ``save_to_disk``, whose column ``text`` is taken
            (split ``train`` if it has splits).
        samples: Windows of text.
        length: Tokens of a window; None: 2048, or as many as the model has positions when these are fewer.
        seed: Seed of the random choice of windows, from 0 to 2^63 - 1.

    Raises:
        InputError: A number or the name of the file cannot be used.
    """

    file: str
    samples: int = SAMPLES
    length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "file", str(usable_path(self.file, "calibration text")))
        length = 2 if self.length is None else self.length
        if not (isinstance(self.samples, int) and isinstance(length, int)) or self.samples < 1 or length < 2:
            raise InputError(
                "calibration windows",
                got=f"{self.samples!r} of {self.length!r} tokens",
                needed="1 or more, of 2 or more",
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise InputError("calibration seed", got=repr(self.seed), needed=f"0 to {MAX_SEED}")


def read_text(path: str | Path) -> str:
    """Read the text of a file, or of a data set on disk: see :class:`Calibration`.

    Raises:
        InputError: It cannot be read, is not text, or is empty.
        UnsupportedError: It is a data set and ``datasets`` is not installed.
    """
    path = usable_path(path, "text")
    text = "\n\n".join(_data_set(path)) if path.is_dir() else _file_text(path)
    if not text.strip():
        raise InputError(f"{path} holds no text")
    return text


def _file_text(path: Path) -> str:
    try:
        require_regular(path)
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}", got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text", got=first_line(error), needed="UTF-8") from error
    if "\0" in text:
        raise InputError(f"{path} is not text", got="NUL characters", needed="UTF-8")
    kind = path.suffix.lower()
    if kind == ".jsonl":
        return "\n\n".join(_lines(path, text))
    return "\n\n".join(_list(path, text)) if kind == ".json" else text


def _data_set(folder: Path) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        raise UnsupportedError(
            f"{folder} is a folder, and datasets is not installed", remedy="pip install datasets, or use a text file"
        ) from error
    try:
        loaded: Any = datasets.load_from_disk(str(folder))
        texts = list((loaded["train"] if isinstance(loaded, dict) else loaded)["text"])
    except Exception as error:  # a damaged folder can raise anything in a library
        raise InputError(
            f"{folder} is no data set with texts",
            got=first_line(error),
            needed="a folder that datasets' save_to_disk wrote, with a column text",
        ) from error
    return [_document(f"{folder}, row {number}", {"text": text}) for number, text in enumerate(texts)]


def _lines(path: Path, text: str) -> list[str]:
    # Not splitlines(), which also splits at U+2028 and others that a JSON string may hold.
    numbered = [(f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), start=1)]
    return [_document(where, parse_json(line, where, non_finite=True)) for where, line in numbered if line.strip()]


def _list(path: Path, text: str) -> list[str]:
    documents = parse_json(text, str(path), non_finite=True)
    if not isinstance(documents, list):
        raise InputError(f"{path}", got=type(documents).__name__, needed="a list of objects with a text")
    return [_document(f"{path}, entry {number}", document) for number, document in enumerate(documents, start=1)]


def _document(where: str, document: Any) -> str:
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise InputError(where, got=f"{document!r:.80}", needed='an object such as {"text": "..."}')
    return text


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
        with other_library():
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
    try:
        return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    except Exception as error:  # a broken tokenizer can raise anything
        raise CheckpointError("the tokenizer cannot read the text", got=first_line(error)) from error


def positions(config: Any, at_most: int = MAX_LENGTH) -> int:
    """Return how many tokens a model can read at once, ``at_most`` when its config has no number or a larger one."""
    known = getattr(text_config(config), "max_position_embeddings", None)
    return min(known, at_most) if isinstance(known, int) and known > 0 else at_most  # XLNet's -1: no limit


def check_tokens(tokens: torch.Tensor, config: Any, folder: str | Path) -> None:
    """Refuse tokens that a model does not have, as a tokenizer with a larger vocabulary makes them.

    Raises:
        CheckpointError: Naming the largest.
    """
    vocabulary = vocabulary_of(config)
    if len(tokens) and vocabulary and int(tokens.max()) >= vocabulary:
        raise CheckpointError(
            f"the tokenizer of {folder} does not fit its model",
            got=f"token {int(tokens.max())}",
            needed=f"less than {vocabulary}",
        )


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
    check_tokens(tokens, config, folder)
    return sample_windows(tokens, calibration.samples, length, calibration.seed, str(calibration.file))
