"""Give the loop of a process that holds one of our models room on Python's stack.

:mod:`slidesparse.base.python_stack` says why a loop needs it.

vLLM works deep in calls, in loops over layers and over sequences. Whether one of those loops stands at the end of a
chunk is chance, but not the same chance as in stock vLLM: one frame holds the weights of all layers as variables.
"""

from __future__ import annotations

from functools import lru_cache

from slidesparse.base.python_stack import with_room
from slidesparse.integrations.vllm.private import loops


@lru_cache  # once a process
def give_room() -> None:
    """Make them calls with room, before they begin; where vLLM calls them otherwise, nothing happens.

    Around each step room would cost 0.1 ms.
    """
    for owner, loop in loops():
        setattr(owner, loop, with_room(getattr(owner, loop)))
