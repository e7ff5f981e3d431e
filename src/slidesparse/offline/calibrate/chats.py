"""Texts of chats by a checkpoint's own chat template.

The template is a program by the checkpoint's author. transformers runs it in Jinja's sandbox, without access to files
and other code. Ctrl-C ends one that never ends.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeAlias

from slidesparse.base.log import log_once
from slidesparse.base.other_libraries import other_library
from slidesparse.errors import CheckpointError, InputError, first_line

Chat: TypeAlias = "list[dict[str, str]]"
"""Messages, each with a ``role`` and a ``content``."""


class PlacedChat(list[dict[str, str]]):
    """A chat with its file and line."""

    where = ""


DATE = datetime(2024, 7, 26)
"""Fixed date of templates, so that a text is the same on another day: Llama 3's own default."""

DATE_FIXED = f"the chat template writes the date, which is held at {DATE:%Y-%m-%d}, so that texts stay the same"

CLOCK = "strftime_now"
"""transformers' function of the present time for templates."""

_SIGNS = (*"aAbBcdDeFHIjmMpSTuwxXyY", "-d", "-m")
_WRITTEN = "".join(f"|replace('%{sign}', '{DATE.strftime(f'%{sign}')}')" for sign in _SIGNS)

FIXED_CLOCK = f"{{% macro {CLOCK}(format) %}}{{{{ format{_WRITTEN} }}}}{{% endmacro %}}\n"
"""First line of a template, which replaces the clock: transformers turns functions passed to a template into text."""


def templated(chats: Sequence[Chat], tokenizer: Any, *, to_answer: bool = False) -> list[str]:
    """Return the texts of chats; ``to_answer``: up to the start of the model's answer.

    Raises:
        InputError: There is no chat template.
        CheckpointError: The chat template fails.
    """
    if not chats:
        return []
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            "the text holds chats, and the tokenizer has no chat template",
            needed="a model that was trained on chats",
            remedy='use lines with a "text" instead of "messages"',
        )
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": to_answer}
    if CLOCK in str(tokenizer.chat_template):
        log_once(DATE_FIXED, logging.WARNING)
        options["chat_template"] = FIXED_CLOCK + tokenizer.get_chat_template()
    return [_text(chat, tokenizer, options) for chat in chats]


def _text(chat: Chat, tokenizer: Any, options: dict[str, Any]) -> str:
    try:
        with other_library():
            return str(tokenizer.apply_chat_template(chat, **options))
    except Exception as error:  # a template can raise anything
        where = f" on {placed}" if (placed := getattr(chat, "where", "")) else ""
        raise CheckpointError(f"the tokenizer's chat template fails{where}", got=first_line(error)) from error
