"""Chats that a model writes itself: text that is like its use, for calibration and for training a pruned form of it.

Each process of a run writes its share. Answers are kept batch by batch, and an interrupted run goes on from them.
Chats that a command needs itself are kept too, under a name that says what decides them.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slidesparse.base.cache_folder import cache_folder
from slidesparse.base.counted import counted
from slidesparse.base.log import LOG
from slidesparse.base.other_libraries import LOCAL
from slidesparse.base.ranks import ALONE, Ranks
from slidesparse.base.version import __version__
from slidesparse.base.whole_file import replace_file
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.identity import fingerprint
from slidesparse.errors import InputError
from slidesparse.files.shared_staging import staged_together
from slidesparse.offline.calibrate.calibration import ids_of, load_tokenizer, positions
from slidesparse.offline.calibrate.chats import templated
from slidesparse.offline.calibrate.texts import Document, read_documents
from slidesparse.offline.option_names import as_written
from slidesparse.recovery.answers import SAMPLING, Job, Writer, kept_answers, write_answers
from slidesparse.recovery.tasks import make_tasks


@dataclass(frozen=True)
class ChatOptions:
    """What decides the chats.

    Attributes:
        number: How many.
        prompts: A file of prompts: a line each of ``.txt``, a document each of other kinds, of a chat all up to the
            last message of the user; None: tasks of :func:`slidesparse.recovery.tasks.make_tasks`.
        longest: Most tokens of an answer.
        seed: Of the choice of tasks, and of what is drawn.
        writer: What runs the model: see :data:`slidesparse.recovery.answers.Writer`.
    """

    number: int
    prompts: str | None = None
    longest: int = 400
    seed: int = 0
    writer: Writer = "auto"

    def __post_init__(self) -> None:
        for what, value in (("number of chats (--number, --self)", self.number), ("--longest", self.longest)):
            if value < 1:
                raise InputError(what, got=value, needed="1 or more")


def kept_chats(model: Path, options: ChatOptions, device: str, ranks: Ranks = ALONE) -> Path:
    """Return a file of chats that a model wrote, out of the user's cache folder; it is written if it is not there."""
    prompts = None if options.prompts is None else read_documents(options.prompts)
    said = json.dumps([__version__, asdict(options), SAMPLING, prompts])
    checkpoint = Checkpoint(model)
    key = hashlib.sha256(f"{fingerprint(checkpoint, checkpoint.config)} {said}".encode()).hexdigest()[:16]
    folder, name = cache_folder() / "chats", f"{model.name}-{options.number}-{key}"
    # As many processes as began a run must end it, but any number may read what it wrote.
    path = next(iter(sorted(folder.glob(f"{glob.escape(name)}*.jsonl"))), folder / f"{name}-by-{ranks.world}.jsonl")
    if not all(ranks.gather(path.exists())):
        folder.mkdir(mode=0o700, exist_ok=True)
        write_chats(model, path, options, device, ranks)
    LOG.info("chats that %s wrote: %s", model, path)
    return path


def write_chats(model: Path, path: Path, options: ChatOptions, device: str, ranks: Ranks = ALONE) -> int:
    """Let a model write chats into a file, ``.jsonl``; return how many there are.

    A model without a chat template goes on with the prompts, as texts. What is answered is kept in ``NAME.partial``, as
    :mod:`slidesparse.files.staging` says.

    Raises:
        InputError: There are no prompts, or the file exists.
        CheckpointError: The model or its tokenizer cannot be loaded; or an unfinished run of other options is there.
        UnsupportedError: There is no such device.
    """
    if ranks.is_first and path.exists():
        raise InputError(f"{path} exists", remedy="remove it or choose another name")
    tokenizer, checkpoint = load_tokenizer(model), Checkpoint(model)
    room, asked = _room_for_prompts(model, options.longest), _prompts(options)
    template = getattr(tokenizer, "chat_template", None)
    decides = asdict(replace(options, prompts=None, writer="auto"))  # prompts do by what they say, a writer does not
    record = {
        **{"slidesparse": __version__, "options": decides, "sampling": SAMPLING, "processes": ranks.world},
        "prompts": hashlib.sha256(json.dumps([asked, template]).encode()).hexdigest(),
        "weights": fingerprint(checkpoint, checkpoint.config),
    }
    # Nothing but the config is in the way, so that chats may lie beside the weights.
    with staged_together(ranks, path, model / "config.json", record, 0, as_written) as work:
        kept = [str(work.kept / f"answers-{rank}") for rank in range(ranks.world)]
        work.describe = lambda: counted(sum(len(kept_answers(one)) for one in kept), "answer")
        share = asked[ranks.rank :: ranks.world]
        ids = _ids(tokenizer, share, template is not None)
        if cut := sum(len(one) > room for one in ids):
            LOG.warning("of %d prompts only the last %d tokens are read: the model has no room for more", cut, room)
        job = Job(
            model, tuple(one[-room:] for one in ids), options.longest, options.seed + ranks.rank, kept[ranks.rank]
        )  # fmt: skip
        answers = write_answers(job, tokenizer, options.writer, device, ranks)
        pairs = zip(share, answers, strict=True)
        lines = [_line(one, answer, template is not None) for one, answer in pairs if answer.strip()]
        parts = [work.kept / f"chats-{rank}.jsonl" for rank in range(ranks.world)]
        replace_file(parts[ranks.rank], "".join(lines))
        ranks.wait()
        if ranks.is_first:
            whole = work.kept / "chats.jsonl"
            replace_file(whole, "".join(one.read_text(encoding="utf-8") for one in parts))
            work.output = whole  # a file, where others make a folder
    return int(sum(ranks.gather(len(lines))))


def _room_for_prompts(model: Path, longest: int) -> int:
    """Return how many tokens of a prompt a model reads before so long an answer; an InputError where there are none."""
    from transformers import AutoConfig

    most = positions(AutoConfig.from_pretrained(str(model), **LOCAL), 1 << 20)
    if longest >= most:
        raise InputError("--longest", got=longest, needed=f"less than the {most} tokens that {model} reads")
    return most - longest


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
