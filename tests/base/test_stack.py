"""Calls with room: no loop inside stands at the end of a chunk."""

import resource
import sys
from types import FunctionType

import pytest

from slidesparse.base.python_stack import with_room

CALLS = 2000


def loop() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        nothing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def nothing() -> None: ...


def deeper(function, extra):
    """``function()`` from a frame of so many more bytes."""

    def call(function):
        return function()

    return FunctionType(call.__code__.replace(co_stacksize=8 + extra // 8), globals())(function)


def test_it_is_the_same_function():
    def add(a, *, b=1):
        """Sum."""
        return a + b

    roomy = with_room(add)
    assert (roomy(2), roomy(2, b=3)) == (3, 5)
    assert (roomy.__name__, roomy.__doc__) == ("add", "Sum.")


@pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 11), (3, 12)),
    reason="frames have other memory before, and late releases of 3.13 keep a chunk",
)
def test_a_loop_at_the_end_of_a_chunk_faults_and_with_room_it_does_not():
    depths = range(0, 17 << 10, 64)
    assert max(deeper(loop, extra) for extra in depths) >= CALLS, "no depth was the end of a chunk"
    assert max(deeper(with_room(loop), extra) for extra in depths) < CALLS // 10
