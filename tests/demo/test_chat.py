"""The demonstration with a chat model, on a tiny one: its numbers are those of prune and eval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import add_tokenizer, make_checkpoint

from slidesparse.cli import main
from slidesparse.demo import chat
from slidesparse.demo.chat import CALIBRATION, METHOD, PATTERNS, QUESTIONS, TEXT, ChatReport, ChatRow
from slidesparse.offline.evaluate import evaluate
from slidesparse.offline.prune import PruneOptions, prune_checkpoint

TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    add_tokenizer(tmp_path / "m")
    (tmp_path / "m/chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "m"


@pytest.mark.slow
def test_it_prunes_asks_and_measures(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--chat", str(model), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["pattern"]: row for row in found["rows"]}
    assert tuple(rows) == PATTERNS
    assert found["questions"] == list(QUESTIONS)
    assert all(len(row["answers"]) == len(QUESTIONS) for row in rows.values())
    assert len({tuple(row["answers"]) for row in rows.values()}) > 1
    prune_checkpoint(model, tmp_path / "s", PruneOptions("2:4", "bf16", METHOD, CALIBRATION))
    for pattern, folder in (("dense", model), ("2:4", tmp_path / "s")):
        measured = evaluate(folder, text=TEXT).perplexity
        assert measured is not None
        assert rows[pattern]["perplexity"] == measured.perplexity


def test_an_empty_name_is_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--chat", "", "--device", "cpu"]) == 1
    assert "got an empty path" in capsys.readouterr().err


def test_an_interruption_promises_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pruned so far lies in a temporary folder, with which it goes."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt("/tmp/x keeps 21 finished files, and the same command goes on from there")

    monkeypatch.setattr(chat, "_row", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        chat.run_chat(str(model))
    assert not stopped.value.args


def test_the_package_of_the_usual_model_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own dependencies are missing where pip was told --no-deps."""
    monkeypatch.setattr(chat, "PACKAGE", "package_of_the_test")
    assert chat._usual() == chat.MODEL
    (tmp_path / chat.PACKAGE).mkdir()
    (tmp_path / chat.PACKAGE / "__init__.py").write_text("raise ImportError")
    (tmp_path / chat.PACKAGE / "x.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert chat._usual() == str(tmp_path / chat.PACKAGE / "x.gguf")


def test_how_it_is_shown() -> None:
    said = zip(PATTERNS, (10.0, 11.0, 12.5, 9.0), ("Rome.", "Rome. " * 40, "", "x"), strict=True)
    rows = tuple(ChatRow(pattern, perplexity, (answer,) * len(QUESTIONS)) for pattern, perplexity, answer in said)
    lines = ChatReport("m", "cpu", 1.0, rows).describe().splitlines()
    assert lines[0] == QUESTIONS[0]
    assert lines[1] == "  dense  Rome."
    assert lines[2].startswith("  6:8    Rome. Rome.")
    assert lines[3].startswith("         Rome.")
    assert "  4:6    (nothing)" in lines
    assert max(map(len, lines[:-1])) <= 100
    assert [line.split() for line in lines if line.endswith("x") and "." in line] == [
        ["dense", "0%", "10.0", "1.00x"],
        ["6:8", "25%", "11.0", "1.10x"],
        ["4:6", "33%", "12.5", "1.25x"],
        ["2:4", "50%", "9.0", "0.90x"],
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--chat", "broken.gguf"], "transformers cannot read broken.gguf; got"),
        (["--chat", "./none"], "no checkpoint folder at none"),
        (["--chat", "--plot", "a.png"], "options without effect; got --plot with --chat"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.gguf").write_text("GGUF")
    assert main(["demo", "--device", "cpu", *words]) == 1
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
