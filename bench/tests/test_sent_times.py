"""Times that are sent in: written, checked, added; a table that cannot ship says why."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slidesparse.cli import main
from slidesparse.errors import InputError
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.speed import Experts, Installation, LayerSpeed, SpeedTable, WrongForm
from slidesparse.gemm.speed_files import PACKAGED, add_layers, file_name, load_speeds, table_text
from slidesparse.offline import tune
from slidesparse_bench import sent_times

ROOT = Path(__file__).parents[2]
LIBRARIES = {"dense": "torch 2.14", "hopper": Hopper().library(), "cusparselt": "cuSPARSELt 0.9"}
HERE = Installation("NVIDIA H100 PCIe", "9.0", "580.1", LIBRARIES)
US: dict[str, tuple[float | None, ...]] = {"dense": (10.0, 20.0, 300.0), "hopper 6:8": (9.0, None, 250.0)}
LAYER = LayerSpeed("int8", 4096, 4096, (16, 1024, 16384), US)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(tune, "installation", lambda: HERE)


@pytest.mark.usefixtures("gpu")
def test_the_times_measured_here_are_written_and_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    assert main(["tune", "--share", str(path)]) == 1
    assert "nothing was measured on this NVIDIA H100 PCIe" in capsys.readouterr().err
    experts = replace(LAYER, experts=Experts(8, 8, 2))
    add_layers(HERE, [LAYER, experts], [WrongForm("int8", 64, 64, "hopper 6:8")])  # which concerns nobody else
    assert main(["tune", "--share", str(path)]) == 0
    out = capsys.readouterr().out
    assert "int8 4096x4096: hopper 6:8 takes 0.83 to 0.90 of dense's time" in out
    assert "int8 4096x4096, 8 experts, 2 a token: hopper 6:8 takes 0.83 to 0.90 of dense's time" in out
    assert sent_times.read(path) == SpeedTable(HERE, (LAYER, experts))
    assert main(["tune", "--share", str(path)]) == 1
    assert f"{path} is there already" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.json")), ids=lambda path: path.name)
def test_what_ships_could_be_sent_in(path: Path) -> None:
    table = load_speeds(path)
    there = table.installation
    # But for the kernel's revision, which may be an older one (tests/gemm/test_speed_files.py).
    libraries = {**there.libraries, "hopper": Hopper().library()}
    of_today = replace(table, installation=replace(there, libraries=libraries))
    assert list(sent_times.faults(of_today)) == []


@pytest.mark.parametrize(
    ("there", "us", "words"),
    [
        ({"gpu": "<script>"}, {}, "the GPU's name '<script>'"),
        ({"capability": ""}, {}, "compute capability ''"),
        ({"driver": None}, {}, "driver None"),
        ({"libraries": {**LIBRARIES, "warp": "Warp 1"}}, {}, "unknown backends warp"),
        ({"libraries": {**LIBRARIES, "hopper": "slidesparse hopper-1"}}, {}, "no longer the kernel in the package"),
        ({}, {"dense": (10.0, None, 300.0)}, "no dense time everywhere"),
        ({}, {"hopper 6:8": (None,) * 3}, "hopper 6:8 has no time"),
        ({}, {"hopper 7:8": (9.0,) * 3}, "times of 'hopper 7:8'"),
        ({}, {"reference 6:8": (9.0,) * 3}, "times of 'reference 6:8'"),
        ({}, {"dense": (10.0, 20.0, 0.02)}, "dense is faster than any GPU"),
        ({}, {"dense": (40.0, 20.0, 300.0)}, "dense takes less time for more tokens"),
        ({}, {"hopper 6:8": (1.0, 20.0, 300.0)}, "hopper 6:8 takes 0.1 to 1 of dense's time"),
    ],
)
def test_what_cannot_ship_says_why(there: dict[str, Any], us: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(table_text(SpeedTable(replace(HERE, **there), (replace(LAYER, us={**US, **us}),))))
    with pytest.raises(InputError, match="needed a table that can ship") as error:
        sent_times.read(path)
    assert words in str(error.value)


def test_too_few_numbers_of_tokens_and_no_layers_cannot_ship() -> None:
    few = LayerSpeed("int8", 64, 64, (16, 64), {"dense": (1.0, 1.0), "hopper 6:8": (1.0, 1.0)})
    assert list(sent_times.faults(SpeedTable(HERE, (few,)))) == ["int8 64x64: times at 2 numbers of tokens"]
    assert list(sent_times.faults(SpeedTable(HERE, ()))) == ["no layers"]


def test_tables_of_a_gpu_ship_side_by_side_and_one_installations_are_joined(tmp_path: Path) -> None:
    other, more = replace(HERE, driver="590.1"), replace(LAYER, out=8192)
    first = sent_times.add_to_package(SpeedTable(HERE, (LAYER,)), tmp_path)
    assert first == tmp_path / file_name(HERE.gpu)
    second = sent_times.add_to_package(SpeedTable(other, (LAYER,)), tmp_path)
    assert sent_times.add_to_package(SpeedTable(HERE, (more,)), tmp_path) == first
    assert sent_times.add_to_package(SpeedTable(other, (more,)), tmp_path) == second != first
    for path, there in ((first, HERE), (second, other)):
        assert load_speeds(path) == SpeedTable(there, (LAYER, more))


def test_the_script_checks_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"version": 7}))
    command = [sys.executable, str(ROOT / "benchmarks/add_times.py"), str(path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.count("\n") == 1
