"""``bench vllm`` with engines that only pretend: what is asked of them, what is recorded, and what is drawn."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from slidesparse.cli import main
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.weights.pattern import Pattern
from slidesparse_bench import environment
from slidesparse_bench.engine import vllm, vllm_engine, vllm_profile
from slidesparse_bench.engine.vllm import by_class, run
from slidesparse_bench.engine.vllm_checkpoint import model_config, write_checkpoint
from slidesparse_bench.engine.vllm_engine import BATCHED_TOKENS, Engine, EngineOptions, answer_calls
from slidesparse_bench.engine.vllm_profile import EngineProfile, adapt
from slidesparse_bench.records import ENGINE, KERNELS, STEP_KERNELS, Clocks, Machine, read_records
from slidesparse_bench.report import write_report

MACHINE = Machine("Pretend", "9.0", None, 1.0, 1.0, "2", None, None, None, "0.22.1", "0", None)
SECONDS = {"dense": 0.3, "2:4": 0.2, "6:8": 0.25}
KERNEL_NAMES = {"flash::x": (5.0, 1), "cutlass::gemm": (60.0, 4), "triton_red_fused": (20.0, 4), "memcpy": (1.0, 2)}


FAILS = "cusparselt"


class Pretender:
    """Takes the place of an engine."""

    started: ClassVar[list[EngineOptions]] = []
    stopped = 0

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        marker = json.loads((options.folder / "config.json").read_text()).get("slidesparse_config", {})
        self.seconds = SECONDS[marker.get("pattern", "dense")]
        Pretender.started.append(options)

    def ready(self) -> None:
        if self.options.additional.get("slidesparse", {}).get("backend") == FAILS:
            raise UnsupportedError("the vLLM engine failed", got="no memory")

    def call(self, name: str, *arguments: Any) -> Any:
        fixed = {"weights_gb": 7.5, "kernels": KERNEL_NAMES}
        return fixed[name] if name in fixed else self.seconds * (1 + arguments[-1])

    def ask(self, *question: Any) -> None:
        self.question = question

    def answer(self) -> Any:
        return self.call(*self.question)

    def stop(self) -> None:
        Pretender.stopped += 1


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretender.started, Pretender.stopped = [], 0
    monkeypatch.setattr(vllm, "Engine", Pretender)
    monkeypatch.setattr(vllm, "find_spec", lambda name: True)
    monkeypatch.setattr(environment, "require_gpu", lambda: None)
    monkeypatch.setattr(environment, "machine", lambda: MACHINE)
    monkeypatch.setattr(environment, "clocks", lambda: Clocks(None, None, None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        vllm, "write_checkpoint", lambda *a: write_checkpoint(a[0], a[1] | SMALL, *a[2:4], torch.device("cpu"))
    )


SMALL = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
PROFILE = EngineProfile(
    ("Qwen2.5-7B",), ("int8",), ("2:4", "6:8"), (1024,), (64,), rounds=3, layers=1, backends=("hopper",)
)


def test_a_run_records_every_engine_and_the_report_draws_them(pretend: None, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = run(PROFILE, path)
    assert read_records([path]) == records
    assert [options.plugin for options in Pretender.started] == [False, True, True]
    assert Pretender.stopped == 3
    times = [record for record in records if record.case.benchmark == ENGINE]
    assert [(r.case.layer, r.case.tokens, r.variant) for r in times] == [
        (kind, size, variant) for kind, size in (("prefill", 1024), ("decode", 64)) for variant in SECONDS
    ]
    # Rounds 1, 2 and 3 count, which take 2, 3 and 4 times the pretended time; round 0 warms up.
    medians = [r.timing.median_us for r in times[:3] if r.timing]
    assert medians == pytest.approx([3e6 * seconds for seconds in SECONDS.values()])
    assert {r.n_bytes for r in times} == {7_500_000_000}
    for benchmark in (KERNELS, STEP_KERNELS):
        assert len([record for record in records if record.case.benchmark == benchmark]) == 3 * 4
    page = next(file for file in write_report(records, tmp_path / "report") if file.suffix == ".md").read_text()
    assert "C, prefill, INT8" in page
    assert "| Qwen2.5-7B | 1024 | 900.00 | 1138 | 1.500 | 1.200 | 40.0% |" in page  # 2, 3 and 4 times the same
    assert "D, decode, INT8: efficiency against 2:4" in page
    assert "| Qwen2.5-7B | int8 | 16384 | 6:8 | 0.0 | 0.1 | 0.0 | 0.0 | 0.1 | 7.50 |" in page
    assert "| Qwen2.5-7B | int8 | 64 | 6:8 | 0.01 | 0.06 | 0.02 | 0.00 | 0.09 | 7.50 |" in page


def test_what_no_kernel_does_takes_no_time_that_a_reader_would_refuse(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(KERNEL_NAMES, "flash::x")  # a release may name its attention otherwise
    path = tmp_path / "records.jsonl"
    records = run(PROFILE, path)
    assert read_records([path]) == records
    layers = [record.case.layer for record in records if record.case.benchmark == KERNELS]
    assert layers == ["gemm", "elementwise", "rest"] * 3


@pytest.mark.parametrize(("dying", "failed"), [(2, "2:4"), (4, "dense")])
def test_an_engine_alone_that_dies_loses_what_no_other_measured(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dying: int, failed: str
) -> None:
    class Dying(Pretender):
        def call(self, name: str, *arguments: Any) -> Any:
            if len(Pretender.started) == dying and name == "decode":
                raise UnsupportedError("the vLLM engine failed", got="its process ended")
            return super().call(name, *arguments)

    monkeypatch.setattr(vllm, "Engine", Dying)
    records = run(replace(PROFILE, alone=True), tmp_path / "alone.jsonl")
    assert read_records([tmp_path / "alone.jsonl"]) == records
    assert [r.variant for r in records if r.why_not is not None] == [failed]
    times = [record for record in records if record.case.benchmark == ENGINE and record.timing is not None]
    measured = [variant for variant in SECONDS if (variant, dying) != ("2:4", 2)]
    assert [record.variant for record in times] == 2 * measured
    assert {record.noise is None for record in times} == {dying == 4}  # dense was not timed twice
    assert Pretender.stopped == len(Pretender.started) == 4


def test_the_command_line_reaches_the_engines(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(vllm_profile.PROFILES, "quick", PROFILE)
    command = ["bench", "vllm", "--layers", "1", "--graphs", "2048", "--tokens", "65536", "--alone"]
    assert main([*command, "--out", str(tmp_path / "records.jsonl")]) == 0
    assert len(Pretender.started) == 4
    assert "records" in capsys.readouterr().out
    layer = model_config("Qwen2.5-7B", 1)
    cached = 4 * layer["num_key_value_heads"] * layer["head_dim"] * 2 * BATCHED_TOKENS  # of the 65536
    for options in Pretender.started:
        assert options.arguments["compilation_config"] == {"max_cudagraph_capture_size": 2048}
        assert options.kv_cache_gb == pytest.approx(1.2e-9 * cached)


def test_kernels_are_told_apart_by_their_names() -> None:
    names = {
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>": "attention",
        "void cutlass::device_kernel<enable_sm90_or_later<cutlass::gemm::kernel::GemmUniversal<...>>>": "gemm",
        "sparse_gemm": "gemm",
        "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT": "gemm",
        "triton_red_fused_cutlass_scaled_mm_fused_add_rms_norm_2": "elementwise",
        "sm90_xmma_sparse_gemm_i8i32_i8i32_i32_tn_n": "gemm",
        "scale_kernel": "gemm",
        "held_kernel": "elementwise",
        "void vllm::dynamic_scaled_int8_quant_kernel<c10::BFloat16, float>": "elementwise",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "elementwise",
        "void vllm::reshape_and_cache_flash_kernel<...>": "rest",
        "Memcpy HtoD (Pinned -> Device)": "rest",
    }
    for name, kind in names.items():
        assert by_class({name: (2.0, 1)})[kind] == 2.0, name


def test_a_random_checkpoint_is_what_it_says(tmp_path: Path) -> None:
    config = model_config("Llama-3.2-1B", 1) | SMALL
    write_checkpoint(tmp_path / "c", config, torch.float8_e4m3fn, Pattern.parse("4:6"), torch.device("cpu"))
    found = inspect_checkpoint(tmp_path / "c")
    assert found.ok
    assert "7" in found.table()  # seven linears


def test_a_random_mixture_is_what_it_says(tmp_path: Path) -> None:
    config = model_config("Qwen3-30B-A3B", 1) | {**SMALL, "num_experts": 3, "moe_intermediate_size": 16, "head_dim": 16}
    write_checkpoint(tmp_path / "c", config, torch.int8, Pattern.parse("6:8"), torch.device("cpu"))
    found = inspect_checkpoint(tmp_path / "c")
    assert found.ok, found.table()
    stored = Checkpoint(tmp_path / "c")
    experts = [name for name in stored.files if ".experts." in name]
    assert len(experts) == 3 * 3 * 2  # gate, up and down, with their scales
    assert stored.tensor("model.layers.0.mlp.gate.weight").shape == (3, config["hidden_size"])
    assert stored.tensor("model.layers.0.mlp.experts.2.down_proj.weight").shape == (config["hidden_size"], 16)


def test_wrong_choices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = vllm_profile.PROFILES["quick"]
    for wrong in (
        {"dtypes": ["fp16"]},
        {"models": ["GPT"]},
        {"patterns": ["6:9"]},
        {"patterns": ["6:8", "dense"]},  # by a backend's name its engine would pass for stock
        {"layers": 0},
        {"rounds": 1},
        {"graphs": 0},
        {"graphs": 16385},
    ):
        with pytest.raises(InputError):
            adapt(profile, **wrong)
    assert main(["bench", "gemm", "--layers", "4", "--out", str(tmp_path / "x")]) == 1
    assert "needed bench vllm" in capsys.readouterr().err
    assert main(["bench", "vllm", "--budget-s", "5", "--out", str(tmp_path / "x")]) == 1
    assert "--budget-s" in capsys.readouterr().err


def test_without_a_dense_engine_nothing_is_measured_and_the_others_are_stopped(
    pretend: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: Pretender) -> None:
        raise UnsupportedError("the vLLM engine failed", got="no memory")

    monkeypatch.setattr(Pretender, "ready", fail)
    with pytest.raises(UnsupportedError, match="no memory"):
        run(PROFILE, tmp_path / "records.jsonl")
    assert Pretender.stopped == 3


def test_an_engine_of_ours_that_does_not_start_is_recorded_and_the_others_are_measured(
    pretend: None, tmp_path: Path
) -> None:
    records = run(replace(PROFILE, patterns=("6:8",), backends=("cusparselt", "hopper")), tmp_path / "records.jsonl")
    failed, *timed = records
    assert (failed.algorithm, failed.why_not) == ("cusparselt", "the vLLM engine failed; got no memory")
    assert {record.algorithm for record in timed} == {"", "hopper"}
    assert read_records([tmp_path / "records.jsonl"]) == records
    page = next(file for file in write_report(records, tmp_path / "report") if file.suffix == ".md").read_text()
    assert "| vllm | int8 | 6:8 | slidesparse | the vLLM engine failed; got no memory | 1 |" in page


def test_an_engine_whose_process_fails_says_why(tmp_path: Path) -> None:
    engine = Engine(EngineOptions(tmp_path / "nothing", False))
    with pytest.raises(UnsupportedError, match="the vLLM engine failed; got"):
        engine.ready(timeout_s=120)
    engine.stop()


class Adder:
    """A far end that answers."""

    def add(self, one: int, other: int) -> int:
        return one + other


def adds(connection: Connection, options: EngineOptions) -> None:
    answer_calls(connection, Adder)


def is_deaf(connection: Connection, options: EngineOptions) -> None:
    connection.send((None, None))
    time.sleep(600)


@pytest.mark.parametrize("dies", ["before it is asked", "before it reads what it is asked"])
def test_a_process_that_dies_between_answers_is_an_engine_that_failed(tmp_path: Path, dies: str) -> None:
    engine = Engine(EngineOptions(tmp_path, False), adds)
    try:
        engine.ready(timeout_s=120)
        assert engine.call("add", 1, 2) == 3
        if dies == "before it is asked":
            os.kill(engine._process.pid or 0, signal.SIGKILL)
            engine._process.join()
            engine.ask("add", 1, 2)
        else:
            os.kill(engine._process.pid or 0, signal.SIGSTOP)
            engine.ask("add", 1, 2)
            os.kill(engine._process.pid or 0, signal.SIGKILL)
        with pytest.raises(UnsupportedError, match="the vLLM engine failed; got its process ended"):
            engine.answer(60)
    finally:
        engine.stop()


def test_an_engine_that_is_killed_has_ended_when_the_next_may_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "STOP_S", 0.1, raising=False)
    engine = Engine(EngineOptions(tmp_path, False), is_deaf)
    engine.ready(timeout_s=120)
    engine.stop()
    assert engine._process.exitcode == -signal.SIGKILL
