"""The accuracy page, its tables and its records agree, and the experiment's scripts run."""

from __future__ import annotations

import itertools
import json
import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results/accuracy"
SCRIPTS = ROOT / "benchmarks/accuracy"
PAGE = (ROOT / "docs/log/small-models.md").read_text()


@pytest.fixture(autouse=True)
def _scripts_import_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])


def run(name: str, *arguments: object) -> None:
    """A script as its command line runs it."""
    before = sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    finally:
        sys.argv = before


def test_tables_are_what_the_records_say() -> None:
    report = runpy.run_path(str(SCRIPTS / "report.py"))
    assert report["tables"](RECORDS) == (RECORDS / "tables.md").read_text()


def test_named_records_and_pictures_exist() -> None:
    for name in re.findall(r"`([\w*-]+\.jsonl)`", PAGE):
        assert list(RECORDS.glob(name)), name
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs/log" / target).exists(), target


class Stack:
    """Calls the experts of its only layer, as a model would after its router."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers

    def __call__(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        self.layers[0].mlp.experts(x, index, weights)


class Experts(nn.Module):
    """Three experts of two inputs, whose outputs are 5, 10 and 50 times the product of the inputs in length."""

    num_experts, act_fn = 3, nn.Identity()

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.eye(2).repeat(3, 1, 1))
        self.down_proj = nn.Parameter(torch.tensor([1.0, 2.0, 10.0])[:, None, None] * torch.tensor([[3.0], [4.0]]))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x


def test_reap_is_a_mean_over_the_tokens_that_an_expert_gets() -> None:
    """By the sum the second expert would count most."""
    reap = runpy.run_path(str(SCRIPTS / "reap.py"))
    experts = Experts()
    layer = SimpleNamespace(mlp=SimpleNamespace(experts=experts))
    batch = {
        "x": torch.tensor([[1.0, 1.0], [1.0, 2.0], [2.0, 2.0]]),
        "index": torch.tensor([[0, 1], [1, 0], [1, 2]]),
        "weights": torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.9, 0.1]]),
    }
    model = SimpleNamespace(model=Stack([layer]))
    (found,) = reap["mean_router_weighted_norms"](model, [batch])
    zero = (0.75 * 5 * 1 + 0.5 * 5 * 2) / 2
    one = (0.25 * 10 * 1 + 0.5 * 10 * 2 + 0.9 * 10 * 4) / 3
    assert found.tolist() == pytest.approx([zero, one, 0.1 * 50 * 4])


def test_experts_are_served_in_8_bits_too() -> None:
    """Their products are those of rounded weights and inputs: a little off, and the model's own again afterwards."""
    lm = runpy.run_path(str(SCRIPTS / "lm.py"))
    model = lm["build"](lm["Size"](64, 48, 1, 0.0, experts=3), 0, 32)
    experts = model.model.layers[0].mlp.experts
    routed = torch.randn(20, 64), torch.tensor([[0, 2]] * 20), torch.full((20, 2), 0.5)
    with torch.no_grad():
        exact = experts(*routed)
        with lm["served"](model, "int8"):
            error = (experts(*routed) - exact).norm() / exact.norm()
        assert 1e-3 < error < 0.05
        assert torch.equal(experts(*routed), exact)


def test_without_an_expert_the_router_chooses_among_the_others() -> None:
    lm, reap = (runpy.run_path(str(SCRIPTS / name)) for name in ("lm.py", "reap.py"))
    model = lm["build"](lm["Size"](64, 48, 1, 0.0, experts=5), 0, 32)
    block, x, kept = model.model.layers[0].mlp, torch.randn(1, 20, 64), [0, 2, 4]
    with torch.no_grad():
        block.gate.weight.copy_(torch.randn(5, 64))
        logits = x[0] @ block.gate.weight.T
        logits[:, [1, 3]] = -math.inf
        weights, index = logits.softmax(1).topk(2)
        expected = block.experts(x[0], index, weights / weights.sum(1, keepdim=True))
        assert not torch.allclose(block(x)[0], expected, rtol=1e-3, atol=0)
        reap["drop_experts"](model, [kept])
        assert torch.allclose(block(x)[0], expected, rtol=1e-4, atol=1e-9)


def right_answer(question: str) -> str:
    word, *rest = question.removesuffix(" =").split()
    numbers = [int(text) for text in rest if text != "in"]
    answers: dict[str, Any] = {
        "add": lambda: sum(numbers),
        "sub": lambda: numbers[0] - numbers[1],
        "mul": lambda: numbers[0] * numbers[1],
        "sort": lambda: " ".join(map(str, sorted(numbers))),
        "reverse": lambda: " ".join(map(str, reversed(numbers))),
        "count": lambda: numbers[1:].count(numbers[0]),
    }
    return str(answers[word]())


def test_problems_have_right_answers_and_are_held_out() -> None:
    task = runpy.run_path(str(SCRIPTS / "task.py"))
    for kind in task["KINDS"]:
        parts = [
            dict(itertools.islice(task["problems"](kind, seed, held), 300)) for seed, held in ((0, False), (1, True))
        ]
        assert not set(parts[0]) & set(parts[1])
        for question, answer in itertools.chain(*(part.items() for part in parts)):
            assert answer == f" {right_answer(question)}\n"


def install(folder: Path, name: str, licence: str, text: str) -> None:
    """A package as pip leaves it: one module, what it is, and what belongs to it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nLicense: {licence}\n")
    (info / "RECORD").write_text(f"{name}.py,,\n{name}-1.0.dist-info/METADATA,,\n")


def module(number: int) -> str:
    return "".join(f"def function_{number}_of_{line}(value):\n    return value + {line}\n" for line in range(40))


@pytest.mark.parametrize(("script", "experiment"), [("run.py", "Experiment"), ("mixture.py", "Mixture")])
def test_results_of_a_model_that_is_gone_stay_alone(tmp_path: Path, script: str, experiment: str) -> None:
    """A model that is trained again is another one, and its results would stand among those of the first."""
    loaded = runpy.run_path(str(SCRIPTS / script))
    records, weights = tmp_path / "tiny-0.jsonl", tmp_path / "tiny-0.pt"
    records.write_text('{"key": "trained"}\n')
    one = SimpleNamespace(log=loaded["Log"](records), weights=weights, data=SimpleNamespace(device="cpu"))
    told = f"{records} has results of a trained model, and {weights} is not there; name its --weights, or another --out"
    with pytest.raises(SystemExit, match=re.escape(told)):
        loaded[experiment].train(one, *([1] if script == "mixture.py" else []))
    assert records.read_text() == '{"key": "trained"}\n'


@pytest.mark.slow
def test_the_experiment_from_text_to_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.CONTEXT", 32)
    folder, corpus, out = tmp_path / "site-packages", tmp_path / "corpus.xz", tmp_path / "records"
    for i in range(150):  # of which a hash holds some out
        install(folder, f"package{i}", "MIT", module(i))
    install(folder, "bought", "NVIDIA Proprietary Software", module(1000))
    install(folder, "unnamed", "", module(1001))
    install(folder, "copied", "MIT", module(7).replace("value + 3", "value - 3"))
    run("corpus.py", "--no-debian", "--site-packages", folder, "--sources", tmp_path / "from.json", "--out", corpus)
    told = json.loads((tmp_path / "from.json").read_text())
    used = [set(told["packages"][part]) for part in ("train", "packages")]
    assert used[1]
    assert not used[0] & used[1]
    assert not {"bought", "unnamed"} & (used[0] | used[1])
    assert len({"package7", "copied"} & (used[0] | used[1])) == 1
    one = told["packages"]["train"]["package7" if "package7" in used[0] else "copied"]
    assert (one["licences"], one["versions"]) == (["MIT"], ["1.0"])
    command = ("run.py", "--corpus", corpus, "--epochs", 1, "--windows", 16, "--match-steps", 2, "--tiny")
    command += ("--limit", 1000, "--weights", tmp_path / "weights", "--out", out)
    run(*command)
    lines = (out / "tiny-0.jsonl").read_text()
    records = {record["key"]: record for record in map(json.loads, lines.splitlines())}
    assert records["6:8 sparsegpt + match 0"]["zeros"] == records["6:8 sparsegpt + match 0.03@0.05"]["zeros"] == 0.25
    assert records["dense none 0"]["zeros"] == records["1-layers left-out 0"]["zeros"] == 0
    assert len(records["1-layers left-out 0"]["kept"]) == 3
    assert records["dense none 0"]["int8"] != records["dense none 0"]["fp8"]
    assert json.loads((out / "tiny-3-0.jsonl").read_text().splitlines()[0])["layers"] == 3
    mixture = ("mixture.py", "--corpus", corpus, "--limit", 1000, "--steps", 2, "--windows", 2)
    run(*mixture, "--weights", tmp_path / "weights", "--out", out)
    records = {r["key"]: r for r in map(json.loads, (out / "mixture-0.jsonl").read_text().splitlines())}
    assert [records[f"{p} sparsegpt 0"]["experts_kept"] for p in ("6:8", "2:4")] == [0.75, 0.5]
    assert [len(layer) for layer in records["3-experts reap 0"]["kept"]] == [9, 9, 9]
    assert records["dense none 0"]["packages_perplexity"] != records["dense none 0"]["int8"]["packages_perplexity"]
    run(*command)  # everything is there already
    assert (out / "tiny-0.jsonl").read_text() == lines
