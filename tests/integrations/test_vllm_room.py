"""What gets room on Python's stack, in modules that stand for vLLM's."""

import sys
from types import ModuleType

import pytest

from slidesparse.integrations.vllm.room import ENGINE, WORKER, give_room


@pytest.fixture(autouse=True)
def forgotten():
    give_room.cache_clear()
    yield
    give_room.cache_clear()


def stand_in(monkeypatch, where, steps):
    """A class of vLLM's with these methods, which give their name and what they were called with."""
    module, name, _ = where
    made = type(name, (), {step: lambda self, *a, step=step, **k: (step, a, k) for step in steps})
    holder = ModuleType(module)
    setattr(holder, name, made)
    monkeypatch.setitem(sys.modules, module, holder)
    for parent in ("vllm", "vllm.v1", module.rpartition(".")[0]):
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    return made


@pytest.mark.parametrize(("schedules", "where"), [(True, ENGINE), (False, WORKER)])
def test_steps_are_called_with_room_once(monkeypatch, schedules, where):
    steps = where[2]
    made = stand_in(monkeypatch, where, steps)
    before = {step: getattr(made, step) for step in steps}
    give_room(schedules)
    give_room(schedules)
    for step in steps:
        assert getattr(made, step).__wrapped__ is before[step]
        assert getattr(made(), step)(1, b=2) == (step, (1,), {"b": 2})


def test_what_vllm_moved_is_left_alone(monkeypatch):
    made = stand_in(monkeypatch, ENGINE, ["step"])  # no step_with_batch_queue
    give_room(True)
    assert made().step() == ("step", (), {})
    monkeypatch.setitem(sys.modules, WORKER[0], None)  # importing it fails
    give_room(False)
