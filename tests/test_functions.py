"""The functions beside the commands: the same options, the same defaults, the same outcome."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import add_tokenizer, contents, make_checkpoint, write_text

import slidesparse as ss
from slidesparse.cli import build_parser, main
from slidesparse.offline.calibrate.calibration import LIBRARY
from slidesparse.offline.outcome import PruneSummary

OF_THE_COMMAND_LINE = {"help", "json", "verbose", "quiet", "own_chats", "join_timeout"}
"""How it is told, chats that ``slidesparse chats`` writes, and processes that torchrun starts."""

OTHERWISE = {"no_bos": "bos", "layer": "layers"}
"""Options whose arguments have another name: several of them in one, or the opposite."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and a text by the names of the examples."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "Qwen2.5-7B", "qwen2", max_position_embeddings=24, num_hidden_layers=1)
    add_tokenizer(tmp_path / "Qwen2.5-7B")
    write_text(tmp_path / "text.txt")
    return tmp_path


def options_of(command: str) -> dict[str, Any]:
    (commands,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    options = {one.dest: one.default for one in commands.choices[command]._actions}
    others = {*OF_THE_COMMAND_LINE, *(["prompts"] if "own_chats" in options else [])}
    return {name: default for name, default in options.items() if name not in others}


@pytest.mark.parametrize(
    ("command", "function", "names"),
    [
        ("prune", ss.prune, {}),
        ("recover", ss.recover, {"source": "pruned", "text": "texts"}),
        ("eval", ss.evaluate, {"source": "checkpoint"}),
        ("compress", ss.compress, {"source": "model"}),
    ],
)
def test_a_function_has_the_options_of_its_command(
    command: str, function: Callable[..., Any], names: dict[str, str]
) -> None:
    renamed = {**OTHERWISE, **names}
    options = {renamed.get(name, name): default for name, default in options_of(command).items()}
    parameters = inspect.signature(function).parameters
    assert parameters.keys() - {"progress"} == options.keys()
    described = (inspect.getdoc(function) or "").partition("Args:")[2].partition("Returns:")[0]
    assert re.findall(r"^    (\w+): ", described, re.MULTILINE) == list(parameters)
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty and name not in ("pattern", "bos", "progress"):
            assert str(parameter.default or None) == str(options[name] or None), name


def example(function: Callable[..., Any]) -> str:
    text = (inspect.getdoc(function) or "").partition("Example::\n")[2]
    assert text
    return inspect.cleandoc(text)


def test_the_examples_of_prune_and_evaluate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(example(ss.prune), {})
    exec(example(ss.evaluate), {"ss": ss})
    words = capsys.readouterr().out
    assert "treated 7 layers: 7 at 6:8" in words
    assert "perplexity rises by" in words


def test_prune_writes_what_the_command_writes(folder: Path) -> None:
    done = ss.prune("Qwen2.5-7B", "one", "4:6", dtype="int8", method="wanda", calibration="text.txt", samples=4, seed=1)
    assert isinstance(done, PruneSummary)
    options = ["--dtype", "int8", "--method", "wanda", "--calibration", "text.txt", "--samples", "4", "--seed", "1"]
    assert main(["prune", "Qwen2.5-7B", "two", "--pattern", "4:6", "--method", "magnitude", *options]) == 0
    assert contents(folder / "one") == contents(folder / "two")
    assert set(done.patterns.values()) == {"4:6"}


def test_the_example_of_recover(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ss.prune("./Qwen2.5-7B", "./pruned", "4:6", dtype="bf16", method="magnitude")
    small = example(ss.recover).replace('"20M"', '"2k", batch="96", window=24, eval_windows=2')
    exec(small, {})
    assert "trained on 2016 tokens" in capsys.readouterr().out
    assert (folder / "recovered/model.safetensors").exists()


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    done = ss.prune("./Qwen2.5-7B", "./out", "2:4", dtype="fp8", method="magnitude", dry_run=True)
    assert "7 linears" in done.describe()
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    "texts",
    ["text.txt", Path("text.txt"), ["text.txt:1"], None],
    ids=["name", "path", "weighted", "default"],
)
def test_what_calibration_may_be(folder: Path, texts: Any) -> None:
    ss.prune("./Qwen2.5-7B", "./out", dtype="int8", method="wanda", calibration=texts, samples=4, length=16)
    card = (folder / "out/README.md").read_text()
    assert f"4 windows of 16 tokens of {LIBRARY if texts is None else 'text.txt'}" in card


@pytest.mark.parametrize(
    "how",
    [
        {"calibration": []},
        {"calibration": 3},
        {"method": "magnitude", "samples": 4},
        {"method": "magic"},
        {"ignore": "lm_head"},
        {"layers": ["lm_head"]},
        {"links": "follow"},
        {"dtype": "int3"},
        {"device": "tpu"},
        {"revision": "main"},
    ],
)
def test_refused_before_anything_is_written(folder: Path, how: dict[str, Any]) -> None:
    with pytest.raises(ss.InputError):
        ss.prune("./Qwen2.5-7B", "./out", **{"dtype": "int8", "method": "wanda", **how})
    assert not (folder / "out").exists()


def test_a_dense_model_of_the_hub_has_a_revision_where_the_pruned_one_has() -> None:
    with pytest.raises(ss.InputError, match="dense"):
        ss.recover("./pruned", "owner/name", "./out", tokens=10**6, texts="text.txt", revision="abc")
