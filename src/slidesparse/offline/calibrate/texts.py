"""Read texts for calibration and perplexity: files of several kinds, folders of them, and data sets of the hub.

A document is a text, or a chat: a list of messages for the model's own chat template.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from slidesparse.base.log import LOG
from slidesparse.base.other_libraries import need, other_library
from slidesparse.base.paths import usable_path
from slidesparse.base.typed_json import parse_json
from slidesparse.base.whole_file import read_whole
from slidesparse.errors import InputError, first_line, library_errors
from slidesparse.offline.calibrate.chats import Chat, templated

Document: TypeAlias = "str | Chat"

DEFAULT = "default"
"""The name of :mod:`slidesparse.offline.calibrate.standard_library`, where there is no file of that name."""

LINES = (".jsonl", ".ndjson")
KINDS = (".txt", ".md", ".text", *LINES, ".json", ".parquet")
"""Endings of readable files in a folder."""

OTHERS = (".csv", ".tsv", ".arrow", ".xlsx", ".gz")
"""Endings of tables, in which not every column is a text, and of compressed files."""

ABOUT = ("readme", "license", "dataset_infos")
"""Names of files about the other ones of a folder, which are read only where they are alone."""

SPLITS = re.compile(r"(?:.*[^a-z])?(train|test|val|valid|validation|dev|eval)(?:[^a-z].*)?", re.IGNORECASE | re.DOTALL)
"""Places of the files of a split in a data set's folder, such as ``data/train-00000-of-00002.parquet``."""

COLUMNS = ("text", "messages", "tools", "tokens", "seal")
"""Keys of an object that are read, and columns of a table."""

NAMED = re.compile(r"(?P<name>[\w.-]+/[\w.-]+?)(:(?P<config>[\w.-]+))?", re.ASCII)
"""A data set of the hub: ``NAMESPACE/NAME``, or ``NAMESPACE/NAME:CONFIG``."""

MAX_BYTES, MAX_FETCHED = 1 << 30, 1 << 25
"""Most bytes of a file, since a tokenizer takes many times as much memory; characters to fetch of a data set."""

NEEDED = 'an object such as {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


def read_documents(source: str | Path) -> list[Document]:
    """Read the documents of a file, a folder or a data set.

    Args:
        source: UTF-8 text; or ``.jsonl`` with one object a line, whose ``text`` is a document or whose ``messages`` are
            a chat, with ``tools`` if it had any; or ``.json`` with a list of such objects; or ``.parquet`` with such
            columns. Or a folder of such files, at any depth: without a README beside others, and of several splits
            ``train`` alone. Or, as text and where no such file is, ``NAMESPACE/NAME`` or ``NAMESPACE/NAME:CONFIG`` of
            a data set of the hub (split ``train``).

    Raises:
        InputError: It cannot be read, is not text, or is empty.
        UnsupportedError: The library that reads it is not installed.
    """
    path = usable_path(source, "text")
    documents = list(_documents(path, source))
    if not any(one if isinstance(one, list) else one.strip() for one in documents):
        raise InputError(f"{path} holds no text")
    return documents


def _documents(path: Path, source: str | Path) -> Iterator[Document]:
    named = None if os.path.lexists(path) or not isinstance(source, str) else NAMED.fullmatch(source)
    if named is not None and path.suffix.lower() not in (*KINDS, *OTHERS):
        yield from _fetched(named["name"], named["config"])
    elif not path.is_dir():
        yield from _of_file(path)
    else:
        files = _files(path)
        if files:
            first, *more = (str(one.relative_to(path)) for one in files)
            LOG.warning("%s: read are %s%s", path, first, f" to {more[-1]}, {len(files)} files" if more else "")
        for file in files:
            yield from _of_file(file)


def as_text(documents: Iterable[Document], tokenizer: Any = None) -> str:
    """Return documents as one text, with an empty line between them; chats by the tokenizer's chat template."""
    documents = list(documents)
    chats = iter(templated([one for one in documents if isinstance(one, list)], tokenizer))
    return "\n\n".join(one if isinstance(one, str) else next(chats) for one in documents)


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder to read, by name."""
    try:
        inside = sorted(folder.rglob("*"))
        if not inside:
            os.listdir(folder)  # raises where there is no permission
    except OSError as error:
        raise InputError(f"cannot read {folder}", got=error.strerror) from error
    places = {one: str(one.relative_to(folder)) for one in inside if one.suffix.lower() in KINDS and not one.is_dir()}
    shown = [one for one, place in places.items() if not re.search(r"(^|/)\.", place)]
    texts = [one for one in shown if one.name.partition(".")[0].lower() not in ABOUT]
    texts = texts or [one for one in shown if one.suffix.lower() != ".json"]
    splits = {one: found[1].lower() for one in texts if (found := SPLITS.fullmatch(places[one]))}
    return [one for one in texts if splits.get(one) in ("train", None)] if "train" in splits.values() else texts


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
            yield document(where, parse_json(line, where, non_finite=True))


def _list(path: Path, text: str) -> list[Document]:
    documents = parse_json(text, str(path), non_finite=True)
    if not isinstance(documents, list):
        raise InputError(f"{path}", got=type(documents).__name__, needed="a list of objects with a text")
    return [document(f"{path}, entry {number}", one) for number, one in enumerate(documents, start=1)]


def _parquet(path: Path) -> Iterator[Document]:
    what, remedy = f"{path} is parquet, and pyarrow is not installed", "pip install pyarrow, or use a .jsonl file"
    parquet = need("pyarrow.parquet", remedy, what=what)
    with library_errors(InputError, f"{path} is damaged", needed="a parquet file"):
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [name for name in COLUMNS if name in names]
        if not {"text", "messages"} & {*columns}:
            got = f"the columns {', '.join(names[:5])}"
            raise InputError(f"{path} has no texts", got=got, needed="a column text or messages")
        for number, row in enumerate(file.read(columns).to_pylist(), start=1):
            yield document(f"{path}, row {number}", row)


def _fetched(name: str, config: str | None) -> Iterator[Document]:
    """Yield the first documents of a data set of the hub, within :data:`MAX_FETCHED`."""
    what = f"there is no file {name}, and datasets, which fetches data sets of the hub, is not installed"
    datasets = need("datasets", "correct the path, or pip install datasets", what=what)
    failed = f"there is no file {name}, and a data set of that name cannot be fetched"
    remedy = "correct the name; NAMESPACE/NAME:CONFIG names one of several configurations"
    length = 0
    with library_errors(InputError, failed, remedy=remedy), other_library():
        rows = iter(datasets.load_dataset(name, config, split="train", streaming=True))
        for number, row in enumerate(rows):
            yield (one := document(f"{name}, row {number}", row))
            length += len(one if isinstance(one, str) else json.dumps(one))
            if length >= MAX_FETCHED:
                return


def document(where: str, row: Any) -> Document:
    """Return the document of an object of a file, or of a row of a table: its ``text``, else its ``messages``.

    Raises:
        InputError: It has neither; ``where`` names its file and line.
    """
    fields = row if isinstance(row, dict) else {}
    text, messages, tools = (fields.get(name) for name in ("text", "messages", "tools"))
    if isinstance(text, str):
        return text
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise InputError(where, got=_wrong_part(row), needed=NEEDED)
    if isinstance(tools, str):  # as tables hold them, whose columns have one type
        tools = parse_json(tools, f"tools of {where}")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
        raise InputError(f"tools of {where}", got=f"{tools!r:.80}", needed="a list of objects")
    tokens, seal = fields.get("tokens"), fields.get("seal")
    if not isinstance(tokens, list) or not all(type(one) is int and 0 <= one < 1 << 31 for one in tokens):
        tokens = []
    return Chat(map(_message, messages), tools, where, tokens, str(seal))


def _wrong_part(document: Any) -> str:
    """Show the wrong part of a document, which may be long: its first invalid message, or its keys."""
    fields = document if isinstance(document, dict) else {}
    for number, one in enumerate(fields["messages"] if isinstance(fields.get("messages"), list) else (), start=1):
        if not _is_message(one):
            parts = [one.get("role"), one.get("content")] if isinstance(one, dict) else [one]
            wrong = next(part for part in parts if not isinstance(part, str) or part is one)
            return f"{wrong!r:.80} in message {number}"
    return f"{ ({key: fields[key] for key in ('text', 'messages') if key in fields} or [*fields] or document)!r:.80}"


def _is_message(one: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(one.get("role"), str):
        return False
    content = one.get("content")
    return isinstance(content, str) or _is_parts(content) or (content is None and bool(one.get("tool_calls")))


def _is_parts(content: Any) -> bool:
    """Return whether a content is a list of texts, as OpenAI's interface takes it."""
    is_list = isinstance(content, list) and bool(content)
    return is_list and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content)


def _message(one: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it: without nulls, which tables hold, with one text and parsed arguments."""
    made = {key: value for key, value in one.items() if value is not None}
    if _is_parts(made.get("content")):
        made["content"] = "\n".join(part["text"] for part in made["content"])
    if isinstance(made.get("tool_calls"), list):
        made["tool_calls"] = [*map(_call, made["tool_calls"])]
    return made


def _call(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object: OpenAI's interface writes them as JSON in a string."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    if isinstance(call, dict) and isinstance(call.get("arguments"), str):
        with suppress(InputError):  # a template may want other strings
            if isinstance(parsed := parse_json(call["arguments"], "arguments"), dict):
                return {**call, "arguments": parsed}
    return call
