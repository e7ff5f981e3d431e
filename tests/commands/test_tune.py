"""Tuning on a CPU: jobs, what is measured and stored, and how it fails."""

from __future__ import annotations

import errno
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import by_magnitude, make_checkpoint
from no_gpu import too_old
from tuning_fakes import FakeStopwatch, Quick, Wrong

from slidesparse.base import file_lock
from slidesparse.cli import main
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm import BACKENDS, Problem
from slidesparse.gemm.cusparselt import tune as cusparselt_tune
from slidesparse.gemm.speed import Installation, LayerSpeed, WrongForm
from slidesparse.gemm.speed_files import load_speeds, tuned_path
from slidesparse.offline import tune
from slidesparse.offline.known_models import MODELS
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.tune_job import PATTERNS, Kind, make_job

HERE = Installation("Test GPU", "9.0", "580.1", {"dense": "torch 2.11", "cusparselt": "cuSPARSELt 0.8"})
WRONG = WrongForm("int8", 48, 32, "cusparselt 6:8")
CPU = torch.device("cpu")
TINY = ((48, 32), (32, 32), (96, 32), (32, 32))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU as far as its name goes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(tune, "installation", lambda: HERE)


# -- layer times ---------------------------------------------------------------------------------------------------


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (Quick, Wrong):
        monkeypatch.setitem(BACKENDS, backend.name, backend)
    monkeypatch.setitem(MODELS, "Tiny", TINY)


def measured(stopwatch: FakeStopwatch, tokens: list[int], *names: str) -> tuple[list[LayerSpeed], list[WrongForm]]:
    job = make_job(["Tiny"], ["6:8"], ["int8"], tokens, names)
    found = list(tune.measure_layers(job, CPU, stopwatch))
    return [layer for layers, _ in found for layer in layers], [form for _, wrong in found for form in wrong]


@pytest.mark.usefixtures("backends")
def test_every_kind_of_layer_is_measured_on_every_backend() -> None:
    layers, wrong = measured(FakeStopwatch(lambda backend, _: {"dense": 1e4, "quick": 9e3}[backend]), [64, 32], "quick")
    assert wrong == []
    us = {"dense": (1e4, 1e4), "quick 6:8": (9e3, 9e3)}
    assert layers == [LayerSpeed("int8", out, 32, (32, 64), us) for out in (48, 32, 96)]  # two layers have one size


@pytest.mark.usefixtures("backends")
def test_a_layer_that_a_backend_cannot_run_has_no_time_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(self: Quick, problem: Problem) -> str | None:
        return "not this one" if problem.out_features == 96 else None

    monkeypatch.setattr(Quick, "why_not", why_not)
    layers, _ = measured(FakeStopwatch(lambda *_: 1e4), [32], "quick")
    assert [layer.out for layer in layers] == [48, 32]


def test_weights_of_six_bits_are_measured_for_the_backends_that_read_them() -> None:
    job = make_job(["BitNet-2B"], ["6:8"], None, [64], ["hopper", "hopper-6bit"])
    kinds = [kind for kind in job.kinds() if (kind.out, kind.columns) == (2560, 2560)]
    size = 2560, 2560, "6:8"
    assert kinds == [Kind("int8", *size), Kind("int8", *size, "6bit"), Kind("fp8", *size)]
    assert [job.backends_of(kind) for kind in kinds] == [["hopper"], ["hopper-6bit"], ["hopper"]]


def test_without_cusparselt_no_algorithm_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(tune, "tune_shapes", lambda *_, **__: pytest.fail("it searched"))
    assert tune.search_algorithms(make_job(None, None, None, [64], ["hopper"])) == []


# -- jobs ----------------------------------------------------------------------------------------------------------


def test_a_plan_names_each_packed_shape_once() -> None:
    job = make_job(["BitNet-2B"], ["2:4", "6:8"], None, [64])
    assert job.models[0].dtypes == ("int8", "fp8")
    assert ("int8", 2560, 2560) in job.packed_shapes()
    assert ("fp8", 2560, 3840) in job.packed_shapes()
    assert len(job.packed_shapes()) == len(set(job.packed_shapes())) == 16


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_a_checkpoint_is_tuned_as_a_server_runs_it(family: str, tmp_path: Path) -> None:
    """The linears that read one input in one module are one: by running the model, whatever their names."""
    make_checkpoint(tmp_path / "m", family)
    job = make_job([str(tmp_path / "m")], None, None, [64])
    (model,) = job.models
    assert {size[1:] for size in model.sizes} == {(128, 64), (64, 64), (304, 64), (64, 152)}
    assert (model.name, model.patterns, model.dtypes) == (str(tmp_path / "m"), PATTERNS, ("int8", "fp8"))
    assert len(job.kinds()) == len(model.sizes) * len(PATTERNS) * 3  # int8, int8 in six bits, fp8


def test_a_pruned_checkpoint_is_tuned_for_its_patterns_and_its_type(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    options = by_magnitude("6:8", "fp8", layers={"re:.*down_proj": "4:6", "re:.*o_proj": "dense"})
    prune_checkpoint(tmp_path / "m", tmp_path / "s", options)
    (model,) = make_job([str(tmp_path / "s")], None, None, [64]).models
    assert (set(model.patterns), model.dtypes) == ({"6:8", "4:6"}, ("fp8",))
    assert {size[1:] for size in model.sizes} == {(128, 64), (304, 64), (64, 152)}
    (model,) = make_job([str(tmp_path / "s")], ["2:4"], ["int8"], [64]).models
    assert (model.patterns, model.dtypes) == (("2:4",), ("int8",))


@pytest.mark.parametrize(
    "wrong",
    [(["GPT"], None, None, [64]), (None, ["dense"], None, [64]), (None, None, ["int4"], [64]), (None, None, None, [0])],
)
def test_wrong_plans_are_refused(wrong: tuple[Any, ...]) -> None:
    for arguments in (wrong, (None, None, None, [])):
        with pytest.raises(InputError):
            make_job(*arguments)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_a_file_system_without_locks_keeps_times_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", no_locks)
    layer = LayerSpeed("int8", 64, 64, (16,), {"dense": (2.0,), "cusparselt 6:8": (1.0,)})
    kept = load_speeds(tune.store_layers([layer], []))
    assert kept.layers == (layer,)


@pytest.mark.usefixtures("gpu")
def test_wrong_forms_are_named_in_the_table_and_by_the_exit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerSpeed("int8", 48, 32, (64,), {"dense": (4.0,), "cusparselt 6:8": (None,)})
    monkeypatch.setattr(tune, "search_algorithms", lambda job: [])
    monkeypatch.setattr(tune, "measure_layers", lambda job: [([], [WRONG]), ([layer], [])])
    assert main(["tune"]) == 1
    assert "WRONG RESULT: int8 48x32, cusparselt 6:8: auto does not take it here" in capsys.readouterr().out
    assert main(["tune", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] == [
        {"dtype": "int8", "out": 48, "columns": 32, "name": "cusparselt 6:8", "experts": None}
    ]
    table = load_speeds(tuned_path(HERE))
    assert (table.wrong, table.layers) == ((WRONG,), (layer,))


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
