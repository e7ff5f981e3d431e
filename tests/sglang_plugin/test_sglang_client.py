"""SGLang's own client, tokenizer and arguments, as ``bench serve`` uses them: no GPU, and a server that pretends."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from served_client import SCRIPT, SHORT, assert_every_token_came, driven

from slidesparse.errors import UnsupportedError
from slidesparse_bench.engine.eagle_head import eagle_settings
from slidesparse_bench.engine.vllm_checkpoint import ARCHITECTURES, model_config
from slidesparse_bench.serve import serve_engine
from slidesparse_bench.serve.serve_engine import ServeDriver
from slidesparse_bench.serve.serve_load import decode
from slidesparse_bench.serve.serve_options import ServeOptions, engine_settings, server_arguments
from slidesparse_bench.serve.serve_sglang import NO_TEXT, SGLangOverHttp, write_tokenizer

pytestmark = pytest.mark.usefixtures("sglang_on_cpu")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeDriver]:
    datasets = ModuleType("datasets")  # of one of the client's sets of prompts, which none is drawn from
    datasets.__dict__["load_dataset"] = None
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr(serve_engine, "PowerMeter", lambda uuids: None)
    monkeypatch.setattr(SGLangOverHttp, "cli", (SCRIPT,))
    (tmp_path / "config.json").write_text(json.dumps(model_config("Llama-3-8B", 1)))
    with driven(ServeOptions(tmp_path, False, http=True, log=tmp_path / "log", server="sglang")) as made:
        yield made


def test_sglangs_client_gets_every_token(driver: ServeDriver) -> None:
    found = driver.measure(SHORT, None)
    assert_every_token_came(found)
    assert 0 < found.between.p50_ms < 1000
    assert all(0.001 < seconds < 1 for seconds in driver.measure(decode(8, 80), None).seconds)


@pytest.mark.parametrize(("mode", "lost"), [("short", 80), ("errors", 40)])
def test_sglangs_client_tells_what_was_lost(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, mode: str, lost: int
) -> None:
    monkeypatch.setenv("FAKE_SERVER", mode)
    found = request.getfixturevalue("driver").measure(SHORT, None)
    assert found.lost == lost
    assert (found.error is not None) == (mode == "errors")


def test_answers_without_text_are_no_figures(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Its client took such an answer for one whose first token came at once."""
    monkeypatch.setenv("FAKE_SERVER", "silent")
    with pytest.raises(UnsupportedError, match=NO_TEXT):
        request.getfixturevalue("driver").measure(SHORT, None)


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Llama-3-8B", "Qwen3-30B-A3B"])
def test_every_token_has_text(tmp_path: Path, model: str) -> None:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    (tmp_path / "config.json").write_text(json.dumps(model_config(model, 1)))
    write_tokenizer(tmp_path)
    tokenizer = get_tokenizer(str(tmp_path))
    last = ARCHITECTURES[model].vocabulary - 1
    assert tokenizer.batch_decode([[0], [2, 7], [last]], skip_special_tokens=True) == ["w0", "w2 w7", f"w{last}"]


def test_sglangs_server_knows_the_arguments(tmp_path: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    more, _ = eagle_settings("sglang", tmp_path, 2.5)
    options = ServeOptions(tmp_path, True, {"slidesparse": {"backend": "auto"}}, more | {"tp_size": 2}, server="sglang")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = vars(parser.parse_args([*server_arguments(options, "127.0.0.1", 8000, "served"), "--skip-tokenizer-init"]))
    settings = engine_settings(options)
    assert {name: parsed[name] for name in settings} == settings
    assert parsed["skip_server_warmup"]
