"""The real lm-evaluation-harness: ``slidesparse eval --tasks``."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint, put_bos_first

import slidesparse as ss
from slidesparse.cli import main
from slidesparse.offline.prune import prune_checkpoint

pytestmark = pytest.mark.skipif(
    find_spec("lm_eval") is None and "LM_EVAL_MUST_BE_THERE" not in os.environ,
    reason="python tests/evaluation_harness/try_lm_eval.py installs it and runs this, as CI does",
)

QUESTIONS = ("two and two", "sparse", "the windows of a group", "keep", "4:6 or 6:8?", "slide over", "a", "dense, or")
CHOICES = ("four", "windows", "the other half of it", "no.")
LENGTH = 12
"""Tokens that are written after a question."""


class ByHand(NamedTuple):
    """What a model says, by its definition."""

    scores: list[list[float]]  # question, choice -> log-probability
    written: list[str]


@pytest.fixture
def own_tasks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the harness not read the fourteen thousand files of its own tasks, which takes seven seconds each time."""
    import lm_eval.evaluator
    import lm_eval.tasks

    fewer = partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", fewer)
    monkeypatch.setattr(lm_eval.evaluator, "TaskManager", fewer)


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return found


def score(model: Any, tokenizer: Any, question: str, choice: str) -> float:
    """Log-probability of a choice after the question."""
    asked, whole = tokenizer(f"{question}:")["input_ids"], tokenizer(f"{question}: {choice}")["input_ids"]
    rows = logits(model, whole).log_softmax(-1)
    return sum(float(rows[i - 1, whole[i]]) for i in range(len(asked), len(whole)))


def write(model: Any, tokenizer: Any, question: str) -> str:
    """What the model writes after a question, by its likeliest tokens."""
    tokens = tokenizer(f"{question}:")["input_ids"]
    asked = len(tokens)
    for _ in range(LENGTH):
        tokens.append(int(logits(model, tokens)[-1].argmax()))
    written: str = tokenizer.decode(tokens[asked:])
    return written.partition(tokenizer.eos_token)[0]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned checkpoint, whose tokenizer begins each text with a token as Llama's does."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder / "dense", dtype=torch.float32)
    add_tokenizer(folder / "dense")
    put_bos_first(folder / "dense")
    prune_checkpoint(folder / "dense", folder / "sparse", by_magnitude("6:8", dtype="int8"), progress=False)
    return folder / "sparse"


@pytest.fixture(scope="module")
def by_hand(sparse: Path) -> ByHand:
    model, tokenizer = ss.load(sparse, device="cpu"), transformers.AutoTokenizer.from_pretrained(sparse)
    scores = [[score(model, tokenizer, question, choice) for choice in CHOICES] for question in QUESTIONS]
    return ByHand(scores, [write(model, tokenizer, question) for question in QUESTIONS])


@pytest.fixture(scope="module")
def stop(by_hand: ByHand) -> str:
    """A sign that ends some of what is written."""
    return next(
        sign for sign in "".join(by_hand.written) if 0 < sum(sign in text for text in by_hand.written) < len(QUESTIONS)
    )


@pytest.fixture(scope="module")
def tasks(by_hand: ByHand, stop: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files of two tasks: choose an answer, and write one; every second written answer is the right one."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = []
    for i, (question, written) in enumerate(zip(QUESTIONS, by_hand.written, strict=True)):
        text = written.partition(stop)[0] + "x" * (i % 2)
        rows.append({"question": question, "choices": CHOICES, "answer": i % len(CHOICES), "text": text})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    common: dict[str, Any] = {
        **{"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}},
        **{"test_split": "test", "doc_to_text": "{{question}}:"},
    }
    choose = {
        **{"task": "choose", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"},
        **{"doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
    }
    write_it = {
        **{"task": "write", "output_type": "generate_until", "doc_to_target": "{{text}}"},
        **{"generation_kwargs": {"until": [stop], "max_gen_toks": LENGTH}, "metric_list": [{"metric": "exact_match"}]},
    }
    for task in (choose, write_it):
        (folder / f"{task['task']}.yaml").write_text(json.dumps(common | task))  # JSON is YAML
    return [str(folder / f"{name}.yaml") for name in ("choose", "write")]


@pytest.fixture
def expected(by_hand: ByHand) -> dict[str, dict[str, float]]:
    """The metrics of both tasks."""
    right = {"acc": 0, "acc_norm": 0}
    for i, scores in enumerate(by_hand.scores):
        per_sign = [value / len(choice) for value, choice in zip(scores, CHOICES, strict=True)]
        for name, values in (("acc", scores), ("acc_norm", per_sign)):
            right[name] += max(range(len(CHOICES)), key=values.__getitem__) == i % len(CHOICES)
    return {"choose": {name: count / len(QUESTIONS) for name, count in right.items()}, "write": {"exact_match": 0.5}}


def metrics(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Task -> metric -> value, without their errors, and what is no metric."""
    metric = re.compile(r"(\w+)(?<!_stderr),none")
    return {
        task: {match[1]: value for name, value in values.items() if (match := metric.fullmatch(name))}
        for task, values in found.items()
    }


def test_eval_gives_what_is_computed_by_hand(
    sparse: Path, tasks: list[str], expected: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(sparse), "--tasks", *tasks, "--batch", "3", "--device", "cpu", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["tasks"]
    assert metrics(found) == expected
    assert all(name.endswith(",none") for values in found.values() for name in values)  # no counts among the metrics


@pytest.mark.usefixtures("own_tasks_only")
@pytest.mark.parametrize(
    ("text", "got"),
    [("task: [", "ParserError"), ('{"task": "odd"}', "TypeError"), (None, "is not a registered task")],
    ids=["no YAML", "no task", "no file"],
)
def test_a_task_that_cannot_run_is_one_line(
    sparse: Path, tmp_path: Path, text: str | None, got: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["eval", str(sparse), "--tasks", str(file), "--device", "cpu"]) != 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"slidesparse: cannot run {file}; got ")
    assert got in lines[-1]
    assert "defect" not in lines[-1]
