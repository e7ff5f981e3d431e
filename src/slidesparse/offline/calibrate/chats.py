"""Texts of chats by a checkpoint's own chat template.

The template is a program by the checkpoint's author. transformers runs it in Jinja's sandbox, without access to files
and other code. Ctrl-C ends one that never ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from slidesparse.base.log import log_once
from slidesparse.base.other_libraries import other_library
from slidesparse.errors import CheckpointError, InputError, library_errors


class Chat(list[dict[str, Any]]):
    """Messages, each with a ``role``, nearly always a ``content``, and whatever else the chat template reads.

    Attributes:
        tools: Functions that the model could call, as JSON schemas.
        where: File and line of the chat, for errors.
        tokens: Token numbers that a model read and wrote in this chat; none for other chats.
        seal: :meth:`sealed_by` the tokenizer of that model.
    """

    def __init__(
        self, messages: Iterable[dict[str, Any]], tools: Any = None, where: str = "",
        tokens: Sequence[int] = (), seal: str = "",
    ) -> None:  # fmt: skip
        super().__init__(messages)
        self.tools, self.where, self.tokens, self.seal = tools, where, list(tokens), seal

    def sealed_by(self, vocabulary: str) -> str:
        """Return a digest of the chat and of a tokenizer's :func:`vocabulary_digest`; it resists no attacker."""
        content = json.dumps([vocabulary, [*self], self.tools, self.tokens], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def has_tokens_of(self, vocabulary: str) -> bool:
        """Return whether the token numbers are a tokenizer's own, and nothing of the chat was changed since."""
        return bool(self.tokens) and self.seal == self.sealed_by(vocabulary)


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's tokens and their numbers."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


DATE = datetime(2024, 7, 26)
"""Fixed date of templates, so that a text is the same on another day: Llama 3's own default."""

DATE_FIXED = f"the chat template writes the date, which is held at {DATE:%Y-%m-%d}, so that texts stay the same"

CLOCK = "strftime_now"
"""transformers' function of the present time for templates."""

_SIGNS = (*"aAbBcdDeFHIjmMpSTuwxXyY", "-d", "-m")
_WRITTEN = "".join(f"|replace('%{sign}', '{DATE.strftime(f'%{sign}')}')" for sign in _SIGNS)

FIXED_CLOCK = f"{{% macro {CLOCK}(format) %}}{{{{ format{_WRITTEN} }}}}{{% endmacro %}}\n"
"""First line of a template, which replaces the clock: transformers turns functions passed to a template into text."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that transformers gives to a template under each of these names."""


def require_chat_template(tokenizer: Any, before: str = "", remedy: str | None = None) -> None:
    """Raise an InputError for a tokenizer without a chat template; ``before`` begins its message."""
    if getattr(tokenizer, "chat_template", None) is None:
        what, needed = f"{before}the tokenizer has no chat template", "a model that was trained on chats"
        raise InputError(what, needed=needed, remedy=remedy)


def templated(chats: Sequence[Sequence[dict[str, Any]]], tokenizer: Any, *, to_answer: bool = False) -> list[str]:
    """Return the texts of chats; ``to_answer``: up to the start of the model's answer.

    A line names what the template does not read of the messages, and so leaves out.

    Raises:
        InputError: There is no chat template.
        CheckpointError: The chat template fails.
    """
    if not chats:
        return []
    read = ("the text holds chats, and ", 'use lines with a "text" instead of "messages"')
    require_chat_template(tokenizer, *(() if to_answer else read))
    template = str(tokenizer.chat_template)
    _name_unread(chats, template)
    if CLOCK in template:
        log_once(DATE_FIXED, logging.WARNING)
    return [_text(chat, tokenizer, CLOCK in template, to_answer) for chat in chats]


def _name_unread(chats: Sequence[Sequence[dict[str, Any]]], template: str) -> None:
    keys = {key for chat in chats for message in chat for key in message}
    if any(getattr(chat, "tools", None) for chat in chats):
        keys.add("tools")
    for key in sorted(keys):
        names = REASONING if key in REASONING else (key,)
        if not any(re.search(rf"\b{re.escape(name)}\b", template) for name in names):
            log_once(f"the chat template does not read {key!r} of chats, and leaves it out", logging.WARNING)


def _text(chat: Sequence[dict[str, Any]], tokenizer: Any, has_clock: bool, to_answer: bool) -> str:
    tools = getattr(chat, "tools", None)
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": to_answer}
    options |= {"tools": tools} if tools else {}
    where = f" on {placed}" if (placed := getattr(chat, "where", "")) else ""
    with library_errors(CheckpointError, f"the tokenizer's chat template fails{where}"), other_library():
        if has_clock:
            options["chat_template"] = FIXED_CLOCK + tokenizer.get_chat_template(tools=tools)
        return str(tokenizer.apply_chat_template([*chat], **options))
