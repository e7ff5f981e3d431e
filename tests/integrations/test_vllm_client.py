"""vLLM's own client and its server's arguments, as ``bench serve`` uses them: no GPU, and a server that pretends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slidesparse_bench.engine.eagle_head import eagle_settings
from slidesparse_bench.serve import serve_engine, serve_http
from slidesparse_bench.serve.serve_engine import ServeDriver
from slidesparse_bench.serve.serve_load import decode
from slidesparse_bench.serve.serve_options import ServeOptions, server_arguments
from slidesparse_bench.served_records import AT_ONCE, Workload

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

SCRIPT = Path(__file__).parents[1] / "completions_server.py"
SHORT = Workload("short", AT_ONCE, 40, (3, 900), (2, 5), repeats=2)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeDriver]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(serve_http.OverHttp, "cli", (str(SCRIPT),))
    monkeypatch.setattr(serve_engine, "PowerMeter", lambda uuids: None)
    log = tmp_path / "log"
    made = ServeDriver(ServeOptions(tmp_path / "model", False, http=True, log=log))
    yield made
    made.close()
    os.kill(int(log.read_text().rsplit("child ", 1)[1].split()[0]), signal.SIGKILL)


def test_vllms_client_gets_every_token(driver: ServeDriver) -> None:
    found = driver.measure(SHORT, None)
    assert (found.lost, found.error) == (0, None)
    assert found.first is not None
    assert found.between is not None
    assert 1 < found.first.p50_ms <= found.first.p99_ms < 5000
    assert 0 < found.between.p50_ms <= found.between.p99_ms < 1000  # a busy machine reads tokens in bunches


def test_vllms_client_sees_the_steps_of_a_decode(driver: ServeDriver) -> None:
    assert all(0.001 < seconds < 1 for seconds in driver.measure(decode(8, 80), None).seconds)


@pytest.mark.parametrize(("mode", "lost"), [("short", 80), ("errors", 40)])
def test_vllms_client_tells_what_was_lost(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, mode: str, lost: int
) -> None:
    monkeypatch.setenv("FAKE_SERVER", mode)
    found = request.getfixturevalue("driver").measure(SHORT, None)
    assert found.lost == lost
    assert (found.error is not None) == (mode == "errors")


def test_vllms_engine_knows_the_servers_arguments(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    settings = {"quantization": "slidesparse", "compilation_config": {"max_cudagraph_capture_size": 2048}}
    settings |= {"tensor_parallel_size": 2, **eagle_settings("vllm", tmp_path, 2.5)[0]}
    options = ServeOptions(tmp_path, True, {"slidesparse": {"backend": "auto"}}, settings, share=0.9)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    written = server_arguments(options, "127.0.0.1", 8000, "served")[5:]  # the server's own come first
    parsed = parser.parse_args(written)
    assert parsed.skip_tokenizer_init
    assert parsed.enable_prefix_caching is False
    assert parsed.additional_config == {"slidesparse": {"backend": "auto"}}
    assert parsed.max_num_seqs == 256
    assert parsed.tensor_parallel_size == 2
    assert parsed.speculative_config["rejection_sample_method"] == "synthetic"
    assert parsed.compilation_config.max_cudagraph_capture_size == 2048
