"""Hooks that are gone when a block ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of a block, whatever ends it; and those before one that cannot be registered.

    Args:
        handles: What registering hooks returns; a generator registers them here.
    """
    with ExitStack() as registered:
        for handle in handles:
            registered.enter_context(handle)
        yield
