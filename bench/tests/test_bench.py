"""The benchmarks on a CPU: a clock of the test's own in place of a GPU's, the reference in place of fast kernels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_records import IDLE, LOADED, MACHINE, case

from slidesparse.cli import main
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.reference import Reference
from slidesparse.tuning.checking import relative_error
from slidesparse.weights.quant import QUANT_NAMES
from slidesparse_bench import environment, problems, runner
from slidesparse_bench.comparison import Refusal, Session, Subject, compare
from slidesparse_bench.interleaved import MIN_ROUNDS, summarize, time_passes
from slidesparse_bench.kernels import operands
from slidesparse_bench.known_models import MODELS, TYPES
from slidesparse_bench.problems import PROFILES
from slidesparse_bench.records import ALL, DENSE_VARIANT, Record, read_records

CPU = torch.device("cpu")


@dataclass
class FakePass:
    """Takes ``us`` for each call, times ``drift`` more with every pass of anybody."""

    us: float
    log: list[str] = field(default_factory=list)
    name: str = "a"
    copies: int = 2
    method: str = "graph"
    drift: float = 1.0

    def launch(self) -> Callable[[], float]:
        self.log.append(f"launch {self.name}")
        us = self.us * self.drift ** len(self.log)

        def read() -> float:
            self.log.append(f"read {self.name}")
            return us

        return read


@dataclass
class FakeStopwatch:
    """Runs the calls once, checks the last result, and reports the times that it was given, one a subject."""

    times: Iterator[float] = field(default_factory=lambda: itertools.repeat(10.0))
    l2_bytes: int = 1000
    works: bool = True
    captures: list[bool] = field(default_factory=list)

    def free_bytes(self) -> int:
        return 1 << 20

    def begin(self) -> None:
        self.captures.clear()

    def wait(self) -> None:
        if not self.works:
            raise RuntimeError("CUDA error: an illegal instruction was encountered")

    def prepare(self, calls: Sequence[Callable[[], Any]], capture: bool, check: Callable[[Any], None]) -> FakePass:
        self.captures.append(capture)
        check([call() for call in calls][-1])
        return FakePass(next(self.times), copies=len(calls))

    def host_us(self, call: Callable[[], Any]) -> float:
        call()
        return 3.0


def session(stopwatch: FakeStopwatch | None = None, patterns: tuple[str, ...] = ("2:4", "6:8", "inf")) -> Session:
    clocks = itertools.cycle([IDLE, LOADED])
    return Session(
        stopwatch or FakeStopwatch(), MACHINE, lambda: next(clocks), 1e-4, lambda _: patterns, ("reference",), CPU
    )


def subject(variant: str, result: torch.Tensor, algorithm: str = "only", backend: str = "torch") -> Subject:
    exact = torch.ones(4, 4)
    check = partial(relative_error, reference=exact)
    return Subject(variant, backend, algorithm, torch.Tensor.clone, (result,), 64, check, ideal_speedup=1.0)


# -- problems ------------------------------------------------------------------------------------------------------


def test_choices_are_checked() -> None:
    quick = PROFILES["quick"]
    assert runner.adapt(quick) == quick
    chosen = runner.adapt(quick, patterns=["4:6"], tokens=[64, 64, 7])
    assert (chosen.model_patterns, chosen.tokens) == (("4:6",), (64, 7))
    assert runner.adapt(quick, ["int8", "int8"], patterns=["6:8", "6:8"]).dtypes == ("int8",)
    for wrong in ({"patterns": ["5:8"]}, {"patterns": ["6:8", "dense"]}, {"tokens": [0]}):
        with pytest.raises(InputError):
            runner.adapt(quick, **wrong)  # type: ignore[arg-type]
    adapted = runner.adapt(quick, ["fp16"], ["BitNet-2B"], 5.0)
    assert (adapted.dtypes, adapted.models, adapted.budget_s) == (("fp16",), ("BitNet-2B",), 5.0)
    for arguments in ((["int4"],), (None, ["GPT"]), (None, None, 0.0), (None, None, float("nan"))):
        with pytest.raises(InputError):
            runner.adapt(quick, *arguments)


# -- timing --------------------------------------------------------------------------------------------------------


def test_a_drifting_clock_hits_all_variants_alike() -> None:
    # Everything takes 0.1 % longer with each pass: timed one after the other, b would seem slower than a.
    log: list[str] = []
    a, b = FakePass(10.0, log, "a", drift=1.001), FakePass(10.0, log, "b", drift=1.001)
    samples, noise = time_passes([a, b], 1e-3)
    one, two = (summarize(times, a).median_us for times in samples)
    assert len(samples[0]) > MIN_ROUNDS
    assert one == pytest.approx(two, rel=0.002)
    assert noise < 0.002
    assert samples[0][-1] > 1.02 * samples[0][0]


# -- one comparison ------------------------------------------------------------------------------------------------


def test_the_fastest_alternative_is_recorded_with_all_that_were_tried() -> None:
    ones = torch.ones(4, 4)
    subjects = [subject(DENSE_VARIANT, ones, name) for name in ("slow", "fast", "middle")] + [subject("6:8", ones)]
    records = compare(
        session(FakeStopwatch(iter([30.0, 10.0, 20.0, 5.0]))), case(), subjects, [Refusal("2:4", "x", "no")]
    )
    dense, sparse, refused = records
    assert (dense.algorithm, dense.timing and dense.timing.median_us) == ("fast", 10.0)
    assert [(tried.name, tried.median_us) for tried in dense.tried] == [
        ("slow", 30.0),
        ("fast", 10.0),
        ("middle", 20.0),
    ]
    assert (sparse.variant, sparse.timing and sparse.timing.median_us) == ("6:8", 5.0)
    assert (refused.variant, refused.timing, refused.why_not) == ("2:4", None, "no")
    assert len({r.started for r in records}) == 1
    assert dense.noise == 0.0
    assert (dense.clocks_before, dense.clocks_after) == (IDLE, LOADED)


@pytest.mark.parametrize("wrong", [torch.full((4, 4), 1.02), torch.full((4, 4), torch.nan)])
def test_a_wrong_result_is_never_timed(wrong: torch.Tensor) -> None:
    good, bad = compare(session(), case(), [subject(DENSE_VARIANT, torch.ones(4, 4)), subject("6:8", wrong)])
    assert good.timing is not None
    assert bad.timing is None
    assert (bad.why_not or "").startswith("WRONG RESULT")


@pytest.mark.parametrize("error", [RuntimeError, ValueError])  # torch's for scales that it does not take
def test_a_refusal_of_the_library_is_a_reason_and_a_broken_device_is_not(error: type[Exception]) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise error("self.size(0) needs to be greater than 16\nmore")

    def exhaust(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    ones = torch.ones(4, 4)
    subjects = [replace(subject("6:8", ones), run=refuse), replace(subject("4:6", ones), run=exhaust)]
    one, two = compare(session(), case(), subjects)
    assert one.why_not == "self.size(0) needs to be greater than 16"
    assert two.why_not == "out of memory"
    assert one.noise is None
    with pytest.raises(RuntimeError, match="illegal instruction"):
        compare(session(FakeStopwatch(works=False)), case(), subjects)


# -- whole benchmarks ----------------------------------------------------------------------------------------------

TINY = replace(PROFILES["quick"], models=("Tiny",), tokens=(32, 64), squares=(32,), kernel_columns=(48,))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(MODELS, "Tiny", ((48, 32), (32, 32), (96, 32), (32, 48)))
    monkeypatch.setattr(Reference, "accelerated", True)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("dtype", TYPES)
def test_every_benchmark_runs_and_is_right(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "r.jsonl"
    profile = replace(TINY, dtypes=(dtype,), budget_s=1000.0)
    stopwatch = FakeStopwatch()
    summary = runner.run(problems.BENCHMARKS, profile, session(stopwatch), path)
    records = read_records([path])
    assert not summary.wrong
    assert not summary.left_out
    assert not summary.refused
    assert summary.records == len(records) == sum(r.timing is not None for r in records)
    assert summary.describe().startswith(f"{len(records)} records in ")
    cases = {c for name in problems.BENCHMARKS for c in problems.cases(name, profile)}
    assert {r.case for r in records} == cases
    measured = {name: {r.variant for r in records if r.case.benchmark == name} for name in problems.BENCHMARKS}
    assert measured["gemm"] == {"dense", "2:4", "6:8", "inf"}
    assert measured["linear"] == {"dense", "2:4", "6:8", "auto 2:4", "auto 6:8"}
    assert measured["pack"] == {f"{step} {p}" for step in ("pack", "prepare") for p in ("2:4", "6:8")}
    quantised = dtype in QUANT_NAMES
    fused = {f"{prologue} lift 6:8" for prologue in ("rms_norm", "add_rms_norm", "silu_mul")}
    assert measured["kernels"] == ({"copy", "quantize", "lift 2:4", "lift 6:8", *fused} if quantised else set())
    exact = [r for r in records if r.case.benchmark in ("kernels", "pack") and not r.variant.startswith("prepare")]
    assert all(r.error == 0 for r in exact)
    assert all(r.timing and (r.timing.host_us == 3.0) == (r.case.benchmark == "linear") for r in records)


@pytest.mark.usefixtures("tiny")
def test_bytes_are_those_of_the_formats(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    runner.run(["gemm"], replace(TINY, dtypes=("int8",)), session(), path)
    found = {(r.case.layer, r.case.tokens, r.variant): r.n_bytes for r in read_records([path])}
    scales, out = 4 * (64 + 48), 2 * 64 * 48
    assert found["qkv", 64, "dense"] == 64 * 32 + 48 * 32 + scales + out
    # Lifted activations are 1.5 times as wide; a weight takes 0.75 bytes and 2 bits of index for each kept value.
    assert found["qkv", 64, "6:8"] == 64 * 48 + 48 * 32 * 0.9375 + scales + out


@pytest.mark.usefixtures("tiny")
def test_a_backend_that_auto_never_takes_keeps_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "accelerated", False)
    path = tmp_path / "r.jsonl"
    runner.run(["gemm"], replace(TINY, dtypes=("int8",)), session(), path)
    names = {scaled: {r.variant for r in read_records([path]) if r.case.scaled is scaled} for scaled in (True, False)}
    assert names == {True: {"dense", "reference 6:8"}, False: {"dense", "2:4", "6:8", "inf"}}


@pytest.mark.usefixtures("tiny")
def test_a_spent_budget_is_kept_and_said(tmp_path: Path) -> None:
    ticks = itertools.count()
    path = tmp_path / "r.jsonl"
    profile = replace(TINY, dtypes=("int8",), budget_s=15.0)

    def clock() -> float:
        return float(next(ticks))  # a second passes with every look

    summary = runner.run(["gemm"], profile, session(), path, clock)
    records = read_records([path])
    out = [r for r in records if r.variant == ALL]
    assert [r.case.describe() for r in out] == list(summary.left_out)
    assert 0 < len(out) < len(problems.cases("gemm", profile))
    assert {r.why_not for r in out} == {runner.LEFT_OUT}
    # Those that were left out come last.
    assert records[-1].variant == ALL
    assert f"left out, the budget was spent: {out[0].case.describe()}" in summary.describe()


@pytest.mark.usefixtures("tiny")
def test_a_wrong_kernel_is_shouted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Reference.matmul

    def wrong(self: Reference, *arguments: Any) -> torch.Tensor:
        return right(self, *arguments) * 1.1

    monkeypatch.setattr(Reference, "matmul", wrong)
    summary = runner.run(["gemm"], replace(TINY, dtypes=("int8",)), session(), tmp_path / "r.jsonl")
    assert "gemm int8 Tiny qkv M=64 N=48 K=32, 6:8 by reference the backend's choice" in summary.wrong
    assert "WRONG RESULT: gemm int8 Tiny" in summary.describe()


@pytest.mark.usefixtures("tiny")
def test_a_dead_gpu_ends_the_run_with_one_line_and_keeps_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    done: list[Record] = []

    def measure(of: Session, which: Any) -> list[Record]:
        if done:
            raise RuntimeError("CUDA error: an illegal instruction was encountered\nCompile with ...")
        done.extend(compare(of, which, [subject(DENSE_VARIANT, torch.ones(4, 4))]))
        return list(done)

    monkeypatch.setitem(runner.MEASURE, "gemm", measure)
    with pytest.raises(UnsupportedError) as caught:
        runner.run(["gemm"], TINY, session(), path)
    assert "the GPU failed in gemm int8 Tiny qkv M=32" in str(caught.value)
    assert read_records([path]) == done


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("precious")
    with pytest.raises(InputError):
        runner.run(["gemm"], TINY, session(), path)
    assert path.read_text() == "precious"
    with pytest.raises(InputError, match="cannot write the records; got No such file or directory: "):
        runner.run(["gemm"], TINY, session(), tmp_path / "none" / "r.jsonl")


# -- the environment and the command line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "clocks"),
    [("1980, 120.5, 40", (1980.0, 120.5, 40.0)), ("1980, [N/A], 40", (1980.0, None, 40.0)), (None, (None, None, None))],
)
def test_clocks_are_what_the_gpu_says(
    monkeypatch: pytest.MonkeyPatch, answer: str | None, clocks: tuple[float | None, ...]
) -> None:
    monkeypatch.setattr(environment, "_query", lambda fields: answer)
    found = environment.clocks()
    assert (found.sm_mhz, found.power_w, found.temperature_c) == clocks


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr(runner, "cuda_session", lambda profile: session())
    monkeypatch.setitem(problems.PROFILES, "quick", TINY)
    path = tmp_path / "r.jsonl"
    assert main(["bench", "gemm", "--dtype", "int8", "--out", str(path), *(["--json"] if as_json else [])]) == 0
    out = capsys.readouterr().out
    assert {r.case.dtype for r in read_records([path])} == {"int8"}
    if as_json:
        assert json.loads(out)["records"] == len(read_records([path]))
    else:
        assert out.endswith(f"{path}\n")


def test_a_backend_of_six_bits_is_measured_with_such_weights() -> None:
    size = ("6:8", "int8", 64, 128, torch.device("cpu"))
    assert operands.packed_weight(*size, operands.rounding_for("hopper-6bit", "int8")).bits == 6
    eight, six = (operands.operand(name, *size)[0] for name in ("hopper", "hopper-6bit"))
    assert six.nbytes * 5 == eight.nbytes * 4
    asked = [operands.problem_of(case(), "6:8", size[-1], name).bits for name in ("hopper", "hopper-6bit")]
    assert asked == [8, 6]
    assert operands.rounding_for("hopper-6bit", "fp8") == "absmax"  # which the backend refuses
