"""Loops that get stack room, in modules that stand for vLLM's."""

import sys
from types import ModuleType

import pytest

from slidesparse.integrations.vllm.private import LOOPS, add_stack_room


@pytest.fixture(autouse=True)
def forgotten():
    add_stack_room.cache_clear()
    yield
    add_stack_room.cache_clear()


def stand_in(monkeypatch, module, **classes):
    """A module of vLLM's with these classes."""
    holder = ModuleType(module)
    vars(holder).update(classes)
    monkeypatch.setitem(sys.modules, module, holder)


@pytest.mark.parametrize(("module", "name", "loop"), LOOPS)
def test_loops_are_called_with_room_once(monkeypatch, module, name, loop):
    made = type(name, (), {loop: lambda self, *a, **k: (a, k)})
    before = getattr(made, loop)
    stand_in(monkeypatch, module, **{name: made})
    add_stack_room()
    add_stack_room()
    assert getattr(made, loop).__wrapped__ is before
    assert getattr(made(), loop)(1, b=2) == ((1,), {"b": 2})


def test_what_vllm_moved_is_left_alone(monkeypatch):
    for module, name, _ in LOOPS:
        stand_in(monkeypatch, module, **{name: type(name, (), {})})
    add_stack_room()
    monkeypatch.delitem(sys.modules, LOOPS[0][0])
    add_stack_room.cache_clear()
    add_stack_room()
    assert LOOPS[0][0] not in sys.modules
