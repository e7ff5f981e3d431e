"""``bench serve`` with an engine that only pretends: what is asked of it, what is recorded, and how a run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from slidesparse.cli import main
from slidesparse.errors import InputError, UnsupportedError
from slidesparse_bench import environment
from slidesparse_bench.records import Machine, open_records
from slidesparse_bench.serve import serve, serve_checkpoints
from slidesparse_bench.serve.serve import run
from slidesparse_bench.serve.serve_load import FULL, QUICK
from slidesparse_bench.serve.serve_measured import Measured
from slidesparse_bench.serve.serve_options import ServeOptions
from slidesparse_bench.serve.serve_profile import ServeProfile, adapt
from slidesparse_bench.served_figures import Latency, Power
from slidesparse_bench.served_records import ServeRecord, Way, Workload, read, to_line

MACHINE = Machine("Pretend", "9.0", None, 1.0, 1.0, "2", None, None, None, "0.22.1", "0", None)
SECONDS = {"dense": 4.0, "6:8": 2.0, "2:4": 1.0}


class Pretender:
    """Takes the place of an engine."""

    started: ClassVar[list[ServeOptions]] = []
    asked: ClassVar[list[tuple[str, float | None]]] = []
    stopped = 0
    dies_at: str | None = None

    def __init__(self, options: ServeOptions) -> None:
        pattern = json.loads((options.folder / "config.json").read_text())["pattern"]
        self.options, self.seconds = options, SECONDS[pattern]
        Pretender.started.append(options)

    def ready(self) -> None:
        if self.dies_at == "start" and self.options.plugin:
            raise UnsupportedError("the engine failed", got="no memory")

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "measure":
            return self.measure(*arguments)
        return None

    def measure(self, workload: Workload, rate: float | None) -> Measured:
        if workload.name == self.dies_at and self.options.plugin:
            raise UnsupportedError("the engine failed", got="EngineDeadError")
        Pretender.asked.append((workload.name, rate))
        seconds = (self.seconds, 2 * self.seconds)
        power = Power(700.0, 350.0, 1500.0, 60.0, 0.9, 100.0)
        waits = Latency(1.0, 2.0)
        return Measured(seconds, 100, 10, 3 * self.seconds, waits, waits, 0, (64, 700), (0, 20000), power)

    def stop(self) -> None:
        Pretender.stopped += 1


def write_nothing(
    folder: Path, config: Any, dtype: Any, pattern: Any, device: Any, layers: Any = None, *_: Any, **__: Any
) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"pattern": str(pattern), "exceptions": len(layers or ())}))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    Pretender.started, Pretender.asked, Pretender.stopped = [], [], 0
    monkeypatch.setattr(serve, "ServedEngine", Pretender)
    monkeypatch.setattr(serve, "find_spec", lambda name: True)
    monkeypatch.setattr(serve_checkpoints, "write_checkpoint", write_nothing)
    monkeypatch.setattr(serve_checkpoints, "write_eagle_head", lambda folder, config, device: folder.mkdir())
    monkeypatch.setattr(serve, "version", lambda name: "0.5.17")
    monkeypatch.setattr(serve_checkpoints.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))
    monkeypatch.setattr(environment, "require_gpu", lambda: None)
    monkeypatch.setattr(environment, "machine", lambda: MACHINE)
    monkeypatch.setattr(environment, "uuids", lambda count: [f"GPU-{index}" for index in range(count)])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


PROFILE = adapt(quick=True, dtypes=["int8"], patterns=["6:8", "2:4"])
ENGINES = ["stock", "control", "6:8", "2:4", "stock, graphs to 2048", "stock again"]


def refuse(uuids: list[str], share: float) -> None:
    raise UnsupportedError(f"{uuids} {share}")


def test_a_gpu_that_others_hold_ends_a_run_that_has_engines_to_start(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "require_free", refuse)
    with pytest.raises(UnsupportedError, match=r"\['GPU-0'\] 0\.9"):
        serve.run(PROFILE, tmp_path / "serve.jsonl", tmp_path)
    assert not Pretender.started


def engines(records: Sequence[ServeRecord]) -> list[str]:
    return list(dict.fromkeys(record.key.engine for record in records))


def test_every_engine_serves_every_workload_stock_first_and_last(pretend: None, tmp_path: Path) -> None:
    summary = run(PROFILE, tmp_path / "r.jsonl", tmp_path / "scratch")
    records = read([tmp_path / "r.jsonl"])
    assert (summary.added, summary.records, summary.failed, summary.waiting) == (18, 18, {}, ())
    assert engines(records) == ENGINES
    assert [record.workload for record in records] == list(QUICK) * 6
    assert [options.plugin for options in Pretender.started] == [False, True, True, True, False, False]
    control, sparse = Pretender.started[1:3]
    assert (control.additional, sparse.additional) == (
        {"slidesparse": {"backend": "dense"}},
        {"slidesparse": {"backend": "auto"}},
    )
    assert control.folder == Pretender.started[0].folder  # stock's own
    assert [options.arguments.get("quantization") for options in Pretender.started[:3]] == [None, "slidesparse", None]
    assert {options.share for options in Pretender.started} == {0.9}
    assert Pretender.stopped == 6


def test_experts_go_with_the_linears(pretend: None, tmp_path: Path) -> None:
    models, backends = ["Qwen3-30B-A3B"], ["auto", "hopper"]
    profile = adapt(quick=True, models=models, dtypes=["int8"], patterns=["6:8"], layers=12, backends=backends)
    with pytest.raises(InputError, match="bf16 of Qwen3-30B-A3B; got experts that nothing packs; needed int8 or fp8"):
        adapt(models=["Qwen3-30B-A3B"], dtypes=["bf16"])
    assert run(profile, tmp_path / "r.jsonl", tmp_path / "scratch").failed == {}
    asked = [options.additional.get("slidesparse") for options in Pretender.started]
    ours = {"dense": "dense", "auto": "auto", "hopper": "sparse"}
    assert asked == [None, *({"backend": name, "experts": experts} for name, experts in ours.items()), None, None]
    (record, *_) = read([tmp_path / "r.jsonl"])
    attention, experts, ends = 5120 * 2048 + 2048 * 4096, 128 * 3 * 768 * 2048, 2 * 151936 * 2048 * 2
    assert serve_checkpoints.checkpoint_bytes(record.key) == 12 * (attention + experts) + ends


def test_six_bits_are_served_as_they_come_too(pretend: None, tmp_path: Path) -> None:
    profile = adapt(quick=True, dtypes=["int8"], patterns=["6:8"], backends=["auto-6bit"], engines=["6:8 auto-6bit"])
    assert run(profile, tmp_path / "r.jsonl", tmp_path / "scratch").failed == {}
    (started,) = Pretender.started
    assert started.additional == {"slidesparse": {"backend": "auto"}}
    assert started.folder.name.endswith("6of8-6bit")


def test_a_run_goes_on_where_the_last_one_ended(pretend: None, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(PROFILE, path, tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5]) + "\n")  # the control still has to decode
    Pretender.asked = []
    assert run(PROFILE, path, tmp_path).added == 13
    assert Pretender.asked[0] == ("decode 64 at 80", None)
    assert len(read([path])) == 18
    assert run(PROFILE, path, tmp_path).added == 0


def test_two_runs_do_not_add_to_one_file(pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "r.jsonl.gz"
    refused: list[str] = []

    def measure(self: Pretender, workload: Workload, rate: float | None) -> Measured:
        with pytest.raises(InputError) as error:  # while this one measures
            run(PROFILE, tmp_path / name, tmp_path / "other")
        refused.append(str(error.value))
        return Pretender.measure(self, workload, rate)

    monkeypatch.setattr(serve, "ServedEngine", type("Busy", (Pretender,), {"measure": measure}))
    profile = replace(PROFILE, engines=("stock",))
    assert run(profile, tmp_path / name, tmp_path).added == 3
    assert len(refused) == 3
    assert refused[0].startswith(f"another bench serve adds to {tmp_path / name}; ")
    assert len(Pretender.started) == 1
    assert run(PROFILE, tmp_path / name, tmp_path).added == 0 + 15  # no longer


def test_a_refused_run_leaves_no_file(pretend: None, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run(adapt(dtypes=["int8"], workloads=["arrivals at 80%"]), tmp_path / "r.jsonl", tmp_path / "scratch")
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"gpu": "Other"}, "gpu Other there; needed Pretend as here; name a new file with --out"),
        *(({name: "1"}, f"{name} 1 there; needed") for name in ("driver", "vllm")),
    ],
)
def test_records_of_another_machine_are_not_added_to(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: dict[str, str], words: str
) -> None:
    here = replace(MACHINE, driver="2")
    path = tmp_path / "r.jsonl"
    monkeypatch.setattr(environment, "machine", lambda: replace(here, **there))
    run(replace(PROFILE, engines=("stock",)), path, tmp_path)
    monkeypatch.setattr(environment, "machine", lambda: here)
    with pytest.raises(InputError, match=f"r.jsonl was measured elsewhere; got {words}"):
        run(PROFILE, path, tmp_path)
    assert len(Pretender.started) == 1


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_last_line_without_an_end_is_ended_before_more_come(pretend: None, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    run(replace(PROFILE, engines=("stock",)), path, tmp_path)
    with open_records(path, "r") as file:
        text = file.read()
    path.unlink()
    with open_records(path, "x") as file:
        file.write(text.removesuffix("\n"))
    assert run(PROFILE, path, tmp_path).added == 15
    assert len(read([path])) == 18


def test_a_budget_ends_a_run_between_engines_and_keeps_the_checkpoints(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100000, 100))
    monkeypatch.setattr(serve.time, "monotonic", lambda: float(next(clock)))
    summary = run(replace(PROFILE, budget_s=1000.0), tmp_path / "r.jsonl", tmp_path / "scratch")
    assert 0 < summary.added < 18
    assert len(summary.waiting) == 6 - summary.added // 3
    assert "run the same command again: Qwen2.5-7B int8 " in summary.describe()
    assert list((tmp_path / "scratch").glob("[!.]*"))


@pytest.mark.parametrize(("dies_at", "workload"), [("start", None), ("mixed", "mixed")])
def test_an_engine_that_dies_is_a_record_and_the_others_go_on(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str, workload: str | None
) -> None:
    monkeypatch.setattr(Pretender, "dies_at", dies_at)
    path = tmp_path / "r.jsonl"
    summary = run(PROFILE, path, tmp_path)
    failed = [record for record in read([path]) if record.why_not is not None]
    assert engines(failed) == ["control", "6:8", "2:4"]
    assert {record.workload and record.workload.name for record in failed} == {workload}
    assert len(summary.failed) == 3
    assert Pretender.stopped == 6
    assert engines(read([path]))[-1] == "stock again"
    assert run(PROFILE, path, tmp_path).added == 0  # it is not started again


@pytest.mark.parametrize(
    "profile",
    [
        replace(PROFILE, workloads=FULL, engines=("6:8",)),
        adapt(dtypes=["int8"], workloads=["arrivals at 80%"]),
        adapt(dtypes=["int8"], workloads=["burst"], soak_s=60.0),
    ],
)
def test_without_stock_arrivals_are_refused_before_anything_starts(
    pretend: None, tmp_path: Path, profile: ServeProfile
) -> None:
    with pytest.raises(InputError):
        run(profile, tmp_path / "r.jsonl", tmp_path)
    assert not Pretender.started


def test_others_go_on_after_stock_died(pretend: None, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(replace(PROFILE, workloads=FULL, engines=("stock",)), path, tmp_path)
    (first, *_) = read([path])
    path.write_text(to_line(replace(first, workload=None, seconds=(), why_not="no memory")) + "\n")
    summary = run(replace(PROFILE, workloads=FULL, engines=("stock", "6:8")), path, tmp_path)
    assert summary.added == 3  # burst, mixed, and why there are no arrivals
    assert "no stock engine" in summary.failed["Qwen2.5-7B int8 6:8"]


def test_sglang_and_vllm_are_not_mixed(pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    path, asked = tmp_path / "r.jsonl", {"quick": True, "dtypes": ["int8"], "patterns": ["6:8"], "gpus": 2}
    assert run(adapt(**asked), path, tmp_path).added == 5 * 3
    assert Pretender.started[0].arguments == {"tensor_parallel_size": 2}
    profile = adapt(**asked, server="sglang", eagle=2.5)
    assert run(profile, path, tmp_path).added == 4 * 3  # none with other graphs
    assert run(profile, path, tmp_path).added == 0
    ways = {record.way for record in read([path])}
    assert ways == {Way(), Way("sglang 0.5.17", False, "EAGLE-3 by 3 with 2.5 tokens a step")}
    assert [options.server for options in Pretender.started] == ["vllm"] * 5 + ["sglang"] * 4
    options = Pretender.started[-1]
    assert (options.arguments["tp_size"], options.arguments["speculative_algorithm"]) == (2, "EAGLE3")
    assert options.environment["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
    assert Path(options.arguments["speculative_draft_model_path"]).is_dir()
    assert [name for name, _ in Pretender.asked[-3:]] == ["answers 1", "answers 8", "answers 64"]


def test_rivals_are_stock_with_weights_of_their_own(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[torch.dtype, str | None]] = []

    def write(folder: Path, config: Any, dtype: torch.dtype, *given: Any, four_bits: str | None = None) -> None:
        written.append((dtype, four_bits))
        write_nothing(folder, config, dtype, given[0], given[1])

    monkeypatch.setattr(serve_checkpoints, "write_checkpoint", write)
    profile = adapt(quick=True, dtypes=["int8"], patterns=["6:8"], rivals=["fp8", "w4a8", "w4a16"])
    run(profile, tmp_path / "r.jsonl", tmp_path)
    assert engines(read([tmp_path / "r.jsonl"]))[3:6] == ["stock FP8", "stock W4A8", "stock W4A16"]
    assert written[2:] == [(torch.float8_e4m3fn, None), (torch.bfloat16, "w4a8"), (torch.bfloat16, "w4a16")]
    rivals = Pretender.started[3:6]
    assert {(options.plugin, str(options.additional)) for options in rivals} == {(False, "{}")}
    assert [options.folder.name for options in rivals] == [f"Qwen2.5-7B-28-{w}-dense" for w in ("fp8", "w4a8", "w4a16")]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_checkpoints.shutil, "disk_usage", lambda path: SimpleNamespace(free=int(27e9)))
    with pytest.raises(UnsupportedError, match=r"got 27\.0 GB in .* needed 27\.\d GB; name a larger disk"):
        run(PROFILE, tmp_path / "r.jsonl", tmp_path / "scratch")
    assert not list((tmp_path / "scratch").glob("[!.]*"))
    run(replace(PROFILE, engines=("stock", "6:8")), tmp_path / "r.jsonl", tmp_path / "scratch")  # two need less


def test_missing_vllm_is_one_line(
    pretend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert main(["bench", "serve", "--out", str(tmp_path / "r.jsonl")]) == 1
    assert (
        capsys.readouterr().err
        == 'slidesparse: slidesparse bench serve needs vLLM; pip install ".[vllm]" in a checkout of slidesparse\n'
    )


def test_the_command_line_reaches_the_engines(
    pretend: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["bench", "serve", "--quick", "--dtype", "int8", "--patterns", "6:8", "--out", str(tmp_path / "r.jsonl")]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["added"] == 15
    monkeypatch.setattr(Pretender, "dies_at", "start")
    assert main([*command[:-1], str(tmp_path / "other.jsonl")]) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--patterns", "6:9"], ["--patterns", "dense"], ["--models", "GPT"], ["--dtype", "fp16"]),
        *(["--engines", "9:9"], ["--gpus", "0"], ["--gpus", "2"], ["--graphs", "99999"]),
        *(["--graphs", "2048", "--engines", "stock", "stock again"], ["--tokens", "5"], ["--workloads", "bursts"]),
        *(["--soak", "0"], ["--budget-s", "nan"], ["--layers", "0"], ["--backends", "cutlass"]),
        *(["--server", "sglang", "--graphs", "512"], ["--eagle", "9"]),
        *(["--server", "sglang", "--dtype", "bf16"], ["--rivals", "w4a4"]),
        *(["--profile", "quick"], ["--scratch", "/dev/null/here"], ["--out", "/dev/null/here.jsonl"], ["--out", "/"]),
    ],
)
def test_wrong_arguments_get_one_line(
    pretend: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    assert main(["bench", "serve", "--out", str(tmp_path / "r.jsonl"), *wrong]) == 1
    error = capsys.readouterr().err
    assert error.startswith("slidesparse: ")
    assert error.count("\n") == 1
    assert "Errno" not in error
    assert not Pretender.started
