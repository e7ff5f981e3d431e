"""Chats that a model writes itself: text that is like its use, for calibration and for training a pruned form of it.

Each process of a run writes its share. What is written is kept, under a name that says what decides it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slidesparse import __version__
from slidesparse.base.cache_folder import cache_folder
from slidesparse.base.log import LOG
from slidesparse.base.ranks import ALONE, Ranks
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.identity import fingerprint
from slidesparse.files.write_errors import write_errors
from slidesparse.offline.calibrate.calibration import ids_of, load_tokenizer
from slidesparse.offline.calibrate.chats import templated
from slidesparse.offline.calibrate.texts import Document, read_documents
from slidesparse.recover.answers import Job, Sampling, Writer, write_answers
from slidesparse.recover.tasks import make_tasks


@dataclass(frozen=True)
class ChatOptions:
    """What decides the chats.

    Attributes:
        number: How many.
        prompts: A file of prompts: a line each of ``.txt``, a document each of other kinds, of a chat all up to the
            last message of the user; None: tasks of :func:`slidesparse.recover.tasks.make_tasks`.
        longest: Most tokens of an answer.
        seed: Of the choice of tasks, and of what is drawn.
        writer: What runs the model: see :data:`slidesparse.recover.answers.Writer`.
    """

    number: int
    prompts: str | None = None
    longest: int = 400
    seed: int = 0
    writer: Writer = "auto"

    def __post_init__(self) -> None:
        for name in ("number", "longest"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} of chats", got=getattr(self, name), needed="1 or more")


def kept_chats(model: Path, options: ChatOptions, device: str, ranks: Ranks = ALONE) -> Path:
    """Return a file of chats that a model wrote, out of the user's cache folder; it is written if it is not there."""
    prompts = None if options.prompts is None else read_documents(options.prompts)
    said = json.dumps([__version__, asdict(options), asdict(Sampling()), prompts])
    checkpoint = Checkpoint(model)
    key = hashlib.sha256(f"{fingerprint(checkpoint, checkpoint.config)} {said}".encode()).hexdigest()[:16]
    path = cache_folder() / "chats" / f"{model.name}-{options.number}-{key}.jsonl"
    there = ranks.gather(path.exists())
    if not all(there):
        path.parent.mkdir(exist_ok=True)
        write_chats(model, path, options, device, ranks)
    LOG.info("chats that %s wrote: %s", model, path)
    return path


def write_chats(model: Path, path: Path, options: ChatOptions, device: str, ranks: Ranks = ALONE) -> int:
    """Let a model write chats into a file, ``.jsonl``; return how many there are.

    A model without a chat template goes on with the prompts, as texts.

    Raises:
        InputError: There are no prompts, or the file exists.
        CheckpointError: The model or its tokenizer cannot be loaded.
    """
    if ranks.is_first and path.exists():
        raise InputError(f"{path} exists", remedy="remove it or choose another name")
    tokenizer = load_tokenizer(model)
    asked = _prompts(options)
    share = asked[ranks.rank :: ranks.world]
    is_chat = getattr(tokenizer, "chat_template", None) is not None
    with write_errors(path, "free some space and run again"):
        part = path.with_name(f"{path.name}.part{ranks.rank}.tmp")
        part.unlink(missing_ok=True)
        ids = _ids(tokenizer, share, is_chat)
        job = Job(model, tuple(ids), options.longest, options.seed + ranks.rank)
        answers = write_answers(job, tokenizer, options.writer, device, ranks)
        lines = [_line(one, answer, is_chat) for one, answer in zip(share, answers, strict=True) if answer.strip()]
        replace_file(part, "".join(lines))
        ranks.wait()
        if ranks.is_first:
            parts = [path.with_name(f"{path.name}.part{rank}.tmp") for rank in range(ranks.world)]
            if missing := [one for one in parts if not one.exists()]:
                raise CheckpointError(f"{missing[0]} is not there", needed="a folder that all machines share")
            replace_file(path, "".join(one.read_text(encoding="utf-8") for one in parts))
            for one in parts:
                one.unlink()
    return int(sum(ranks.gather(len(lines))))


def _prompts(options: ChatOptions) -> list[Document]:
    """Return what is asked, as many as there shall be chats; the prompts of a file again where they are too few."""
    if options.prompts is None:
        tasks: list[Document] = list(make_tasks(options.number, options.seed))
        return tasks
    found = read_documents(options.prompts)
    if len(found) == 1 and isinstance(found[0], str):
        found = [line for line in found[0].splitlines() if line.strip()]
    usable = [asked for one in found if (asked := _asked(one))]
    if not usable:
        raise InputError(f"{options.prompts} holds no prompts", needed="lines, or chats in which a user says something")
    return (usable * math.ceil(options.number / len(usable)))[: options.number]


def _asked(document: Document) -> Document | None:
    """Return a text, or a chat up to the last message of its user."""
    if isinstance(document, str):
        return document if document.strip() else None
    last = max((i for i, one in enumerate(document) if one.get("role") == "user"), default=-1)
    return document[: last + 1] or None


def _messages(asked: Document) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else asked


def _ids(tokenizer: Any, asked: list[Document], is_chat: bool) -> list[list[int]]:
    if not is_chat:
        return [ids_of(tokenizer, _text(one)) for one in asked]
    texts = templated([_messages(one) for one in asked], tokenizer, to_answer=True)
    return [ids_of(tokenizer, text, add_special_tokens=False) for text in texts]


def _text(asked: Document) -> str:
    return asked if isinstance(asked, str) else "\n\n".join(one["content"] for one in asked)


def _line(asked: Document, answer: str, is_chat: bool) -> str:
    chat = [*_messages(asked), {"role": "assistant", "content": answer}]
    return json.dumps({"messages": chat} if is_chat else {"text": _text(asked) + answer}, ensure_ascii=False) + "\n"
