"""Layer times for ``auto`` out of records, which ``slidesparse tune --from`` stores; and what bench marks as wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_records import MACHINE, case, record
from test_bench import session

from slidesparse.cli import main
from slidesparse.errors import InputError
from slidesparse.gemm.speed import Experts, Installation, LayerSpeed, WrongForm
from slidesparse.gemm.speed_files import load_speeds, tuned_path
from slidesparse.offline import tune
from slidesparse_bench import layer_speeds as speed
from slidesparse_bench import problems, runner
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
    monkeypatch.setattr(speed, "libraries", lambda: LIBRARIES)
    monkeypatch.setattr(tune, "installation", lambda: HERE)


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
    assert speed.wrong_forms([experts]) == [WrongForm("int8", 28672, 4096, "hopper 6:8", Experts(8, 8, 2))]


def test_a_later_comparison_that_is_right_is_believed() -> None:
    old, new = "2026-11-20T10:00:00.000000+00:00", "2026-11-21T10:00:00.000000+00:00"
    wrong, right = _wrong(_linear(64), started=old), _ours(_linear(64), 3.0, 2.0, started=new)
    assert speed.wrong_forms(right + wrong) == []
    assert speed.wrong_forms(_ours(_linear(64), 3.0, 2.0, started=old) + _wrong(_linear(64), started=new)) == [WRONG]


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
    us = {"dense": (40.0, 50.0), "hopper 6:8": (30.0, None)}
    assert layer == LayerSpeed("int8", 2 * 14336, 4096, (64, 256), us, Experts(8, 8, 2))
    linear = _ours(_linear(64), 3.0, 2.0)
    assert len(speed.layer_speeds(records + linear)) == 2


def test_records_without_layers_are_refused() -> None:
    with pytest.raises(InputError):
        speed.layer_speeds([record(case(), DENSE_VARIANT, 1.0, backend="dense")])


@pytest.mark.usefixtures("gpu")
def test_layer_times_of_records_become_the_users_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(r.to_line() + "\n" for r in _ours(_linear(64), 4.0, 3.0)))
    assert main(["tune", "--from", str(path)]) == 0
    assert "cusparselt 6:8" in (out := capsys.readouterr().out)
    assert "64: 0.75" in out
    table = load_speeds(tuned_path(HERE))
    assert table.layers[0].us == {"dense": (4.0,), "cusparselt 6:8": (3.0,)}


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
    assert (table.wrong, table.layers) == ((WRONG,), ())


@pytest.mark.usefixtures("gpu")
def test_records_of_another_gpu_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    other = replace(MACHINE, gpu="Other GPU")
    path.write_text(_ours(_linear(64), 4.0, 3.0, machine=other)[0].to_line())
    assert main(["tune", "--from", str(path)]) == 1
    assert capsys.readouterr().err == "slidesparse: records of another GPU; got Other GPU; needed Test GPU\n"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("then", "got"), [({"vllm": "0.22.1"}, "vLLM 0.22, torch 2.11"), ({"cusparselt": "0.9.1"}, "cuSPARSELt 0.9")]
)
def test_records_of_other_libraries_are_refused(
    then: dict[str, str], got: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(_ours(_linear(64), 4.0, 3.0, machine=replace(MACHINE, **then))[0].to_line())
    assert main(["tune", "--from", str(path)]) == 1
    assert f"records of other libraries; got {got}; needed " in capsys.readouterr().err
    assert not tuned_path(HERE).exists()
