"""vLLM's own client and its server's arguments, as ``bench serve`` uses them: no GPU, and a server that pretends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served_client import SCRIPT, SHORT, assert_every_token_came, driven

from slidesparse_bench.engine.eagle_head import eagle_settings
from slidesparse_bench.serve import serve_engine, serve_http
from slidesparse_bench.serve.serve_engine import ServeDriver
from slidesparse_bench.serve.serve_load import decode
from slidesparse_bench.serve.serve_options import ServeOptions, server_arguments

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeDriver]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(serve_http.OverHttp, "cli", (SCRIPT,))
    monkeypatch.setattr(serve_engine, "PowerMeter", lambda uuids: None)
    with driven(ServeOptions(tmp_path / "model", False, http=True, log=tmp_path / "log")) as made:
        yield made


def test_vllms_client_gets_every_token(driver: ServeDriver) -> None:
    found = driver.measure(SHORT, None)
    assert_every_token_came(found)
    assert 0 < found.between.p50_ms <= found.between.p99_ms < 1000  # a busy machine reads tokens in bunches
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
