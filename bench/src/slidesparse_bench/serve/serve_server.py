"""``vllm serve`` in a process of its own: started as a user does, waited for, and ended whatever happens."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from slidesparse.errors import UnsupportedError
from slidesparse_bench.served_records import SGLANG, VLLM

HOST = "127.0.0.1"

CLI = ("-m", "vllm.entrypoints.cli.main", "serve")
"""What the ``vllm`` script of a wheel runs; the script itself need not be on the path."""

NEEDS = {
    VLLM: "vllm.entrypoints.cli.serve, vllm.entrypoints.openai.api_server, vllm.benchmarks.lib.endpoint_request_func",
    SGLANG: "sglang.srt.entrypoints.http_server, sglang.benchmark.serving",
}
"""Server -> what is imported to serve and to ask: where that works, all that they need is installed."""

START_S = 540.0
"""A server that cannot be asked by then is given up."""

POLL_S = 0.5

STOP_S = 10.0
"""A server has so long to end by itself."""

LAST_LINES, LINE_LENGTH = 3, 160
"""Of a dead server's log, in an error's one line."""

ERROR = re.compile(r"(?:\([^)]*\) +)?(?:(?:ERROR|CRITICAL)\b[^\]]*\] +)?([\w.]*(?:Error|Exception): \S.*)")
"""An exception's own line, after what vLLM puts before it; not a warning that speaks of one."""


class Server:
    """A server that was started; it need not be up yet.

    Args:
        command: Program and arguments.
        port: Where it will listen.
        log: Its output goes there.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.port, self._log = port, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ)
            )

    @property
    def pid(self) -> int:
        """Of the server; the engine's processes are its children."""
        return self._process.pid

    def wait_ready(self, deadline_s: float = START_S) -> None:
        """Wait until the server says that it is well.

        Raises:
            UnsupportedError: It died, or takes too long.
        """
        until = time.monotonic() + deadline_s
        while not self._is_well():
            self.require_alive()
            if time.monotonic() > until:
                raise UnsupportedError("the server is not up", got=f"{deadline_s:.0f} s; {last_words(self._log)}")
            time.sleep(POLL_S)

    def require_alive(self) -> None:
        """Raise UnsupportedError with the last lines of its log if the server has ended."""
        if (status := self._process.poll()) is not None:
            raise UnsupportedError("the server ended", got=f"exit status {status}; {last_words(self._log)}")

    def stop(self) -> None:
        """End it; its children end with the process group of whoever started it, if not by themselves."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _is_well(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port: int = taken.getsockname()[1]
    return port


def last_words(log: Path) -> str:
    """The first error in a log, and its last lines, on one line."""
    lines = _lines(log)
    first = _first_error(lines[:-LAST_LINES])
    told = [] if first is None else [first]
    told += [line[-LINE_LENGTH:] for line in lines[-LAST_LINES:]]
    return " | ".join(told) or "its log is empty"


def first_error(log: Path) -> str | None:
    """The first error in a log; None where it has none."""
    return _first_error(_lines(log))


def _lines(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _first_error(lines: Sequence[str]) -> str | None:
    causes = (found[1] for line in lines if (found := ERROR.match(line)) is not None)
    first = next(causes, None)
    return None if first is None else first[: 2 * LINE_LENGTH]


@cache
def why_no_http(server: str) -> str | None:
    """Why nobody can serve and ask over HTTP here, in one line; None where that works.

    Python imports what both need, in a process of its own: which packages that takes differs from release to release.
    """
    if find_spec(server) is None:
        return f"{server} is not installed"
    tried = subprocess.run(
        [sys.executable, "-c", f"import {NEEDS[server]}"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if tried.returncode == 0:
        return None
    lines = tried.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else f"importing its server ends with status {tried.returncode}"
