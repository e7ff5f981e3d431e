"""Calls with room for deeper frames: the only module that relies on CPython's layout of frames.

CPython keeps frames in chunks of 16 KB, and frees a chunk as soon as its first frame returns. Where a loop's frame is
at the end of a chunk, each call in it maps a chunk, touches it and unmaps it again: 7 us instead of 0.05
(github.com/python/cpython/issues/142183, mended in later releases of 3.13 and 3.14, not in 3.12). Whether a loop of an
engine is at such a place depends on every frame above it, down to the number of their variables. In stock vLLM the
fastest request of 1024 tokens to a model of 1 B took 6.8 ms with room and 9.4 with 305 such faults, and the fastest
decoding step 2.0 and, with 396, 4.7 (results/h200/vllm/stack-depth.txt).

This module can go when support of CPython 3.12 ends, in October 2028 (peps.python.org/pep-0693).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

FRAME_BYTES = 136 << 10
"""Size of a frame that takes a chunk of its own. CPython rounds the chunk up to 256 KB, so 120 KB are left."""


def _call(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


# The stack of a frame follows its variables and is not cleared: its size costs nothing but addresses.
_CALL = FunctionType(_call.__code__.replace(co_stacksize=FRAME_BYTES // 8), globals())


def with_room(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs at the start of a chunk, with 100 KB of room for deeper frames.

    Each call maps one chunk and unmaps it, so wrap whole loops.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        given: T = _CALL(function, *args, **kwargs)
        return given

    return call
