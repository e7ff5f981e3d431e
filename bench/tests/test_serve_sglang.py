"""SGLang's engine in process, with one that only pretends; sglang_plugin/test_sglang_client.py has its own client."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from slidesparse.errors import UnsupportedError
from slidesparse_bench.serve import serve_engine
from slidesparse_bench.serve.serve_engine import ServedEngine, ServeDriver
from slidesparse_bench.serve.serve_load import decode
from slidesparse_bench.serve.serve_options import ServeOptions
from slidesparse_bench.served_records import AT_ONCE, Workload


class PretendEngine:
    """Gives two tokens at a time, as with drafts."""

    made: ClassVar[list[PretendEngine]] = []

    def __init__(self, **settings: Any) -> None:
        self.settings, self.closed = settings, False
        PretendEngine.made.append(self)

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        return self.parts(sampling_params["max_new_tokens"])

    async def parts(self, tokens: int) -> AsyncIterator[dict[str, Any]]:
        for done in range(2, tokens + 1, 2):
            time.sleep(0.001)
            yield {"output_ids": [7] * done, "meta_info": {"completion_tokens": done}}

    def shutdown(self) -> None:
        self.closed = True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ServeDriver:
    module = ModuleType("sglang")
    module.__dict__.update(Engine=PretendEngine)
    monkeypatch.setitem(sys.modules, "sglang", module)
    monkeypatch.setattr(serve_engine, "PowerMeter", lambda uuids: None)
    options = ServeOptions(tmp_path, True, {"slidesparse": {"backend": "auto"}}, {"tp_size": 2}, server="sglang")
    return ServeDriver(options)


def test_a_workload_is_served_and_timed(driver: ServeDriver, tmp_path: Path) -> None:
    found = driver.measure(Workload("short", AT_ONCE, 3, (3, 9), (4, 4), repeats=2), None)
    engine = PretendEngine.made[-1]
    given = {"model_path": str(tmp_path), "tp_size": 2, "skip_tokenizer_init": True, "disable_radix_cache": True}
    assert engine.settings.items() >= given.items()
    assert json.loads(engine.settings["json_model_override_args"]) == {"slidesparse": {"backend": "auto"}}
    assert (found.lost, found.output_tokens, len(found.seconds)) == (0, 3 * 4, 2)
    assert driver.measure(Workload("odd", AT_ONCE, 3, (3, 9), (5, 5), repeats=2), None).lost == 3 * 2
    assert (found.step_tokens, found.step_us) == (None, None)  # it tells nobody
    assert found.between is not None
    assert driver.measure(decode(1, 80), None).seconds[0] > 0.0005
    driver.close()
    assert engine.closed


def test_stock_runs_without_plugins_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import os
class Engine:
    def __init__(self, **_):
        raise ValueError(os.environ["SGLANG_PLUGINS"] + os.environ["FORCED"])
"""
    (tmp_path / "sglang.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)  # for the far end
    options = ServeOptions(tmp_path, False, server="sglang", environment={"FORCED": "2.5"}, log=tmp_path / "log")
    engine = ServedEngine(options)
    with pytest.raises(UnsupportedError, match=r"ValueError: none2\.5"):
        engine.ready(timeout_s=120)
    engine.stop()
