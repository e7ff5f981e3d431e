"""Chats that a model writes itself: text like its use, for calibration and for training its pruned form."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat, takewhile
from pathlib import Path
from typing import Any, BinaryIO

from slidesparse.base.device import usable_device
from slidesparse.base.log import LOG
from slidesparse.base.progress import progress_bar
from slidesparse.base.typed_json import parse_json
from slidesparse.base.version import __version__
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.identity import fingerprint
from slidesparse.checkpoints.meta_model import model_class
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.offline.calibrate.calibration import MAX_SEED, ids_of, load_tokenizer, positions
from slidesparse.offline.calibrate.chats import Chat, templated, vocabulary_digest
from slidesparse.offline.calibrate.texts import Document, document, read_documents
from slidesparse.recovery.prompts import make_prompts
from slidesparse.recovery.writers import SAMPLING, VllmWriter, WriterName, end_tokens, writer_class

MOST_CHATS, MOST_TOKENS, MOST_MINUTES, LEAST = 10**8, 1 << 20, 1e6, 32
FIRST = 2048  # most answers of a batch before the time of one is known


@dataclass(frozen=True)
class ChatOptions:
    """Options of the chats that a model writes.

    Attributes:
        count: Number of chats.
        prompts: File of lines or documents; of a chat all messages up to the user's last. None: ``make_prompts``.
        max_tokens: Most tokens of an answer.
        seed: Seed of generated prompts, and of sampling.
        writer: Library that runs the model.
    """

    count: int
    prompts: str | None = None
    max_tokens: int = 400
    seed: int = 0
    writer: WriterName = "auto"

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("--count", self.count, 1, MOST_CHATS),
            ("--max-tokens", self.max_tokens, 1, MOST_TOKENS),
            ("--seed", self.seed, 0, MAX_SEED - MOST_CHATS),
        ):
            if not least <= value <= most:
                raise InputError(name, got=value, needed=f"{least} to {most}")


def write_chats(model: Path, path: Path, options: ChatOptions, device: str, minutes: float | None = None) -> int:
    """Let a model write chats into a new file, an object a line, and return their number.

    ``messages`` are the chat in words, ``tokens`` the numbers that the model read and wrote, and ``seal`` a digest of
    both (:class:`slidesparse.offline.calibrate.chats.Chat`). Answers are kept batch by batch in ``NAME.KEY.part``, from
    which the same options resume. Where the next batch would exceed ``minutes`` there are fewer chats, but a first
    batch and 32 at least.

    Raises:
        InputError: The file exists or is being written; there are no prompts, or no chat template; or the model has too
            few positions.
    """
    if path.exists():
        raise InputError(f"{path} exists", remedy="remove it or choose another name")
    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        raise InputError("--minutes", got=minutes, needed=f"a number above 0, at most {MOST_MINUTES:g}")
    usable_device(device)
    opened = time.monotonic()
    tokenizer, asked, longest = load_tokenizer(model), prompts_of(options), options.max_tokens
    ids, kind = _ids(model, tokenizer, asked, longest), writer_class(options.writer, device)
    writer = kind(model, max(map(len, ids)) + longest, device, end_tokens(Checkpoint(model), tokenizer))
    vocabulary = vocabulary_digest(tokenizer)
    part = path.with_name(f"{path.name}.{_key(model, tokenizer, options)}.part")
    if part.is_symlink():
        part.unlink()  # not followed
    with open(part, "a+b") as file:
        done = first = _answers_in(file, part, ids, vocabulary)
        again = f"; {first} are there from an interrupted run" if first else ""
        wanted = f"{len(ids)}" if minutes is None else f"up to {len(ids)}"
        LOG.warning("%s answers of at most %d tokens, by %s on %s%s", wanted, longest, kind.name, device, again)
        total, unit = (len(ids), "answers") if minutes is None else (math.ceil(60 * minutes), "seconds")
        with progress_bar("answers", total, unit=unit) as advance:
            advance(first if minutes is None else 0)
            size = writer.at_once if minutes is None else min(writer.at_once, FIRST)
            while done < len(ids):
                began, some = time.monotonic(), slice(done, done + size)
                answers = writer.answer(ids[some], longest, options.seed + done)
                texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
                tokens = [[*read, *answer] for read, answer in zip(ids[some], answers, strict=True)]
                file.write(b"".join(map(_line, asked[some], texts, tokens, repeat(vocabulary))))
                file.flush()
                seconds = time.monotonic() - began
                each, done = seconds / len(answers), done + len(answers)
                advance(len(answers) if minutes is None else round(seconds), f"{done} answers" if minutes else "")
                left = len(ids) - done
                fitting = left if minutes is None else int((opened + 60 * minutes - time.monotonic()) / each)
                if done >= LEAST and fitting < min(len(answers), left):
                    break
                size = min(writer.at_once, max(fitting, LEAST - done))
                if minutes is None and left and done == first + len(answers):
                    LOG.warning("about %.1f minutes for the other %d answers", each / 60 * left, left)
            part.replace(path)
            return done


def _line(asked: Chat, text: str, tokens: list[int], vocabulary: str) -> bytes:
    """Return the line of an answered chat."""
    chat = Chat([*asked, {"role": "assistant", "content": text}], asked.tools, tokens=tokens)
    chat.seal = chat.sealed_by(vocabulary)
    return chat_line(chat)


def chat_line(chat: Chat) -> bytes:
    """Return the line of a chat in a file of chats."""
    tools = {} if chat.tools is None else {"tools": chat.tools}
    line = {"messages": [*chat], **tools, "tokens": chat.tokens, "seal": chat.seal}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _answers_in(file: BinaryIO, part: Path, asked: list[list[int]], vocabulary: str) -> int:
    """Lock a file, cut off what is no whole answer, as a kill leaves it, and return the number of answers."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"{part} is being written by another command") from error
    if not part.exists() or not os.path.samestat(os.fstat(file.fileno()), part.stat()):
        raise InputError(f"{part} was finished by another command")
    lines = part.read_bytes().splitlines(keepends=True)
    pairs = zip(lines, asked, strict=False)
    whole = [line for line, _ in takewhile(lambda pair: _is_answer(pair[0], vocabulary, pair[1]), pairs)]
    file.truncate(sum(map(len, whole)))
    return len(whole)


def _is_answer(line: bytes, vocabulary: str, asked: Sequence[int]) -> bool:
    """Return whether a line is undamaged, of a model with this tokenizer, and answers the prompt of these tokens."""
    try:
        chat = document("chat", parse_json(line, "chat", non_finite=True))
    except InputError:
        return False
    if not isinstance(chat, Chat) or not chat.has_tokens_of(vocabulary):
        return False
    return line.endswith(b"\n") and chat.tokens[: len(asked)] == [*asked]


def write_chats_apart(model: Path, path: Path, options: ChatOptions, device: str, minutes: float | None = None) -> None:
    """Write chats like :func:`write_chats`, by vLLM in a child, which frees the GPU when it ends."""
    if writer_class(options.writer, device) is not VllmWriter:
        write_chats(model, path, options, device, minutes)
        return
    words = [sys.executable, "-m", "slidesparse", "chats", str(model.resolve()), str(path), f"--device={device}"]
    given = {**asdict(options), "minutes": minutes}.items()
    words += [f"--{name.replace('_', '-')}={value}" for name, value in given if value is not None]
    if subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode:
        raise UnsupportedError("vLLM wrote no chats", remedy="see above; or: slidesparse chats --writer transformers")


def _key(model: Path, tokenizer: Any, options: ChatOptions) -> str:
    """Return a digest of everything that decides the chats; vLLM and transformers resume from each other."""
    checkpoint, prompts = Checkpoint(model), options.prompts and read_documents(options.prompts)
    asked = [[one, getattr(one, "tools", None)] for one in prompts or ()]
    decides = [__version__, asdict(replace(options, prompts=None, writer="auto")), SAMPLING, asked]
    read = [vocabulary_digest(tokenizer), str(tokenizer.chat_template), end_tokens(checkpoint, tokenizer)]
    weights = fingerprint(checkpoint, checkpoint.config)
    return hashlib.sha256(json.dumps([weights, *read, *decides]).encode()).hexdigest()[:16]


def prompts_of(options: ChatOptions) -> list[Chat]:
    """Return a prompt for each chat, as all its messages; a file with too few is repeated."""
    if options.prompts is None:
        LOG.warning("prompts: sums, Python and everyday topics; your users' are better: --prompts FILE")
        documents: list[Document] = [*make_prompts(options.count, options.seed)]
    else:
        documents = read_documents(options.prompts)
        if len(documents) == 1 and isinstance(documents[0], str):
            documents = [*documents[0].split("\n")]  # not at what else Python takes for the end of a line
    chats = (Chat([{"role": "user", "content": one}]) if isinstance(one, str) else one for one in documents)
    ends = ((chat, max((i for i, one in enumerate(chat, 1) if one["role"] == "user"), default=0)) for chat in chats)
    asked = (Chat(chat[:end], chat.tools, chat.where) for chat, end in ends if end)
    usable = [chat for chat in asked if chat[-1].get("content", "").strip()]
    if not usable:
        raise InputError(f"{options.prompts} holds no prompts", needed="lines, or chats in which a user says something")
    return [usable[i % len(usable)] for i in range(options.count)]


def _ids(model: Path, tokenizer: Any, asked: list[Chat], max_tokens: int) -> list[list[int]]:
    """Return prompts as token numbers, cut to the last ones where a model has no room for more before the answer."""
    room = positions(model_class(Checkpoint(model))[1], 2 * MOST_TOKENS) - max_tokens
    if room < 1:
        raise InputError("--max-tokens", got=max_tokens, needed=f"less than {room + max_tokens}, which {model} reads")
    ids = ids_of(tokenizer, templated(asked, tokenizer, to_answer=True), add_special_tokens=False)
    for chat, one in zip(asked, ids, strict=True):
        if not one:
            where = f" on {chat.where}" if chat.where else ""
            raise InputError(f"the chat template writes nothing{where}", remedy=f"mend that of {model}")
    if cut := sum(len(one) > room for one in ids):
        LOG.warning("%d prompts are cut to their last %d tokens: the model has no room for more", cut, room)
    return [one[-room:] for one in ids]
