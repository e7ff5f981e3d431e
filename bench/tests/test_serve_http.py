"""Engines asked over HTTP, with a server that only pretends; integrations/test_vllm_client.py has vLLM's client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import completions_server
import pytest
from completions_client import Output, ask

from slidesparse.errors import UnsupportedError
from slidesparse_bench.serve import serve_engine, serve_http, serve_server
from slidesparse_bench.serve.serve_engine import ServedEngine, ServeDriver
from slidesparse_bench.serve.serve_http import served
from slidesparse_bench.serve.serve_load import Served
from slidesparse_bench.serve.serve_measured import Unmeasured, client_step
from slidesparse_bench.serve.serve_options import ServeOptions, server_arguments
from slidesparse_bench.serve.serve_server import Server, free_port, last_words, why_no_http
from slidesparse_bench.served_records import AT_ONCE, SOAK, Workload

SCRIPT = Path(completions_server.__file__)
SHORT = Workload("short", AT_ONCE, 6, (3, 9), (2, 5), repeats=2)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.benchmarks", "vllm.benchmarks.lib"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    client = ModuleType("vllm.benchmarks.lib.endpoint_request_func")
    client.__dict__.update(RequestFuncInput=SimpleNamespace, async_request_openai_completions=ask)
    monkeypatch.setitem(sys.modules, client.__name__, client)
    monkeypatch.setattr(serve_http.OverHttp, "cli", (str(SCRIPT),))
    monkeypatch.setattr(serve_http, "open_session", lambda: SimpleNamespace(close=lambda: asyncio.sleep(0)))
    monkeypatch.setattr(serve_engine, "PowerMeter", lambda uuids: None)
    monkeypatch.setattr(serve_server, "POLL_S", 0.02)


@pytest.fixture
def options(tmp_path: Path) -> ServeOptions:
    return ServeOptions(tmp_path / "model", False, share=0.9, http=True, log=tmp_path / "server.log")


@pytest.fixture
def driver(pretend: None, options: ServeOptions) -> Iterator[ServeDriver]:
    made = ServeDriver(options)
    yield made
    made.close()
    os.kill(int((options.log or Path()).read_text().rsplit("child ", 1)[1].split()[0]), signal.SIGKILL)


def test_a_workload_is_served_over_http(driver: ServeDriver, options: ServeOptions) -> None:
    found = driver.measure(SHORT, None)
    assert found.lost == 0
    assert found.error is None
    assert len(found.seconds) == 2
    assert found.first is not None
    assert 2 <= found.between.p50_ms < 1000
    assert (found.step_tokens, found.step_us) == (None, None)  # nobody sees them from outside
    assert str(options.folder) in (options.log or Path()).read_text()


def test_a_soak_over_http_counts_every_request(driver: ServeDriver) -> None:
    found = driver.measure(Workload("soak", SOAK, 50, (3, 9), (2, 3), seconds=1.0, load=0.8), 60.0)
    assert 30 < found.soak.asked < 90
    assert (found.soak.whole, found.soak.errors) == (found.soak.asked, 0)
    assert found.soak.host is not None  # the server's, and its child's
    assert found.soak.host.start_mb > 5
    assert found.soak.gpu is None


@pytest.mark.parametrize(("mode", "lost", "error"), [("short", 12, None), ("errors", 6, "Bad Request")])
def test_what_a_server_leaves_out_is_lost(
    pretend: None,
    options: ServeOptions,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    mode: str,
    lost: int,
    error: str | None,
) -> None:
    monkeypatch.setenv("FAKE_SERVER", mode)
    found = request.getfixturevalue("driver").measure(SHORT, None)
    assert (found.lost, found.error) == (lost, error)


def test_a_server_that_dies_meanwhile_says_why(
    pretend: None, options: ServeOptions, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "dies")
    with pytest.raises(UnsupportedError, match=r"the server ended; got exit status 7; .*CUDA error: out of memory"):
        request.getfixturevalue("driver").measure(SHORT, None)


def test_a_server_that_does_not_start_says_why(
    pretend: None, options: ServeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "refuses")
    with pytest.raises(UnsupportedError) as error:
        ServeDriver(options)
    assert "exit status 1" in str(error.value)
    assert "ValueError: the root of it" in str(error.value)
    assert "Engine core initialization failed." in str(error.value)


def test_a_server_that_is_never_well_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SERVER", "never well")
    monkeypatch.setattr(serve_server, "POLL_S", 0.02)
    port = free_port()
    server = Server([sys.executable, str(SCRIPT), "m", "--port", str(port)], port, tmp_path / "log")
    try:
        with pytest.raises(UnsupportedError, match="the server is not up; got 1 s"):
            server.wait_ready(1.0)
    finally:
        server.stop()
    os.kill(int((tmp_path / "log").read_text().split()[-1]), signal.SIGKILL)
    server.stop()  # once more does no harm


def test_the_first_error_of_a_log_is_told_and_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    warning = "(APIServer pid=7) WARNING 11-24 12:19:02 [a.py:9] limits can cause `OSError: [Errno 24] Too many`\n"
    cause = "(EngineCore pid=8) ERROR 11-24 12:19:02 [core.py:1165] ValueError: the cause\n"
    log.write_text(warning + cause + "frame\n" * 9 + "\nRuntimeError: see above\n")
    assert last_words(log) == "ValueError: the cause | frame | frame | RuntimeError: see above"
    log.write_text("")
    assert last_words(log) == "its log is empty"


def test_servers_get_the_arguments_of_the_engine_in_process(tmp_path: Path) -> None:
    arguments = {"quantization": "slidesparse", "compilation_config": {"max_cudagraph_capture_size": 4}}
    options = ServeOptions(tmp_path, True, {"slidesparse": {"backend": "auto"}}, arguments, share=0.9)
    told = server_arguments(options, "127.0.0.1", 8000, "served")
    pairs = dict(pairwise(told))
    assert told[0] == str(tmp_path)
    assert json.loads(pairs["--additional-config"]) == {"slidesparse": {"backend": "auto"}}
    assert json.loads(pairs["--compilation-config"]) == {"max_cudagraph_capture_size": 4}
    assert pairs["--quantization"] == "slidesparse"
    assert pairs["--gpu-memory-utilization"] == "0.9"
    assert {"--skip-tokenizer-init", "--no-enable-prefix-caching"} < set(told)
    assert "--additional-config" not in server_arguments(ServeOptions(tmp_path, False), "", 1, "m")


def test_waits_count_from_the_arrival() -> None:
    output = Output(start_time=10.5, ttft=0.25, itl=[0.125, 0.125], output_tokens=3, success=True)
    assert served(output, 3, 10.0) == Served((0.75, 0.875, 1.0), 3)
    assert served(Output(error=""), 0, 0.0).error == "it was refused without a word"


def test_a_step_is_what_lies_between_tokens_while_all_decode() -> None:
    slow = Served((1.0, 2.0, 3.0, 4.0), 4)
    late = Served((1.5, 3.5, 9.0), 3)
    assert client_step([slow, late]) == 1.0  # 2 to 3 and 3 to 4; 1.5 to 3.5
    with pytest.raises(Unmeasured, match="no time in which all 2"):
        client_step([Served((1.0,), 1), slow])


def test_why_there_is_no_http_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_server, "find_spec", lambda name: object())
    monkeypatch.setattr(serve_server, "NEEDS", {"vllm": "json, no_such_package_of_a_server", "sglang": "json"})
    why_no_http.cache_clear()
    assert why_no_http("vllm") == "ModuleNotFoundError: No module named 'no_such_package_of_a_server'"
    assert why_no_http("sglang") is None
    why_no_http.cache_clear()


PACKAGES = {
    "vllm/__init__.py": "",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/main.py": (
        "import sys, completions_server\nsys.argv.remove('serve')\ncompletions_server.main()\n"
    ),
    "vllm/benchmarks/__init__.py": "",
    "vllm/benchmarks/lib/__init__.py": "",
    "vllm/benchmarks/lib/endpoint_request_func.py": (
        "from types import SimpleNamespace as RequestFuncInput\n"
        "from completions_client import ask as async_request_openai_completions\n"
    ),
    "aiohttp.py": (
        "class ClientSession:\n    def __init__(self, **_): pass\n    async def close(self): pass\n"
        "def ClientTimeout(total): pass\ndef TCPConnector(**_): pass\n"
    ),
}


def interrupt(timeout_s: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", ["asked", "far end dies", "interrupted meanwhile"])
def test_the_server_ends_with_whoever_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    for name, text in PACKAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    folders = [str(tmp_path), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))  # for the server
    monkeypatch.syspath_prepend(tmp_path)  # for the far end
    log = tmp_path / "server.log"
    engine = ServedEngine(ServeOptions(tmp_path / "model", False, share=0.9, http=True, log=log))
    try:
        engine.ready(timeout_s=120)
        assert engine.measure(SHORT, None).lost == 0
        group = engine._process.pid or 0
        child = int(log.read_text().rsplit("child ", 1)[1].split()[0])
        assert os.getpgid(child) == group
        if end == "far end dies":
            os.kill(group, signal.SIGKILL)
            engine._process.join()
        elif end == "interrupted meanwhile":
            os.kill(group, signal.SIGSTOP)  # as one that is busy: it does not end by itself
            monkeypatch.setattr(engine._process, "join", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.stop()
            monkeypatch.undo()
    finally:
        if end != "interrupted meanwhile":
            engine.stop()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of the server is left")
