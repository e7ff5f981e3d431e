"""The steps of an engine that serves one of our models get room on Python's stack: see :mod:`slidesparse.stack`.

vLLM works 60 frames deep, in loops over layers and over sequences. Whether one of those loops stands at the end of a
chunk is chance, but not the same chance as in stock vLLM: one frame holds the weights of all layers as variables.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib import import_module

from slidesparse.integrations.vllm import LOGGER
from slidesparse.stack import with_room

ENGINE = ("vllm.v1.engine.core", "EngineCore", ("step", "step_with_batch_queue"))
"""Where the process that loads the model also schedules it: its class, and what that does once a batch."""

WORKER = ("vllm.v1.worker.gpu_worker", "Worker", ("execute_model",))
"""Where processes of their own have the model."""

log = logging.getLogger(LOGGER)


@lru_cache  # once a process
def give_room(schedules: bool) -> None:
    """Make what this process does once a batch a call with room.

    Args:
        schedules: This process schedules too: vLLM's executor ``uni``.
    """
    module, name, steps = ENGINE if schedules else WORKER
    try:
        found = getattr(import_module(module), name)
        for step in steps:
            setattr(found, step, with_room(getattr(found, step)))
    except (ImportError, AttributeError) as error:  # vLLM moved it: nothing is wrong, but for some speed at times
        log.debug("no room on Python's stack: %s", error)
