"""Read texts for calibration and perplexity: files of several kinds, folders of them, and data sets.

A document is a text, or a chat: a list of messages, of which the model's own chat template makes a text.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from slidesparse.base.other_libraries import other_library
from slidesparse.base.paths import usable_path
from slidesparse.base.readable_size import readable_size
from slidesparse.base.typed_json import parse_json
from slidesparse.base.whole_file import read_regular, require_regular
from slidesparse.errors import InputError, UnsupportedError, first_line
from slidesparse.files.hub import digests_checked
from slidesparse.offline.calibrate.chats import Chat, templated

Document: TypeAlias = "str | Chat"

DEFAULT = "default"
"""The name of the small set that comes with the package, where there is no file of that name."""

DEFAULT_FILE = Path(__file__).with_name("default_text.txt")

KINDS = (".txt", ".md", ".text", ".jsonl", ".json", ".parquet")
"""Endings of the files of a folder that are read; with ``.gz`` after them too."""

DATA_SET = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files by which a folder that ``datasets`` wrote is known."""

NAMED = re.compile(r"(?P<name>[\w.-]+/[\w.-]+?)(:(?P<config>[\w.-]+))?", re.ASCII)
"""A data set of the hub: ``NAMESPACE/NAME``, or ``NAMESPACE/NAME:CONFIG``."""

MAX_BYTES = 1 << 30
"""Most bytes of a file, unpacked: a tokenizer takes many times as much memory."""

MAX_FETCHED = 1 << 25
"""Characters after which no more documents of a data set of the hub are fetched."""

NEEDED = 'an object such as {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


def read_text(source: str | Path, tokenizer: Any = None) -> str:
    """Return all documents of a source as one text: see :func:`read_documents` and :func:`as_text`."""
    return as_text(read_documents(source), tokenizer)


def read_documents(source: str | Path) -> list[Document]:
    """Read the documents of a file, a folder or a data set.

    Args:
        source: UTF-8 text; or ``.jsonl`` with one object a line, whose ``text`` is a document or whose ``messages`` are
            a chat; or ``.json`` with a list of such objects; or ``.parquet`` with a column ``text`` or ``messages``.
            Each but the last may be compressed (``.gz``). Or a folder of such files; or one that ``datasets`` wrote
            with ``save_to_disk`` (split ``train`` if it has splits). Or, as text and where no such file is,
            ``NAMESPACE/NAME`` or ``NAMESPACE/NAME:CONFIG`` of a data set of the hub (split ``train``).

    Raises:
        InputError: It cannot be read, is not text, or is empty.
        UnsupportedError: The library that reads it is not installed.
    """
    path = usable_path(source, "text")
    documents = list(_documents(path, source))
    if not any(document if isinstance(document, list) else document.strip() for document in documents):
        raise InputError(f"{path} holds no text")
    return documents


def _documents(path: Path, source: str | Path) -> Iterator[Document]:
    named = None if os.path.lexists(path) or not isinstance(source, str) else NAMED.fullmatch(source)
    if named is not None and _kind(path) not in KINDS:
        yield from _fetched(named["name"], named["config"])
    elif not path.is_dir():
        yield from _of_file(path)
    else:
        files = _files(path)
        for file in files:
            yield from _of_file(file)
        if not files:
            yield from _data_set(path)


def as_text(documents: Iterable[Document], tokenizer: Any = None) -> str:
    """Return documents as one text, with an empty line between them; chats by the tokenizer's chat template.

    Raises:
        InputError: There are chats, and no chat template.
        CheckpointError: The chat template fails.
    """
    documents = list(documents)
    chats = iter(templated([one for one in documents if isinstance(one, list)], tokenizer))
    return "\n\n".join(one if isinstance(one, str) else next(chats) for one in documents)


def _kind(path: Path) -> str:
    """Return the ending that says how a file is read, without ``.gz``."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder to read, by name; none of one that ``datasets`` wrote."""
    try:
        inside = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    except OSError as error:
        raise InputError(f"cannot read {folder}", got=error.strerror) from error
    if any(one.name in DATA_SET for one in inside):
        return []
    return [one for one in inside if _kind(one) in KINDS and not one.is_dir()]


def _of_file(path: Path) -> Iterable[Document]:
    kind = _kind(path)
    if kind == ".parquet":
        return _parquet(path)
    text = _file_text(path)
    if kind == ".jsonl":
        return _lines(path, text)
    return _list(path, text) if kind == ".json" else [text]


def _file_text(path: Path) -> str:
    try:
        content = _unpacked(path) if path.suffix.lower() == ".gz" else read_regular(path, MAX_BYTES)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text", got=first_line(error), needed="UTF-8") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is damaged", got=first_line(error), needed="a file that gzip wrote") from error
    except OSError as error:
        raise InputError(f"cannot read {path}", got=error.strerror) from error
    if "\0" in text:
        raise InputError(f"{path} is not text", got="NUL characters", needed="UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _unpacked(path: Path) -> bytes:
    require_regular(path, MAX_BYTES)
    with gzip.open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InputError(f"{path} is too large", needed=f"at most {readable_size(MAX_BYTES)} when it is unpacked")
    return content


def _lines(path: Path, text: str) -> Iterator[Document]:
    # Not splitlines(), which also splits at U+2028 and others that a JSON string may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _document(where, parse_json(line, where, non_finite=True))


def _list(path: Path, text: str) -> list[Document]:
    documents = parse_json(text, str(path), non_finite=True)
    if not isinstance(documents, list):
        raise InputError(f"{path}", got=type(documents).__name__, needed="a list of objects with a text")
    return [_document(f"{path}, entry {number}", document) for number, document in enumerate(documents, start=1)]


def _parquet(path: Path) -> Iterator[Document]:
    if path.suffix.lower() == ".gz":
        raise InputError(f"{path} is compressed twice", needed="a .parquet file", remedy="unpack it with gunzip")
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(
            f"{path} is parquet, and pyarrow is not installed", remedy="pip install pyarrow, or use a .jsonl file"
        ) from error
    try:
        require_regular(path)
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [name for name in ("text", "messages") if name in names][:1]
        if not columns:
            raise InputError(
                f"{path} has no texts",
                got=f"the columns {', '.join(names[:5])}",
                needed="a column text or messages",
            )
        for number, row in enumerate(file.read(columns).to_pylist(), start=1):
            yield _document(f"{path}, row {number}", row)
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"cannot read {path}", got=error.strerror) from error
    except Exception as error:  # a damaged file can raise anything in a library
        raise InputError(f"{path} is damaged", got=first_line(error), needed="a parquet file") from error


def _data_set(folder: Path) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise UnsupportedError(
            f"{folder} is a folder without text files, and datasets is not installed",
            needed=f"files that end in {', '.join(KINDS)}",
            remedy="pip install datasets for a data set on disk, or use a text file",
        ) from error
    try:
        loaded: Any = datasets.load_from_disk(str(folder))
        loaded = loaded["train"] if isinstance(loaded, dict) else loaded
        column = "text" if "text" in loaded.column_names else "messages"
        for number, row in enumerate(loaded.select_columns([column])):
            yield _document(f"{folder}, row {number}", row)
    except InputError:
        raise
    except Exception as error:  # a damaged folder can raise anything in a library
        raise InputError(
            f"{folder} is no data set with texts",
            got=first_line(error),
            needed="a folder that datasets' save_to_disk wrote, with a column text or messages; or text files",
        ) from error


def _fetched(name: str, config: str | None) -> Iterator[Document]:
    """Yield the first documents of a data set of the hub, as many as :data:`MAX_FETCHED` allows."""
    try:
        import datasets
    except ImportError as error:
        raise UnsupportedError(
            f"there is no file {name}, and datasets, which fetches data sets of the hub, is not installed",
            remedy="correct the path, or pip install datasets",
        ) from error
    length = 0
    try:
        with other_library(), digests_checked():
            rows = iter(datasets.load_dataset(name, config, split="train", streaming=True))
            for number, row in enumerate(rows):
                yield (document := _document(f"{name}, row {number}", row))
                length += len(document) if isinstance(document, str) else sum(len(one["content"]) for one in document)
                if length >= MAX_FETCHED:
                    return
    except InputError:
        raise
    except Exception as error:  # of the network or the library
        raise InputError(
            f"there is no file {name}, and a data set of that name cannot be fetched",
            got=first_line(error),
            remedy="correct the name; NAMESPACE/NAME:CONFIG names one of several configurations",
        ) from error


def _document(where: str, document: Any) -> Document:
    """Return what an object holds: its text, or its messages."""
    if isinstance(document, dict):
        text, messages = document.get("text"), document.get("messages")
        if isinstance(text, str):
            return text
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return [{"role": one["role"], "content": one["content"]} for one in messages]
    raise InputError(where, got=f"{document!r:.80}", needed=NEEDED)


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
