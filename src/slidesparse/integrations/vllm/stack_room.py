"""Give vLLM's long-running loops spare room on CPython's stack of frames, in processes that hold one of our models.

CPython keeps frames in chunks. A call that does not fit into the current chunk maps a new one and unmaps it when it
returns, which :mod:`slidesparse.base.python_stack` measured as 7 us instead of 0.05. Whether a loop of vLLM's happens
to run at the end of a chunk depends on the size of every frame above it, and our model's frames differ from stock
vLLM's (one of them holds the weights of all layers as variables). With spare room the position no longer matters.
"""

from __future__ import annotations

from functools import lru_cache

from slidesparse.base.python_stack import with_room
from slidesparse.integrations.vllm.private import loops


@lru_cache  # once a process
def add_stack_room() -> None:
    """Wrap the loops so that each starts at the beginning of a large chunk; skip those that vLLM has moved.

    Room around every step instead of around the loop would cost 0.1 ms a step.
    """
    for owner, loop in loops():
        setattr(owner, loop, with_room(getattr(owner, loop)))
