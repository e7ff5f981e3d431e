"""Work that may never return is left alone, and what it raises is raised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from slidesparse.base import apart
from slidesparse.base.apart import run_apart, something_is_left
from slidesparse.base.other_libraries import _QUIET, quiet_libraries


def test_results_errors_and_settings_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_LEFT", [False])
    assert run_apart(lambda: 5, 10) == 5
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda: 1 // 0)
    with quiet_libraries():
        assert run_apart(_QUIET.get)
    assert not something_is_left()


def test_what_takes_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_LEFT", [False])
    with pytest.raises(TimeoutError, match=r"no answer within 0.01 s"):
        run_apart(threading.Event().wait, 0.01)
    assert something_is_left()


def test_a_signal_ends_a_command_whose_threads_go_on() -> None:
    """Python itself would wait for the thread of the pool."""
    code = """
import concurrent.futures, sys, time
import slidesparse.cli.checkpoints as checkpoints
from slidesparse.base.apart import run_apart

def wait():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(time.sleep, 60)
        print("waits", flush=True)

checkpoints._inspect = lambda options: run_apart(wait)
from slidesparse.cli import main
sys.argv = ["slidesparse", "inspect", "m"]
sys.exit(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == "waits\n"
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "slidesparse: interrupted\n")
    assert time.monotonic() - began < 5
