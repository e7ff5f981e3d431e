"""Give the loop of a process that holds one of our models room on Python's stack.

:mod:`slidesparse.base.python_stack` says why a loop needs it.

vLLM works deep in calls, in loops over layers and over sequences. Whether one of those loops stands at the end of a
chunk is chance, but not the same chance as in stock vLLM: one frame holds the weights of all layers as variables.
"""

from __future__ import annotations

import sys
from functools import lru_cache

from slidesparse.base.python_stack import with_room

LOOPS = (
    ("vllm.v1.engine.core", "EngineCoreProc", "run_busy_loop"),
    ("vllm.v1.engine.core", "DPEngineCoreProc", "run_busy_loop"),
    ("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_busy_loop"),
)
"""What runs as long as a process of vLLM's serves: that of an engine on one GPU, and of the workers on several, whose
scheduler, a process without a model, gets none. Each begins when the model is loaded. Around each step room would cost
0.1 ms."""


@lru_cache  # once a process
def give_room() -> None:
    """Make them calls with room, before they begin; where vLLM calls them otherwise, nothing happens."""
    for module, name, loop in LOOPS:
        found = getattr(sys.modules.get(module), name, None)  # a process imported what it runs
        if hasattr(found, loop):
            setattr(found, loop, with_room(getattr(found, loop)))
