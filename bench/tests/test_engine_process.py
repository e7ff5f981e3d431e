"""An engine in a process of its own: what is asked there, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from slidesparse.errors import UnsupportedError
from slidesparse_bench.engine import engine_process
from slidesparse_bench.engine.engine_process import Engine, EngineOptions, answer_calls


class Adder:
    """A far end that answers."""

    def add(self, one: int, other: int) -> int:
        return one + other


def adds(connection: Connection, options: EngineOptions) -> None:
    answer_calls(connection, Adder)


def fails(connection: Connection, options: EngineOptions) -> None:
    answer_calls(connection, lambda: next(options.folder.iterdir()))


def is_deaf(connection: Connection, options: EngineOptions) -> None:
    connection.send((None, None))
    time.sleep(600)


def test_an_engine_whose_process_fails_says_why(tmp_path: Path) -> None:
    engine = Engine(EngineOptions(tmp_path / "nothing", False), fails)
    with pytest.raises(UnsupportedError, match="the engine failed; got FileNotFoundError"):
        engine.ready(timeout_s=120)
    engine.stop()


@pytest.mark.parametrize("dies", ["before it is asked", "before it reads what it is asked"])
def test_a_process_that_dies_between_answers_is_an_engine_that_failed(tmp_path: Path, dies: str) -> None:
    engine = Engine(EngineOptions(tmp_path, False), adds)
    try:
        engine.ready(timeout_s=120)
        assert engine.call("add", 1, 2) == 3
        if dies == "before it is asked":
            os.kill(engine._process.pid or 0, signal.SIGKILL)
            engine._process.join()
            engine.ask("add", 1, 2)
        else:
            os.kill(engine._process.pid or 0, signal.SIGSTOP)
            engine.ask("add", 1, 2)
            os.kill(engine._process.pid or 0, signal.SIGKILL)
        with pytest.raises(UnsupportedError, match="the engine failed; got its process ended"):
            engine.answer(60)
    finally:
        engine.stop()


def test_an_engine_that_is_killed_has_ended_when_the_next_may_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "STOP_S", 0.1, raising=False)
    engine = Engine(EngineOptions(tmp_path, False), is_deaf)
    engine.ready(timeout_s=120)
    engine.stop()
    assert engine._process.exitcode == -signal.SIGKILL
