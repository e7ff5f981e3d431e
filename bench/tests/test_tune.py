"""Tuning on a CPU: plans, layer times out of records, job is stored, and how it fails."""

from __future__ import annotations

import errno
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_records import MACHINE, case, record, too_old
from checkpoints import make_checkpoint
from test_bench import FakeStopwatch, session

from slidesparse.base import file_lock
from slidesparse.cli import main
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm import Problem, speed_files
from slidesparse.gemm.cusparselt import tune as cusparselt_tune
from slidesparse.gemm.reference import Reference
from slidesparse.gemm.speed import Installation, LayerSpeed, WrongForm
from slidesparse.gemm.speed_files import load_speeds, tuned_path
from slidesparse.offline import tune
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse_bench import comparison, problems, runner
from slidesparse_bench import layer_speeds as speed
from slidesparse_bench.records import DENSE_VARIANT, Case, Record, Tried

GPU = "Test GPU"
LIBRARIES = {"dense": "torch 2.11", "cusparselt": "cuSPARSELt 0.8"}
HERE = Installation(GPU, "9.0", MACHINE.driver, LIBRARIES)


def _linear(tokens: int, **options: Any) -> Case:
    return replace(case(benchmark="linear", tokens=tokens), **options)


def _ours(of: Case, dense: float, sparse: float | None, **options: Any) -> list[Record]:
    why = None if sparse else "it refused"
    return [
        record(of, DENSE_VARIANT, dense, backend="dense", **options),
        record(of, "6:8", sparse, backend="cusparselt", why_not=why, **options),
    ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU as far as its name goes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: GPU)
    monkeypatch.setattr(tune, "libraries", lambda: LIBRARIES)
    monkeypatch.setattr(tune, "installation", lambda: HERE)


# -- layer times ---------------------------------------------------------------------------------------------------


def test_layer_times_are_those_that_auto_may_take() -> None:
    at_64, at_256 = _linear(64), _linear(256)
    records = [
        *_ours(at_256, 10.0, 4.0),
        *_ours(at_64, 3.0, None),
        record(at_64, DENSE_VARIANT, 1.0, backend="vllm"),  # another library's layer
        record(at_64, "auto 6:8", 1.0, backend="auto"),
        record(at_64, "cusparselt-bf16 6:8", 1.0, backend="cusparselt-bf16"),
        record(replace(at_64, benchmark="gemm"), DENSE_VARIANT, 1.0, backend="dense"),
    ]
    assert speed.layer_speeds(records) == [
        LayerSpeed("int8", 48, 32, (64, 256), {"dense": (3.0, 10.0), "cusparselt 6:8": (None, 4.0)})
    ]


WRONG = WrongForm("int8", 48, 32, "cusparselt 6:8")


def _wrong(of: Case, **options: Any) -> list[Record]:
    why = "WRONG RESULT; got relative error 0.1; needed at most 0.01"
    return [
        record(of, DENSE_VARIANT, 3.0, backend="dense", **options),
        record(of, "6:8", None, backend="cusparselt", why_not=why, **options),
    ]


def test_a_form_that_is_wrong_at_one_number_of_tokens_has_no_time_at_any() -> None:
    at_64, at_256 = _linear(64), _linear(256)
    at_48 = replace(at_64, out_features=64)
    records = [*_ours(at_256, 10.0, 4.0), *_wrong(at_64), *_ours(at_48, 3.0, 2.0)]
    assert speed.wrong_forms(records) == [WRONG]
    assert [layer.us["cusparselt 6:8"] for layer in speed.layer_speeds(records)] == [(None, None), (2.0,)]
    others = [
        record(at_64, DENSE_VARIANT, None, backend="dense", why_not="WRONG RESULT"),
        record(at_64, "auto 6:8", None, backend="auto", why_not="WRONG RESULT"),
        record(replace(at_64, benchmark="gemm"), "6:8", None, backend="cusparselt", why_not="WRONG RESULT"),
    ]
    assert speed.wrong_forms(others) == []
    whole = Case("grouped", "Mixtral-8x7B", "experts, balanced", "int8", 64, 3 * 14336, 4096)
    experts = record(whole, "6:8", None, backend="hopper", why_not="WRONG RESULT")
    assert speed.wrong_forms([experts]) == [WrongForm("int8", 28672, 4096, "8 experts, 2 a token: hopper 6:8")]


def test_a_later_comparison_that_is_right_is_believed() -> None:
    old, new = "2026-11-20T10:00:00.000000+00:00", "2026-11-21T10:00:00.000000+00:00"
    wrong, right = _wrong(_linear(64), started=old), _ours(_linear(64), 3.0, 2.0, started=new)
    assert speed.wrong_forms(right + wrong) == []
    assert speed.wrong_forms(_ours(_linear(64), 3.0, 2.0, started=old) + _wrong(_linear(64), started=new)) == [WRONG]


def test_the_latest_comparison_counts() -> None:
    old, new = "2026-11-20T10:00:00.000000+00:00", "2026-11-21T10:00:00.000000+00:00"
    expected = [LayerSpeed("int8", 48, 32, (64,), {"dense": (3.0,), "cusparselt 6:8": (2.0,)})]
    older, newer = _ours(_linear(64), 9.0, 1.0, started=old), _ours(_linear(64), 3.0, 2.0, started=new)
    assert speed.layer_speeds(older + newer) == expected
    assert speed.layer_speeds(newer + older) == expected


def test_times_of_experts_are_those_of_whole_layers() -> None:
    whole = Case("grouped", "Mixtral-8x7B", "experts, balanced", "int8", 64, 3 * 14336, 4096)
    at_256 = replace(whole, tokens=256)
    records = [
        record(whole, DENSE_VARIANT, 40.0, backend="vllm"),
        record(whole, "6:8", 30.0, backend="hopper"),
        record(at_256, DENSE_VARIANT, 50.0, backend="vllm"),
        record(at_256, "6:8", None, backend="hopper", why_not="out of memory"),
        record(replace(whole, layer="experts, skewed"), "6:8", 1.0, backend="hopper"),
        record(replace(whole, layer="gate_up, balanced"), "6:8", 1.0, backend="hopper"),
        record(whole, "6:8", 1.0, backend="reference"),
    ]
    (layer,) = speed.layer_speeds(records)
    eight = "8 experts, 2 a token: "
    us = {f"{eight}dense": (40.0, 50.0), f"{eight}hopper 6:8": (30.0, None)}
    assert layer == LayerSpeed("int8", 2 * 14336, 4096, (64, 256), us)
    assert speed.describe([layer]) == [("28672x4096", "int8", f"{eight}hopper 6:8", "64: 0.75  256: -")]
    linear = _ours(_linear(64), 3.0, 2.0)
    assert len(speed.layer_speeds(records + linear)) == 2


def test_records_without_layers_are_refused() -> None:
    with pytest.raises(InputError, match="records without a layer's time"):
        speed.layer_speeds([record(case(), DENSE_VARIANT, 1.0, backend="dense")])


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 10 us fill a stretch."""
    monkeypatch.setattr(comparison, "STRETCH_S", 0.01)


@pytest.mark.usefixtures("short_stretches")
def test_layers_are_measured_on_every_backend_that_auto_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "accelerated", True)
    monkeypatch.setitem(problems.MODELS, "Tiny", ((48, 32), (32, 32), (96, 32), (32, 32)))
    job = tune.make_job(["Tiny"], ["6:8"], ["int8"], [64, 32])
    assert [[len(lap) for lap in laps] for laps in job.laps()] == [[3, 3]]  # at two M's; two layers have one size
    watched = session(FakeStopwatch())
    ((layers, wrong),) = tune.measure_layers(job, watched)
    assert wrong == []
    assert [(layer.out, layer.columns, layer.tokens) for layer in layers] == [
        (48, 32, (32, 64)),
        (32, 32, (32, 64)),
        (96, 32, (32, 64)),
    ]
    assert all(layer.us == {"dense": (10.0, 10.0), "reference 6:8": (10.0, 10.0)} for layer in layers)


@pytest.mark.usefixtures("short_stretches")
def test_a_layer_that_a_backend_cannot_run_has_no_time_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "accelerated", True)

    def why_not(self: Reference, problem: Problem) -> str | None:
        return "not this one" if self.name == "reference" and problem.out_features == 96 else None

    monkeypatch.setattr(Reference, "why_not", why_not)
    monkeypatch.setitem(problems.MODELS, "Tiny", ((48, 32), (32, 32), (96, 32), (32, 64)))
    job = tune.make_job(["Tiny"], ["6:8"], ["int8"], [32], ["reference"])
    ((layers, _),) = tune.measure_layers(job, session(FakeStopwatch()))
    assert {layer.out: "reference 6:8" in layer.us for layer in layers} == {48: True, 96: False, 32: True}


@pytest.mark.usefixtures("short_stretches")
def test_a_layer_that_is_wrong_while_it_is_measured_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "accelerated", True)
    monkeypatch.setitem(problems.MODELS, "Tiny", ((48, 32), (32, 32), (96, 32), (32, 32)))
    right = Reference.matmul

    def wrong_beyond_32_tokens(self: Reference, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return right(self, x, *arguments) * (1.1 if self.name == "reference" and len(x) > 32 else 1)

    monkeypatch.setattr(Reference, "matmul", wrong_beyond_32_tokens)
    job = tune.make_job(["Tiny"], ["6:8"], ["int8"], [64, 32])
    ((layers, wrong),) = tune.measure_layers(job, session(FakeStopwatch()))
    assert wrong == [WrongForm("int8", out, 32, "reference 6:8") for out in (48, 32, 96)]
    assert {layer.us["reference 6:8"] for layer in layers} == {(None, None)}


def test_without_cusparselt_no_algorithm_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(tune, "tune_shapes", lambda *_, **__: pytest.fail("it searched"))
    assert tune.search_algorithms(tune.make_job(None, None, None, [64], ["hopper"])) == []


# -- plans ---------------------------------------------------------------------------------------------------------


def test_a_plan_names_each_packed_shape_once() -> None:
    job = tune.make_job(["BitNet-2B"], ["2:4", "6:8"], None, [64])
    assert job.models[0].dtypes == ("int8", "fp8")
    assert ("int8", 2560, 2560) in job.packed_shapes()
    assert ("fp8", 2560, 3840) in job.packed_shapes()
    assert len(job.packed_shapes()) == len(set(job.packed_shapes())) == 16
    # Half of 320 groups slide, to 12 columns each.
    assert ("int8", 2560, 1920) in tune.make_job(["BitNet-2B"], ["6:8@50%"], None, [64]).packed_shapes()


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_a_checkpoint_is_tuned_as_a_server_runs_it(family: str, tmp_path: Path) -> None:
    """The linears that read one input in one module are one: by running the model, whatever their names."""
    make_checkpoint(tmp_path / "m", family)
    job = tune.make_job([str(tmp_path / "m")], None, None, [64])
    (model,) = job.models
    assert {size[1:] for size in model.sizes} == {(128, 64), (64, 64), (304, 64), (64, 152)}
    assert (model.name, model.patterns, model.dtypes) == (str(tmp_path / "m"), tune.PATTERNS, ("int8", "fp8"))
    assert [[len(lap) for lap in laps] for laps in job.laps()] == [[4], [4]]


def test_a_pruned_checkpoint_is_tuned_for_its_patterns_and_its_type(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    options = PruneOptions("6:8", "fp8", layers={"re:.*down_proj": "4:6", "re:.*o_proj": "dense"})
    prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    (model,) = tune.make_job([str(tmp_path / "s")], None, None, [64]).models
    assert (set(model.patterns), model.dtypes) == ({"6:8", "4:6"}, ("fp8",))
    assert {size[1:] for size in model.sizes} == {(128, 64), (304, 64), (64, 152)}
    (model,) = tune.make_job([str(tmp_path / "s")], ["2:4"], ["int8"], [64]).models
    assert (model.patterns, model.dtypes) == (("2:4",), ("int8",))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["GPT"], None, None, [64]), "unknown model; got 'GPT'; needed a checkpoint's folder or one of Llama"),
        ((None, ["dense"], None, [64]), "a pattern to measure"),
        ((None, None, ["int4"], [64]), "unknown dtype"),
        ((None, None, None, [0]), "tokens to tune for"),
        ((None, None, None, []), "tokens to tune for"),
    ],
)
def test_wrong_plans_are_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        tune.make_job(*arguments)
    assert "\n" not in str(error.value)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_layer_times_of_records_become_the_users_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(r.to_line() + "\n" for r in _ours(_linear(64), 4.0, 3.0)))
    assert main(["tune", "--from", str(path)]) == 0
    assert "cusparselt 6:8" in (out := capsys.readouterr().out)
    assert "64: 0.75" in out
    table = load_speeds(tuned_path(HERE))
    assert table is not None
    assert table.layers[0].us == {"dense": (4.0,), "cusparselt 6:8": (3.0,)}


@pytest.mark.usefixtures("gpu")
def test_wrong_forms_are_named_in_the_table_and_by_the_exit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(r.to_line() + "\n" for r in _ours(_linear(256), 4.0, 3.0) + _wrong(_linear(64))))
    assert main(["tune", "--from", str(path)]) == 1
    assert "WRONG RESULT: int8 48x32, cusparselt 6:8: auto does not take it here" in capsys.readouterr().out
    table = load_speeds(tuned_path(HERE))
    assert table is not None
    assert table.wrong == (WRONG,)
    assert table.layers[0].us["cusparselt 6:8"] == (None, None)
    monkeypatch.setattr(tune, "search_algorithms", lambda job: [])
    monkeypatch.setattr(tune, "measure_layers", lambda job, where: [([], [WRONG]), (list(table.layers), [])])
    monkeypatch.setattr(runner, "cuda_session", lambda profile: session())
    assert main(["tune", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] == [
        {"dtype": "int8", "out": 48, "columns": 32, "name": "cusparselt 6:8"}
    ]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("as_json", [False, True])
def test_what_bench_finds_wrong_is_marked(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "cuda_session", lambda profile: session())
    monkeypatch.setattr(problems, "cases", lambda name, profile: [_linear(64)])
    monkeypatch.setitem(runner.MEASURE, "linear", lambda of, case: _ours(case, 4.0, 3.0))
    words = ["bench", "linear", *(["--json"] if as_json else []), "--out"]
    assert main([*words, str(tmp_path / "right.jsonl")]) == 0
    assert not tuned_path(HERE).exists()
    found = [replace(one, tried=(Tried("it", None, one.why_not),)) for one in _wrong(_linear(64))]
    monkeypatch.setitem(runner.MEASURE, "linear", lambda of, case: found)
    capsys.readouterr()
    assert main([*words, str(tmp_path / "wrong.jsonl")]) == 1
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out)["wrong"]
    else:
        assert out.endswith("WRONG RESULT: int8 48x32, cusparselt 6:8: auto does not take it here\n")
    table = load_speeds(tuned_path(HERE))
    assert table is not None
    assert (table.wrong, table.layers) == ((WRONG,), ())


@pytest.mark.usefixtures("gpu")
def test_records_of_another_driver_are_kept_as_its_times(tmp_path: Path) -> None:
    path, older = tmp_path / "r.jsonl", replace(MACHINE, driver="570.1")
    path.write_text("".join(r.to_line() + "\n" for r in _ours(_linear(64), 4.0, 3.0, machine=older)))
    assert main(["tune", "--from", str(path)]) == 0
    assert load_speeds(tuned_path(HERE)) is None
    table = load_speeds(tuned_path(replace(HERE, driver="570.1")))
    assert table is not None
    assert table.installation.driver == "570.1"


@pytest.mark.usefixtures("gpu")
def test_a_table_that_cannot_be_kept_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed_files, "_UNWRITTEN", {})
    path = tmp_path / "r.jsonl"
    path.write_text("".join(r.to_line() + "\n" for r in _ours(_linear(64), 4.0, 3.0)))
    (tmp_path / "cache").write_text("no folder")
    assert main(["tune", "--from", str(path)]) == 1
    assert "there is no folder to keep measurements in" in (err := capsys.readouterr().err)
    assert err.count("\n") == 1


@pytest.mark.usefixtures("gpu")
def test_a_file_system_without_locks_keeps_times_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", no_locks)
    layer = LayerSpeed("int8", 64, 64, (16,), {"dense": (2.0,), "cusparselt 6:8": (1.0,)})
    kept = load_speeds(tune.store_layers([layer]))
    assert kept is not None
    assert kept.layers == (layer,)


@pytest.mark.usefixtures("gpu")
def test_records_of_another_gpu_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    other = replace(MACHINE, gpu="Other GPU")
    path.write_text(_ours(_linear(64), 4.0, 3.0, machine=other)[0].to_line())
    assert main(["tune", "--from", str(path)]) == 1
    assert capsys.readouterr().err == "slidesparse: records of another GPU; got Other GPU; needed Test GPU\n"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("then", "got"),
    [
        ({"torch": "2.12.1"}, "torch 2.12"),
        ({"vllm": "0.22.1"}, "vLLM 0.22, torch 2.11"),
        ({"cusparselt": "0.9.1"}, "cuSPARSELt 0.9"),
    ],
)
def test_records_of_other_libraries_are_refused(
    then: dict[str, str], got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(_ours(_linear(64), 4.0, 3.0, machine=replace(MACHINE, **then))[0].to_line())
    assert main(["tune", "--from", str(path)]) == 1
    assert f"records of other libraries; got {got}; needed " in capsys.readouterr().err
    assert not tuned_path(HERE).exists()


@pytest.mark.usefixtures("gpu")
def test_the_command_searches_then_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerSpeed("int8", 48, 32, (64,), {"dense": (4.0,), "cusparselt 6:8": (2.0,)})
    monkeypatch.setattr(tune, "search_algorithms", lambda job: [])
    monkeypatch.setattr(tune, "measure_layers", lambda job, where: [([layer], [])])
    monkeypatch.setattr(runner, "cuda_session", lambda profile: session())
    assert main(["tune", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["us"]["dense"] == [4.0]
    table = load_speeds(tuned_path(HERE))
    assert table is not None
    assert table.layers == (layer,)
    monkeypatch.setattr(tune, "measure_layers", lambda job, where: pytest.fail("it measured"))
    assert main(["tune", "--algorithms-only"]) == 0


def test_without_a_gpu_tuning_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert main(["tune"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("slidesparse: slidesparse tune needs a CUDA GPU")
    assert "slidesparse report" not in captured.err  # which draws nothing that tune would have measured
    assert captured.err.count("\n") == 1


def test_out_of_memory_while_tuning_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(shape: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.\nmore")

    monkeypatch.setattr(cusparselt_tune, "_search", full)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(UnsupportedError) as error:
        cusparselt_tune.tune(4096, 4096, 64, torch.int8)
    assert "not enough GPU memory to tune 4096 x 4096 at 64 tokens; tune fewer tokens" in str(error.value)
    assert "\n" not in str(error.value)
