"""Soaks: what comes when, what the engine's memory does meanwhile, and the verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slidesparse_bench.serve.serve_load import LONGEST, Request, Served, soak, soak_requests
from slidesparse_bench.serve.serve_memory import MemoryLog, growth, resident_bytes
from slidesparse_bench.serve.serve_soak import verdict
from slidesparse_bench.served_figures import Growth

ASKED = [Request((1,), 3, float(at)) for at in range(30)]
FINE = [Served((0.1, 0.2, 0.3), 3)] * 30
STEADY = Growth(1000.0, 1010.0, 1.0)


def test_requests_come_at_random_for_as_long_as_asked_for() -> None:
    asked = soak_requests(soak(60.0), 50.0)
    assert 2700 < len(asked) < 3300
    arrivals = [request.arrival_s for request in asked]
    assert arrivals == sorted(arrivals)
    assert 59 < arrivals[-1] <= 60
    assert max(len(request.prompt) + request.output for request in asked) <= LONGEST
    assert soak_requests(soak(60.0), 50.0) == asked  # every engine is asked the same


def test_all_whole_and_steady_passes() -> None:
    found = verdict(ASKED, FINE, STEADY, STEADY)
    assert (found.asked, found.whole, found.errors, found.faults) == (30, 30, 0, ())
    assert [third.first.p50_ms if third else None for third in found.thirds] == [pytest.approx(100)] * 3
    assert verdict(ASKED, FINE, None, None).faults == ()  # nobody told of memory


def test_each_fault_is_a_sentence() -> None:
    failed, short = Served((), 0, "500"), Served((0.1, 0.2), 2)
    late = Served((0.9, 1.0, 1.1), 3)
    answers = [failed, short, *FINE[:18], *[late] * 10]
    found = verdict(ASKED, answers, Growth(1000.0, 1200.0, 0.0), Growth(1000.0, 1600.0, 50.0))
    assert (found.whole, found.errors) == (28, 1)
    assert found.faults == (
        "1 of 30 requests ended with an error",
        "1 of 30 requests did not get all their tokens",
        "GPU memory grew by 200 MB, more than 100",
        "host memory grew by 600 MB, more than 500",
        "host memory grows by 50 MB a minute, more than 20",
        "the longest hundredth waits 900.0 ms for the first token at the end, and 100.0 at the start",
    )
    burst = [*[Served((0.1, 0.1, 0.1), 3)] * 20, *FINE[:10]]  # parts of an answer that came as one
    assert verdict(ASKED, burst, None, None).faults == (
        "the longest hundredth waits 100.0 ms for a token at the end, and 0.0 at the start",
    )
    silent = verdict(ASKED, [*FINE[:20], *[failed] * 10], None, None)
    assert silent.faults[-1] == "a third of the time without an answer"


def test_the_slope_leaves_out_the_beginning() -> None:
    found = growth([(0.0, 0.0), (30.0, 50e6), (60.0, 100e6), (120.0, 100e6), (180.0, 100e6)])
    assert found == Growth(0.0, 100.0, pytest.approx(0.0))
    assert growth([(0.0, 1.0)]) is None


def test_memory_of_a_process_and_those_that_it_started() -> None:
    program = "import time; held = bytearray(60_000_000); print('held', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        assert (resident_bytes(os.getpid()) or 0) > 60e6
        log = MemoryLog({"host": lambda: resident_bytes(os.getpid()), "gpu": lambda: None})
        with log:
            pass
        host = log.growth("host")
        assert host.start_mb > 60
        assert log.growth("gpu") is None
    finally:
        child.kill()
        child.wait()
        child.stdout.close() if child.stdout else None


def test_a_system_that_tells_nothing_is_no_zero(tmp_path: Path) -> None:
    assert resident_bytes(1, tmp_path) is None
