"""Calls with room: no loop inside stands at the end of a chunk."""

import logging
import resource
import sys
from types import FunctionType, SimpleNamespace

import pytest

from slidesparse.base import python_stack
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


def test_exceptions_pass_through():
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 // 0)()


@pytest.fixture
def asked_again():
    """What an interpreter can do is found out in this test, and forgotten after it."""
    python_stack._call_with_room.cache_clear()
    yield
    python_stack._call_with_room.cache_clear()


def test_where_cpython_makes_no_large_frames_a_function_stays_as_it_is(monkeypatch, caplog, asked_again):
    def refuse(*_):
        raise ValueError("co_stacksize is too large\nby far")

    monkeypatch.setattr(python_stack, "FunctionType", refuse)
    with caplog.at_level(logging.WARNING):
        assert [with_room(function) for function in (nothing, loop)] == [nothing, loop]
    (line,) = caplog.messages
    assert "ValueError: co_stacksize is too large" in line
    assert "\n" not in line


def test_other_interpreters_need_no_room(monkeypatch, caplog, asked_again):
    monkeypatch.setattr(python_stack.sys, "implementation", SimpleNamespace(name="pypy"))
    assert with_room(nothing) is nothing
    assert not caplog.messages


@pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 11), (3, 12)),
    reason="frames have other memory before, and late releases of 3.13 keep a chunk",
)
def test_a_loop_at_the_end_of_a_chunk_faults_and_with_room_it_does_not():
    depths = range(0, 17 << 10, 64)
    assert max(deeper(loop, extra) for extra in depths) >= CALLS, "no depth was the end of a chunk"
    assert max(deeper(with_room(loop), extra) for extra in depths) < CALLS // 10
