"""Make texts of chats with a checkpoint's own chat template, which transformers runs in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from slidesparse.base.other_libraries import other_library
from slidesparse.errors import CheckpointError, InputError, first_line

Chat: TypeAlias = "list[dict[str, str]]"
"""Messages, each with a ``role`` and a ``content``."""


def templated(chats: Sequence[Chat], tokenizer: Any) -> list[str]:
    """Return the texts of chats.

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
    try:
        with other_library():
            return [str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats]
    except Exception as error:  # a template can raise anything
        raise CheckpointError("the tokenizer's chat template fails", got=first_line(error)) from error
