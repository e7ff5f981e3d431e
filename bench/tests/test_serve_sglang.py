"""SGLang's engine in process, with one that only pretends."""

from __future__ import annotations

from pathlib import Path

import pytest

from slidesparse.errors import UnsupportedError
from slidesparse_bench.serve.serve_engine import ServedEngine
from slidesparse_bench.serve.serve_load import decode
from slidesparse_bench.serve.serve_options import ServeOptions
from slidesparse_bench.served_records import AT_ONCE, Workload

SGLANG = """
import asyncio, os
class Engine:  # gives two tokens at a time, as with drafts
    def __init__(self, **settings):
        if settings["tp_size"] == 2:
            raise ValueError(os.environ["SGLANG_PLUGINS"] + os.environ["FORCED"] + str(settings["skip_tokenizer_init"]))
    async def async_generate(self, input_ids, sampling_params, rid, stream):
        return self.parts(sampling_params["max_new_tokens"])
    async def parts(self, tokens):
        for done in range(2, tokens + 1, 2):
            await asyncio.sleep(0.001)
            yield {"meta_info": {"completion_tokens": done}}
    def shutdown(self):
        print("shut down")
"""


@pytest.fixture(autouse=True)
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang.py").write_text(SGLANG)
    monkeypatch.syspath_prepend(tmp_path)  # for the far end


def test_a_workload_is_served_and_timed(tmp_path: Path) -> None:
    engine = ServedEngine(ServeOptions(tmp_path, True, {}, {"tp_size": 1}, server="sglang", log=tmp_path / "log"))
    engine.ready(timeout_s=120)
    found = engine.measure(Workload("even", AT_ONCE, 3, (3, 9), (4, 4), repeats=2), None)
    assert (found.lost, found.output_tokens, len(found.seconds)) == (0, 3 * 4, 2)
    assert (found.step_tokens, found.step_us) == (None, None)  # it tells nobody
    assert engine.measure(Workload("odd", AT_ONCE, 3, (3, 9), (5, 5), repeats=2), None).lost == 3 * 2
    assert engine.measure(decode(1, 80), None).seconds[0] > 0.0005
    engine.stop()
    assert "shut down" in (tmp_path / "log").read_text()


def test_stock_runs_without_plugins_in_its_environment(tmp_path: Path) -> None:
    more = {"server": "sglang", "environment": {"FORCED": "2.5"}, "log": tmp_path / "log"}
    engine = ServedEngine(ServeOptions(tmp_path, False, {}, {"tp_size": 2}, **more))
    with pytest.raises(UnsupportedError, match=r"ValueError: none2\.5True"):
        engine.ready(timeout_s=120)
    engine.stop()
