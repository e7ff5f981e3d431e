"""The far end of ``bench serve``, with a vLLM that only pretends to serve."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from slidesparse.errors import UnsupportedError
from slidesparse_bench.serve import serve_engine
from slidesparse_bench.serve.engine_log import first_error
from slidesparse_bench.serve.serve_engine import ServedEngine, ServeDriver
from slidesparse_bench.serve.serve_load import Served, decode
from slidesparse_bench.serve.serve_measured import Measured, StepLog, Unmeasured, client_step, decode_step
from slidesparse_bench.serve.serve_options import ServeOptions
from slidesparse_bench.served_records import AT_ONCE, Workload


class PretendLLM:
    """An AsyncLLM that gives a token each 2 ms, and tells its statistics."""

    made: ClassVar[list[PretendLLM]] = []
    short = 0

    def __init__(self, arguments: SimpleNamespace, log: StepLog) -> None:
        self.arguments, self.log, self.closed = arguments, log, False
        self.asked: list[tuple[dict[str, Any], Any, str]] = []
        PretendLLM.made.append(self)

    @classmethod
    def from_engine_args(cls, arguments: SimpleNamespace, stat_loggers: list[Any]) -> PretendLLM:
        asyncio.get_running_loop()  # as vLLM: its own task begins here
        return cls(arguments, stat_loggers[0](None, 0))

    async def generate(self, prompt: dict[str, Any], sampling: Any, name: str) -> AsyncIterator[Any]:
        self.asked.append((prompt, sampling, name))
        for index in range(sampling.max_tokens - self.short):
            await asyncio.sleep(0.002)
            self.tell(4, 0.002 if index else None)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7])])

    def tell(self, tokens: int, gap: float | None) -> None:
        stats = SimpleNamespace(num_prompt_tokens=0, inter_token_latencies_iter=[gap] if gap else [])
        stats.iteration_timestamp = 100.0
        scheduler = SimpleNamespace(cudagraph_stats=SimpleNamespace(num_unpadded_tokens=tokens))
        self.log.record(scheduler_stats=scheduler, iteration_stats=stats, mm_cache_stats=None, engine_idx=0)

    def shutdown(self) -> None:
        self.closed = True


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    PretendLLM.made, PretendLLM.short = [], 0
    modules = {
        "vllm": {"SamplingParams": SimpleNamespace, "AsyncLLMEngine": PretendLLM},
        "vllm.inputs": {"tokens_input": lambda tokens: {"type": "token", "prompt_token_ids": tokens}},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA="delta")},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": SimpleNamespace},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(serve_engine, "PowerMeter", lambda uuids: None)
    yield
    assert all(llm.asked for llm in PretendLLM.made)


SHORT = Workload("short", AT_ONCE, 6, (3, 9), (2, 5), repeats=2)


def test_a_workload_is_served_and_timed(pretend: None, tmp_path: Path) -> None:
    driver = ServeDriver(ServeOptions(tmp_path, False, share=0.9))
    found: Measured = driver.measure(SHORT, None)
    (llm,) = PretendLLM.made
    assert llm.arguments.gpu_memory_utilization == 0.9
    names = [name for _, _, name in llm.asked]
    assert len(set(names)) == 12  # two repeats of six requests
    lengths = [
        sorted(len(prompt["prompt_token_ids"]) for prompt, _, _ in part) for part in (llm.asked[:6], llm.asked[6:])
    ]
    assert lengths[0] == lengths[1]
    assert sum(lengths[0]) == found.prompt_tokens
    assert found.output_tokens == sum(sampling.max_tokens for _, sampling, _ in llm.asked[:6])
    assert len(found.seconds) == 2
    assert 0 < sum(found.seconds) <= found.wall_s
    assert found.lost == 0
    assert found.first is not None
    assert found.between is not None
    assert 2 <= found.first.p50_ms <= found.first.p99_ms < 1000
    assert 2 <= found.between.p50_ms < 1000
    assert found.step_us[-1] == 2000
    driver.close()
    assert llm.closed


def test_requests_that_get_too_few_tokens_are_lost(pretend: None, tmp_path: Path) -> None:
    driver = ServeDriver(ServeOptions(tmp_path, False))
    PretendLLM.short = 1
    found = driver.measure(SHORT, None)
    assert found.lost == 12
    assert found.output_tokens == sum(sampling.max_tokens - 1 for _, sampling, _ in PretendLLM.made[0].asked[:6])


def test_a_figure_that_nobody_could_take_ends_no_engine(pretend: None, tmp_path: Path) -> None:
    driver = ServeDriver(ServeOptions(tmp_path, False))
    found = driver.measure(decode(5, 80), None)  # this engine has steps of four tokens
    assert found.why_not == "no step in which 5 sequences decode: [4] tokens"
    assert (found.seconds, found.prompt_tokens, found.output_tokens) == ((), 5 * 16, 0)
    assert found.wall_s > 0
    assert driver.measure(decode(4, 80), None).why_not is None


def test_a_decode_counts_the_steps_in_which_all_sequences_run(pretend: None, tmp_path: Path) -> None:
    driver = ServeDriver(ServeOptions(tmp_path, False))
    assert driver.measure(decode(4, 80), None).seconds == pytest.approx([0.002] * 5)


def test_no_step_of_a_decode_is_an_error() -> None:
    log = StepLog([64, 4, 63, 64, 64], [9.0, 9.0, 1.0, 2.0, 3.0])
    assert decode_step(log, 64) == 2.5  # not the steps that took prompts in
    with pytest.raises(Unmeasured, match="16 sequences"):
        decode_step(log, 16)


def test_steps_without_a_waiting_sequence_take_the_time_between_answers() -> None:
    log = StepLog()
    for at in (5.0, 5.5):
        stats = SimpleNamespace(num_prompt_tokens=10, inter_token_latencies_iter=[], iteration_timestamp=at)
        log.record(SimpleNamespace(cudagraph_stats=None), stats)
    log.record(SimpleNamespace(), None)
    assert (log.tokens, log.seconds) == ([10, 10], [0.0, 0.5])


FAILING = {
    "vllm/__init__.py": (
        "import subprocess\n"
        "CORE = '(EngineCore pid=8) ERROR 11-24 12:00:00 [core.py:9] ValueError: no room'\n"
        "class AsyncLLMEngine:\n"
        "    @staticmethod\n"
        "    def from_engine_args(*_, **__):\n"
        "        subprocess.run(['echo', CORE])\n"
        "        raise RuntimeError('Engine core initialization failed. See root cause above.')\n"
    ),
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": "from types import SimpleNamespace as AsyncEngineArgs\n",
}


def test_an_engine_core_that_fails_in_process_is_told_by_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FAILING.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)  # for the far end
    engine = ServedEngine(ServeOptions(tmp_path / "model", False, log=tmp_path / "log"))
    with pytest.raises(UnsupportedError, match=r"RuntimeError: .* See root cause above\.; ValueError: no room$"):
        engine.ready(timeout_s=120)
    engine.stop()
    assert "Traceback" in (tmp_path / "log").read_text()


def test_the_first_error_of_a_log_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    warning = "(APIServer pid=7) WARNING 11-24 12:19:02 [a.py:9] limits can cause `OSError: [Errno 24] Too many`\n"
    cause = "(EngineCore pid=8) ERROR 11-24 12:19:02 [core.py:1165] ValueError: the cause\n"
    log.write_text(f"{warning}{cause}frame\n\nRuntimeError: see above\n")
    assert first_error(log) == "ValueError: the cause"
    log.write_text(warning)
    assert first_error(log) is None


def test_a_step_is_what_lies_between_tokens_while_all_decode() -> None:
    slow = Served((1.0, 2.0, 3.0, 4.0), 4)
    late = Served((1.5, 3.5, 9.0), 3)
    assert client_step([slow, late]) == 1.0  # 2 to 3 and 3 to 4; 1.5 to 3.5
    with pytest.raises(Unmeasured, match="no time in which all 2"):
        client_step([Served((1.0,), 1), slow])


def test_what_an_engine_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import subprocess\nclass AsyncLLMEngine:\n    @staticmethod\n    def from_engine_args(*_, **__):\n"
    child += "        print('child', subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    for name, text in (FAILING | {"vllm/__init__.py": child}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)  # for the far end
    engine = ServedEngine(ServeOptions(tmp_path / "model", False, log=tmp_path / "log"))
    engine.ready(timeout_s=120)
    process = int((tmp_path / "log").read_text().rsplit("child ", 1)[1].split()[0])
    os.kill(engine._process.pid or 0, signal.SIGKILL)
    engine.stop()
    stat = Path(f"/proc/{process}/stat")
    for _ in range(100):
        if not stat.exists() or "Z" in stat.read_text().split()[2]:
            return
        time.sleep(0.05)
    pytest.fail("a process of the engine is left")
