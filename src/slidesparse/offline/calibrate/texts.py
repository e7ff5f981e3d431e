"""Read texts for calibration and perplexity: files of several kinds, folders of them, and data sets of the hub.

A document is a text, or a chat: a list of messages for the model's own chat template.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from slidesparse.base.other_libraries import need, other_library
from slidesparse.base.paths import usable_path
from slidesparse.base.typed_json import parse_json
from slidesparse.base.whole_file import read_whole
from slidesparse.errors import InputError, first_line
from slidesparse.offline.calibrate.chats import Chat, PlacedChat, templated

Document: TypeAlias = "str | Chat"

DEFAULT = "default"
"""The name of :mod:`slidesparse.offline.calibrate.standard_library`, where there is no file of that name."""

LINES = (".jsonl", ".ndjson")
KINDS = (".txt", ".md", ".text", *LINES, ".json", ".parquet")
"""Endings of readable files in a folder."""

OTHERS = (".csv", ".tsv", ".arrow", ".xlsx", ".gz")
"""Endings of tables, in which not every column is a text, and of compressed files."""

NAMED = re.compile(r"(?P<name>[\w.-]+/[\w.-]+?)(:(?P<config>[\w.-]+))?", re.ASCII)
"""A data set of the hub: ``NAMESPACE/NAME``, or ``NAMESPACE/NAME:CONFIG``."""

MAX_BYTES = 1 << 30
"""Most bytes of a file: a tokenizer takes many times as much memory."""

MAX_FETCHED = 1 << 25
"""Characters to fetch of a data set of the hub."""

NEEDED = 'an object such as {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


def read_documents(source: str | Path) -> list[Document]:
    """Read the documents of a file, a folder or a data set.

    Args:
        source: UTF-8 text; or ``.jsonl`` with one object a line, whose ``text`` is a document or whose ``messages`` are
            a chat; or ``.json`` with a list of such objects; or ``.parquet`` with a column ``text`` or ``messages``.
            Or a folder of such files. Or, as text and where no such file is, ``NAMESPACE/NAME`` or
            ``NAMESPACE/NAME:CONFIG`` of a data set of the hub (split ``train``).

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
    if named is not None and path.suffix.lower() not in (*KINDS, *OTHERS):
        yield from _fetched(named["name"], named["config"])
    elif not path.is_dir():
        yield from _of_file(path)
    else:
        for file in _files(path):
            yield from _of_file(file)


def as_text(documents: Iterable[Document], tokenizer: Any = None) -> str:
    """Return documents as one text, with an empty line between them; chats by the tokenizer's chat template."""
    documents = list(documents)
    chats = iter(templated([one for one in documents if isinstance(one, list)], tokenizer))
    return "\n\n".join(one if isinstance(one, str) else next(chats) for one in documents)


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder to read, by name."""
    try:
        inside = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    except OSError as error:
        raise InputError(f"cannot read {folder}", got=error.strerror) from error
    return [one for one in inside if one.suffix.lower() in KINDS and not one.is_dir()]


def _of_file(path: Path) -> Iterable[Document]:
    kind = path.suffix.lower()
    if not path.exists():
        remedy = "correct the path; a data set of the hub is NAMESPACE/NAME"
        raise InputError(f"cannot read {path}", got="No such file or directory", remedy=remedy)
    if kind in OTHERS:
        remedy = 'unpack it, or write its texts as a .jsonl file, a {"text": "..."} a line'
        raise InputError(f"{path} is no text", got=kind, needed=f"text, or {', '.join(KINDS)}", remedy=remedy)
    if kind == ".parquet":
        return _parquet(path)
    text = _file_text(path)
    if kind in LINES:
        return _lines(path, text)
    return _list(path, text) if kind == ".json" else [text]


def _file_text(path: Path) -> str:
    try:
        content = read_whole(path, MAX_BYTES)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"{first_line(error)}, line {content.count(10, 0, error.start) + 1}"
        raise InputError(f"{path} is not text", got=got, needed="UTF-8") from error
    except OSError as error:
        raise InputError(f"cannot read {path}", got=error.strerror) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InputError(f"{path} is not text", got=f"NUL characters, line {line}", needed="UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


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


@contextmanager
def _explained(failed: str, *, needed: str | None = None, remedy: str | None = None) -> Iterator[None]:
    """Turn any error of a library into one line: a damaged file, or the network, can raise anything."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(failed, got=first_line(error), needed=needed, remedy=remedy) from error


def _parquet(path: Path) -> Iterator[Document]:
    what, remedy = f"{path} is parquet, and pyarrow is not installed", "pip install pyarrow, or use a .jsonl file"
    parquet = need("pyarrow.parquet", remedy, what=what)
    with _explained(f"{path} is damaged", needed="a parquet file"):
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [name for name in ("text", "messages") if name in names][:1]
        if not columns:
            got = f"the columns {', '.join(names[:5])}"
            raise InputError(f"{path} has no texts", got=got, needed="a column text or messages")
        for number, row in enumerate(file.read(columns).to_pylist(), start=1):
            yield _document(f"{path}, row {number}", row)


def _fetched(name: str, config: str | None) -> Iterator[Document]:
    """Yield the first documents of a data set of the hub, within :data:`MAX_FETCHED`."""
    what = f"there is no file {name}, and datasets, which fetches data sets of the hub, is not installed"
    datasets = need("datasets", "correct the path, or pip install datasets", what=what)
    failed = f"there is no file {name}, and a data set of that name cannot be fetched"
    remedy = "correct the name; NAMESPACE/NAME:CONFIG names one of several configurations"
    length = 0
    with _explained(failed, remedy=remedy), other_library():
        rows = iter(datasets.load_dataset(name, config, split="train", streaming=True))
        for number, row in enumerate(rows):
            yield (document := _document(f"{name}, row {number}", row))
            length += len(document) if isinstance(document, str) else sum(len(one["content"]) for one in document)
            if length >= MAX_FETCHED:
                return


def _document(where: str, document: Any) -> Document:
    if isinstance(document, dict):
        text, messages = document.get("text"), document.get("messages")
        if isinstance(text, str):
            return text
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            chat = PlacedChat({"role": one["role"], "content": one["content"]} for one in messages)
            chat.where = where
            return chat
    raise InputError(where, got=f"{document!r:.80}", needed=NEEDED)


def _is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
