from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import add_tokenizer, by_magnitude, edited_config, make_checkpoint, make_w8a8, prune_words, write_text

from slidesparse import pruning as methods
from slidesparse.base import progress
from slidesparse.base.log import LOG
from slidesparse.base.progress import progress_bar
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.cli import main, measuring, pruning
from slidesparse.errors import SlideSparseWarning
from slidesparse.gemm import Problem, choose
from slidesparse.offline.info import collect
from slidesparse.offline.outcome import BY_SIZE
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.weights.pattern import Pattern


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
    words = prune_words(tmp_path / "m", tmp_path / "s", "--dtype", "fp8", "--layer", "re:.*down_proj=8:10", "--json")
    assert main(words) == 0
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
    assert found["dense"] == {"lm_head": "output embedding"}
    q_proj = layers["model.layers.0.self_attn.q_proj"]
    here = choose(Problem(Pattern(6, 8), torch.float8_e4m3fn, 64, 64, torch.device("cpu")))
    if not torch.cuda.is_available():
        assert (q_proj["backends"], q_proj["reason"]) == ("dense for any number of tokens", here.reason)


def test_inspect_reports_a_violation_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    with edited_config(tmp_path / "s") as config:
        config["slidesparse_config"]["pattern"] = "4:6"
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "s")]) == 1
    assert "PROBLEM: model.layers.0.self_attn.q_proj violates 4:6 at row" in capsys.readouterr().out


def test_a_layer_that_cannot_run_is_a_problem_and_has_no_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "m")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "m")]) == 1
    shown = capsys.readouterr().out
    assert "PROBLEM: model.layers.0.mlp.up_proj holds NaN" in shown
    (choice,) = [line for line in shown.splitlines() if " here on " in line]
    assert choice.startswith("6 layers run here on dense")


def test_errors_have_a_json_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", str(tmp_path / "missing")]
    assert main([*words, "--json"]) == 1
    told = capsys.readouterr()
    error = json.loads(told.out)["error"]
    assert sorted(error) == ["got", "kind", "message", "needed", "remedy", "what"]
    assert error["kind"] == "CheckpointError"
    assert error["what"].startswith("no checkpoint folder at")
    assert told.err == f"slidesparse: {error['message']}\n"
    assert main(words) == 1
    assert capsys.readouterr() == ("", told.err)


def test_wrong_usage_has_a_json_form_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["prune", "a", "--json"])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["error"]["kind"] == "UsageError"
    assert "the following arguments are required" in told.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prune", "a", "b", "--patern", "6:8"], "there is no option --patern; did you mean --pattern?"),
        (["chats", "a", "b", "--cuont=3"], "there is no option --cuont; did you mean --count?"),
        (["eval", "a", "--nothing-like-it"], "there is no option --nothing-like-it\n"),
    ],
)
def test_a_mistyped_option_is_named(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (RuntimeError("tensors\nand more"), "unexpected error; got RuntimeError: tensors; run it again with --verbose"),
        (MemoryError(), "out of memory; got MemoryError"),
        (PermissionError(13, "Permission denied", "a.json"), "a.json cannot be used; got Permission denied"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_whatever_happens_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, says: str
) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr("slidesparse.offline.info.collect", fail)
    assert main(["info", "--json"]) == (130 if isinstance(raised, KeyboardInterrupt) else 1)
    told = capsys.readouterr()
    assert told.err.startswith(f"slidesparse: {says}")
    assert told.err.count("\n") == 1
    assert json.loads(told.out)["error"]["message"].startswith(says)
    if isinstance(raised, RuntimeError):  # which is for those who can mend it
        assert main(["info", "--verbose"]) == 1
        assert "Traceback" in capsys.readouterr().err


def test_how_much_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> dict[str, object]:
        LOG.info("on which backend")
        LOG.warning("slidesparse: slow")
        warnings.warn("of another library", UserWarning, stacklevel=1)
        warnings.warn("of ours", SlideSparseWarning, stacklevel=1)
        transformers.logging.get_logger("transformers.any").warning("a report")
        with progress_bar("bar", 1, show=True) as advance:
            advance(1)
        return collect()

    monkeypatch.setattr("slidesparse.offline.info.collect", speak)
    told = {}
    for option in ("--quiet", "--json", "--verbose"):
        with warnings.catch_warnings(record=True) as others:
            assert main(["info", option]) == 0
        assert bool(others) == (option == "--verbose")
        told[option] = capsys.readouterr().err
    assert told["--quiet"] == ""
    assert told["--json"].splitlines()[:2] == ["slidesparse: slow", "slidesparse: of ours"]
    assert "bar" in told["--json"]
    assert not {word for word in ("on which", "another library", "a report") if word in told["--json"]}
    for words in ("on which backend", "slow", "of ours", "bar"):
        assert words in told["--verbose"]


def test_a_log_has_lines_where_a_terminal_has_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    text = write_text(tmp_path / "text.txt", words=60)
    words = ["prune", str(tmp_path / "m"), "--pattern", "6:8", "--dtype", "bf16", "--method", "wanda"]
    words += ["--calibration", str(text), "--samples", "2", "--length", "16", "--device", "cpu"]
    told = []
    for seconds, more in ((30.0, []), (0.0, []), (0.0, ["-q"])):
        for name in ("LINE_S", "FIRST_LINE_S"):
            monkeypatch.setattr(progress, name, seconds)
        capsys.readouterr()
        assert main([*words, str(tmp_path / str(len(told))), *more]) == 0
        told.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("wanda: ")])
    assert [len(lines) for lines in told] == [0, 2, 0]
    assert re.fullmatch(r"wanda: 1/2 layers, loss [0-9.e-]+", told[1][0])
    assert re.fullmatch(r"wanda: 2/2 layers, loss [0-9.e-]+", told[1][1])


def test_a_quiet_command_gives_no_advice_and_the_whole_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "m")
    shown = []
    for more in ([], ["-q"]):
        shutil.rmtree("s", ignore_errors=True)
        capsys.readouterr()
        assert main(prune_words("m", "s", "--dtype", "fp8", *more)) == 0
        shown.append(capsys.readouterr().out.splitlines())
    usual, quiet = shown
    advice = ["README.md is a model card to read and correct", BY_SIZE]
    assert quiet == [line for line in usual if line not in advice]
    assert len(usual) == len(quiet) + len(advice)


@pytest.mark.slow
def test_other_libraries_are_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their bars and reports have no place in a log; a new process shows what they do when they are imported."""
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    add_tokenizer(tmp_path / "m")
    text = write_text(tmp_path / "text.txt", words=20)
    make_w8a8(tmp_path / "m", tmp_path / "q")
    done = _run_module("eval", str(tmp_path / "q"), "--text", str(text), "--device", "cpu", path=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith("eval: 1 window ")
    assert done.stdout.startswith("perplexity ")
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "q"), "--text", str(text), "--device", "cpu", "--verbose"]) == 0
    assert "Applying quantization config" in capsys.readouterr().err  # a bar that no setting turns off


def test_tables_and_texts_fit_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "m", num_hidden_layers=2)
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("4:6", "fp8"))
    capsys.readouterr()
    shown = {}
    for width in (None, 40, 60, 80):
        monkeypatch.setattr(progress, "terminal_width", lambda width=width: width)
        assert main(["inspect", str(tmp_path / "s")]) == 0
        assert main(["info"]) == 0
        shown[width] = capsys.readouterr().out
        lines = [len(line) for line in shown[width].splitlines()]
        assert width is None or max(lines) <= width
    assert max(map(len, shown[None].splitlines())) > 80  # a file has whole rows


def test_output_that_nobody_takes() -> None:
    """``slidesparse info | head -1``, and a full disk."""
    reading, pipe = os.pipe()
    os.close(reading)
    full = "slidesparse: a file cannot be used; got No space left on device\n"
    for out, status, told in ((pipe, 141, ""), (os.open("/dev/full", os.O_WRONLY), 1, full)):
        command = [sys.executable, "-m", "slidesparse", "info", "--json"]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(out)
        assert (done.returncode, done.stderr) == (status, told)


def _run_module(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m slidesparse`` with the modules of a folder before all others."""
    folders = [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-m", "slidesparse", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["prune", "--help"], ["eval", "--help"]])
def test_help_needs_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    """Importing torch takes seconds, so a torch that cannot be imported is in its place."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')\n")
    done = _run_module(*arguments, path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """As torch is with TORCH_LOGS=nonsense, and a hub's client with a timeout that is no number."""
    (tmp_path / "torch.py").write_text("int('abc')\n")
    done = _run_module("info", path=tmp_path)
    told = (
        "torch cannot be imported; got ValueError: invalid literal for int() with base 10: 'abc'; check its environment"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"slidesparse: {told}")
    assert done.stderr.count("\n") == 1


def test_the_command_line_knows_every_method() -> None:
    assert sorted(methods.METHODS) == list(pruning.METHODS)


@pytest.mark.parametrize(
    "words", [["bench", "gemm", "--out", "r.jsonl"], ["report", "--out", "r", "x"], ["bench", "-h"]]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_slidesparse_bench_brings_says_how_to_install_it(
    words: list[str], as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "entry_points", lambda **_: [])
    assert main([*words, *(["--json"] if as_json else [])]) == 1
    told = capsys.readouterr()
    if as_json:
        assert json.loads(told.out)["error"]["kind"] == "UnsupportedError"
    assert told.err.splitlines() == [
        f"slidesparse: slidesparse {words[0]} needs slidesparse-bench; got none installed;"
        " run pip install ./bench in a checkout of slidesparse"
    ]


def test_a_slidesparse_bench_that_is_broken_stops_no_other_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = metadata.EntryPoint("bench", "no_such_module:add_bench", measuring.GROUP)
    monkeypatch.setattr(measuring, "entry_points", lambda **_: [point])
    assert main(["info"]) == 0
    capsys.readouterr()
    assert main(["bench", "all"]) == 1
    assert (
        "needs slidesparse-bench; got ModuleNotFoundError: No module named 'no_such_module'; run pip"
        in capsys.readouterr().err
    )
