from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from slidesparse import prune
from slidesparse.cli import checkpoints, main
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.gemm import Problem, choose
from slidesparse.pattern import Pattern


def test_info_names_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "reference" in text
    assert "dense" in text
    assert main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["backends"]["reference"] is None


def test_prune_then_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "m")
    capsys.readouterr()
    arguments = ["prune", str(tmp_path / "m"), str(tmp_path / "s"), "--pattern", "6:8", "--dtype", "fp8"]
    assert main([*arguments, "--layer", "re:.*down_proj=8:10", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["patterns"]["model.layers.1.mlp.down_proj"] == "8:10"
    assert summary["destination_bytes"] == Checkpoint(tmp_path / "s").n_bytes
    assert main(["inspect", str(tmp_path / "s"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert layers["model.layers.0.self_attn.q_proj"]["tightest"] == "6:8"
    assert layers["model.layers.0.self_attn.q_proj"]["sparsity"] == pytest.approx(0.25, abs=0.01)  # FP8 adds underflows
    assert layers["model.layers.0.mlp.down_proj"]["marked"] == "8:10"
    assert layers["model.layers.0.self_attn.q_proj"]["packed_bytes"] == 64 * 64 * 0.9375
    assert found["dense"] == {"lm_head": "on the ignore list"}
    q_proj = layers["model.layers.0.self_attn.q_proj"]
    here = choose(Problem(Pattern(6, 8), torch.float8_e4m3fn, 64, 64, torch.device("cpu")))
    if not torch.cuda.is_available():
        assert (q_proj["backends"], q_proj["reason"]) == ("dense for any number of tokens", here.reason)
        assert q_proj["kept_bytes"] == {"dense": 64 * 64}


def test_inspect_shares_lines_and_aligns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "m")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "m")]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "self_attn" in line or "mlp" in line]
    assert len(rows) == 7
    assert all("model.layers.*." in row for row in rows)
    assert len({row.index("bfloat16") for row in rows}) == 1
    (choice,) = [line for line in lines if "layers run here on" in line]
    assert choice.startswith("14 layers run here on dense for any number of tokens (")
    assert "kept: dense" in choice


def test_inspect_reports_a_violation_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "m")
    main(["prune", str(tmp_path / "m"), str(tmp_path / "s"), "--pattern", "6:8", "--dtype", "int8"])
    config = json.loads((tmp_path / "s/config.json").read_text())
    config["slidesparse_config"]["pattern"] = "4:6"
    (tmp_path / "s/config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "s")]) == 1
    assert "PROBLEM: model.layers.0.self_attn.q_proj violates 4:6 at row" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pattern", "6_8", "--dtype", "int8"], "not a pattern; got '6_8'"),
        (["--pattern", "6:8"], "got no --dtype"),
        (["--pattern", "6:8", "--dtype", "int8", "--layer", "down_proj"], "NAME=PATTERN"),
    ],
)
def test_user_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    make_checkpoint(tmp_path / "m")
    capsys.readouterr()
    assert main(["prune", str(tmp_path / "m"), str(tmp_path / "s"), *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("slidesparse: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize("arguments", [[], ["prune", "a"], ["prune", "a", "b", "--pattern", "6:8", "--patern", "x"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def _run_module(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m slidesparse`` with the modules of a folder before all others."""
    folders = [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-m", "slidesparse", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["prune", "--help"], ["bench", "--help"]])
def test_help_needs_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    """Importing torch takes seconds, so a torch that cannot be imported is in its place."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')\n")
    done = _run_module(*arguments, path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_an_interrupted_import_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n")
    done = _run_module("info", path=tmp_path)
    assert (done.returncode, done.stderr) == (130, "slidesparse: interrupted\n")


def test_the_command_line_knows_every_method() -> None:
    assert sorted(prune.METHODS) == list(checkpoints.METHODS)
