"""Make texts of chats with a checkpoint's own chat template.

The template is a program of whoever made the checkpoint. transformers keeps it from files and from other code, but not
from taking time and memory without end; so it runs in a child process, which has little of both. The date and what
Jinja draws at random are held there, so that a text is the same on another day.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import warnings
from collections.abc import Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias

from slidesparse.base.log import log_once
from slidesparse.base.other_libraries import other_library
from slidesparse.base.readable_size import readable_size
from slidesparse.errors import CheckpointError, InputError, first_line

Chat: TypeAlias = "list[dict[str, str]]"
"""Messages, each with a ``role`` and a ``content``."""


class PlacedChat(list[dict[str, str]]):
    """A chat that knows its file and line."""

    where = ""


SECONDS, SECONDS_OF_A_CHAT = 10.0, 0.01
"""Seconds that a template may take: the first, and the second again for each chat."""

GROWTH, FRAME = 16, 1 << 20
"""Limits of a chat's text: this multiple of its messages, and this number of characters of the template's own."""

FAILS = "the tokenizer's chat template fails"

MEMORY = 1 << 31
"""Bytes that a template may take."""

DATE = datetime(2024, 7, 26)
"""The date that templates see, which Llama 3's own takes where there is no clock."""

DATE_HELD = f"the chat template writes the date, which is held at {DATE:%Y-%m-%d}, so that texts stay the same"


def templated(chats: Sequence[Chat], tokenizer: Any, *, to_answer: bool = False) -> list[str]:
    """Return the texts of chats; ``to_answer``: up to where the model's answer begins.

    Raises:
        InputError: There is no chat template.
        CheckpointError: The chat template fails, or takes too long or too much memory, or makes too much text.
    """
    if not chats:
        return []
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            "the text holds chats, and the tokenizer has no chat template",
            needed="a model that was trained on chats",
            remedy='use lines with a "text" instead of "messages"',
        )
    if "strftime_now" in str(tokenizer.chat_template):
        log_once(DATE_HELD, logging.WARNING)
    seconds = SECONDS + len(chats) * SECONDS_OF_A_CHAT
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child does not need
        child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(chats, tokenizer, to_answer, seconds, writing)
    os.close(writing)
    texts: list[str] = []
    try:
        with os.fdopen(reading, encoding="utf-8") as lines:
            texts += (_checked(chat, json.loads(line)) for chat, line in zip(chats, lines, strict=False))
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if len(texts) < len(chats):
        late = status == -signal.SIGALRM
        raise CheckpointError(FAILS, got=f"more than {f'{seconds:g} s' if late else readable_size(MEMORY)}")
    return texts


def _answer(chats: Sequence[Chat], tokenizer: Any, to_answer: bool, seconds: float, writing: int) -> NoReturn:
    """Write the texts, one a line, and end this process: the child."""
    try:
        for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process, whatever it is in
        _limit_memory()
        _hold_date_and_chance()
        with os.fdopen(writing, "w", encoding="utf-8") as file:
            for chat in chats:
                file.write(json.dumps(_text(chat, tokenizer, to_answer)) + "\n")
    finally:
        os._exit(0)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _hold_date_and_chance() -> None:
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = SimpleNamespace(now=lambda: DATE)  # of strftime_now, which no argument replaces
    random.seed(0)  # of the filter random, and of lipsum


def _text(chat: Chat, tokenizer: Any, to_answer: bool) -> str | dict[str, str | int]:
    try:
        with other_library():
            text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=to_answer))
    except Exception as error:  # a template can raise anything
        return {"error": first_line(error)}
    if len(text) > _most(chat):
        return {"length": len(text)}
    return text


def _most(chat: Chat) -> int:
    return GROWTH * sum(len(one["content"]) for one in chat) + FRAME


def _checked(chat: Chat, answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    fails = f"{FAILS} on {where}" if (where := getattr(chat, "where", "")) else FAILS
    if "length" in answer:
        raise CheckpointError(fails, got=f"{answer['length']} characters", needed=f"at most {_most(chat)}")
    raise CheckpointError(fails, got=answer["error"])
