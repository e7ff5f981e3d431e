"""What the tests of both servers' own clients have in common: a server that pretends, and what it is asked."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slidesparse_bench.serve.serve_engine import ServeDriver
from slidesparse_bench.serve.serve_measured import Measured
from slidesparse_bench.serve.serve_options import ServeOptions
from slidesparse_bench.served_records import AT_ONCE, Workload

SCRIPT = str(Path(__file__).parent / "completions_server.py")
SHORT = Workload("short", AT_ONCE, 40, (3, 900), (2, 5), repeats=2)


@contextmanager
def driven(options: ServeOptions) -> Iterator[ServeDriver]:
    """A driver of the server; what that started outlives it, and is killed at the end."""
    made = ServeDriver(options)
    yield made
    made.close()
    os.kill(int(options.log.read_text().rsplit("child ", 1)[1].split()[0]), signal.SIGKILL)


def assert_every_token_came(found: Measured) -> None:
    assert (found.lost, found.error) == (0, None)
    assert found.first is not None
    assert found.between is not None
    assert 1 < found.first.p50_ms <= found.first.p99_ms < 60_000  # milliseconds, on a machine however busy
