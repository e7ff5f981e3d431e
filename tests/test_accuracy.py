"""The accuracy page, its tables and its records agree, and the experiment's scripts run."""

from __future__ import annotations

import itertools
import json
import math
import re
import runpy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slidesparse.models.learn_rotation import learn, mean_damage, random_rotation

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results/accuracy"
SCRIPTS = ROOT / "benchmarks/accuracy"
PAGE = (ROOT / "docs/accuracy.md").read_text()
WORDS = " ".join(PAGE.split())


def tables_of(text: str) -> dict[str, set[str]]:
    """Header -> rows, of all tables with that header."""
    found: dict[str, set[str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = table.splitlines()
        found.setdefault(header, set()).update(rows)
    return found


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


def test_a_smaller_dense_model_stands_beside_the_model_that_it_is_smaller_than() -> None:
    report = runpy.run_path(str(SCRIPTS / "report.py"))
    runs = report["read"](RECORDS, "30m")
    assert [name for name, *_ in report["smaller"](RECORDS, runs)] == ["trained with 12 layers"]
    other = {0: {**runs[0], "trained": {**runs[0]["trained"], "model": "100m"}}}
    assert not list(report["smaller"](RECORDS, other))


def test_a_single_seed_is_drawn_without_errors_and_on_the_axes_of_the_others(tmp_path: Path) -> None:
    report = runpy.run_path(str(SCRIPTS / "report.py"))
    drawn: list[Any] = []
    script = report["curve"].__globals__
    script["Figure"] = type("Kept", (script["Figure"],), {"savefig": lambda self, *_, **__: drawn.append(self)})
    runs = report["read"](RECORDS, "30m")
    report["curve"]({"30m": runs, "100m": {0: runs[0]}}, tmp_path / "curve.png")
    (figure,) = drawn
    several, single = figure.axes[:3], figure.axes[3:]
    assert {bars.has_yerr for axes in several for bars in axes.containers} == {True}
    assert {bars.has_yerr for axes in single for bars in axes.containers} == {False}
    assert [axes.get_ylim() for axes in several] == [axes.get_ylim() for axes in single]
    for axes in figure.axes:
        bottom, top = axes.get_ylim()
        assert bottom < axes.dataLim.y0
        assert axes.dataLim.y1 < top


def test_the_page_quotes_the_tables() -> None:
    drawn, quoted = tables_of((RECORDS / "tables.md").read_text()), tables_of(PAGE)
    assert len(quoted) >= 6
    own = [header for header in quoted if header not in drawn]
    assert own == ["| target | result |"]
    for header, rows in quoted.items():
        if header not in own:
            assert rows <= drawn[header], rows - drawn[header]


def test_the_page_says_in_words_what_the_records_say() -> None:
    """The sentences whose numbers stand in no table of the page."""
    report = runpy.run_path(str(SCRIPTS / "report.py"))
    runs, matched = report["read"](RECORDS, "30m"), report["MATCHED"]
    assert len(runs) == 3
    patterns = ("6:8", "4:6", "2:4")

    def loss(key: str, dtype: str = "") -> float:
        found: list[float] = report["values"](runs, key, "packages_perplexity", dtype)
        return sum(found) / len(found)

    def percent(part: str, whole: str) -> list[int]:
        return [round(100 * (1 - loss(f"{p} {part}") / loss(f"{p} {whole}"))) for p in patterns]

    assert percent(f"{matched} 0", "sparsegpt 0") == [27, 25, 30]
    assert "Matching takes 27, 25 and 30 % off SparseGPT's loss" in WORDS
    assert percent(f"{matched} 0.03@0.05", f"{matched} 0") == [20, 24, 27]
    assert "it takes 20, 24 and 27 % off the loss" in WORDS
    assert percent(f"{matched} 0.03@0.15", f"{matched} 0")[2] == 35
    counted = [round(100 * runs[2][f"6:8 {matched} {end}"]["exact"]["count"]) for end in ("0.03@0.15", "0.03@0.05")]
    dense_counts = round(100 * runs[2]["dense none 0"]["exact"]["count"])
    assert f"{counted[0]} % right where it had {dense_counts}" in WORDS
    assert counted[1] >= dense_counts
    keys = [f"{pattern} {matched} 0" for pattern in patterns]
    added = {dtype: [loss(key, dtype) - loss(key) for key in ("dense none 0", *keys)] for dtype in ("int8", "fp8")}
    ranges = {dtype: f"{min(found):.2f} to {max(found):.2f} %" for dtype, found in added.items()}
    assert f"INT8 adds {ranges['int8']} and FP8 {ranges['fp8']}" in WORDS
    speeds = report["served_speeds"]("mixed")
    at = (1.2 - speeds["4:6"]) / (speeds["2:4"] - speeds["4:6"])
    between = [
        (1 - at) * loss(f"4:6 {matched} {end}") + at * loss(f"2:4 {matched} {end}") for end in ("0", "0.03@0.05")
    ]
    assert f"gives {between[0]:.1f} % there, or {between[1]:.1f}." in WORDS
    left_out = "2-layers left-out"
    best = loss(f"{left_out} {report['best_recovery'](runs, left_out)}")
    rival = min(loss(f"4:6 {matched} {end}") for end in ("0.03@0.05", "0.03@0.15"))
    assert f"{loss(f'{left_out} 0') / loss(f'4:6 {matched} 0'):.0f} times the loss of 4:6 in one shot" in WORDS
    assert f"and {best / rival:.1f} times when both are recovered" in WORDS
    plans = {seed: records[f"plan@1.2 {matched} 0"] for seed, records in runs.items()}
    chosen = [Counter(plan["patterns"].values()) for plan in plans.values()]
    counts = {name: sorted(counter[name] for counter in chosen) for name in ("2:4", "4:6", "dense")}
    assert {name: (found[0], found[-1]) for name, found in counts.items()} == {
        "2:4": (41, 45),
        "4:6": (20, 29),
        "dense": (25, 33),
    }
    foreseen = [
        sum(d for (n, *_), p, d in runs[seed]["sensitivities"]["damages"] if plan["patterns"][n] == p)
        for seed, plan in plans.items()
    ]
    grown = [
        math.log(plan["packages_perplexity"] / runs[seed]["dense none 0"]["packages_perplexity"])
        for seed, plan in plans.items()
    ]
    said = [", ".join(f"{nats:.4f}" for nats in three[:2]) + f" and {three[2]:.4f}" for three in (foreseen, grown)]
    assert f"foresaw {said[0]} nats; the losses on held-out packages grew by {said[1]}" in WORDS
    corpus = json.loads((RECORDS / "corpus-288.json").read_text())
    assert all(corpus["facts"] == records["trained"]["corpus"] for records in runs.values())
    assert "14 whole packages are held out by a hash of their names (164 files, 1.6 MB), and 107 single files" in WORDS
    assert [len(corpus["packages"][part]) for part in ("train", "packages")] == [288, 14]
    assert all(about["licences"] for part in corpus["packages"].values() for about in part.values())


def test_the_page_says_of_the_larger_model_what_its_records_say() -> None:
    report, lm = (runpy.run_path(str(SCRIPTS / name)) for name in ("report.py", "lm.py"))
    both = {model: report["read"](RECORDS, model) for model in ("30m", "100m")}
    (records,) = both["100m"].values()
    matched, patterns = report["MATCHED"], ("6:8", "4:6", "2:4")

    def loss(key: str, measure: str = "packages_perplexity", dtype: str = "", model: str = "100m") -> float:
        found: list[float] = report["values"](both[model], key, measure, dtype)
        return sum(found) / len(found)

    def shares(method: str) -> list[str]:
        keys = [f"{pattern} {method} 0" for pattern in patterns]
        return [f"{100 * loss(key) / loss(key, model='30m'):.0f}" for key in keys]

    def each(numbers: list[str]) -> str:
        return f"{', '.join(numbers[:-1])} and {numbers[-1]}"

    def ends(numbers: list[str]) -> str:
        return f"{min(numbers, key=float)} to {max(numbers, key=float)} %"

    assert f"matched the losses are {each(shares(matched))} % of those with 30 M" in WORDS
    assert (
        f"SparseGPT alone they are {ends(shares('sparsegpt'))}, and by magnitude {ends(shares('magnitude'))}" in WORDS
    )
    keys = [f"{pattern} {matched} 0" for pattern in patterns]
    assert f"about half as much in one shot: {each([f'{loss(key):.1f}' for key in keys])} %" in WORDS
    trained = records["trained"]
    assert trained["corpus"] == both["30m"][0]["trained"]["corpus"]
    each_parameter = [one[0]["trained"]["tokens"] / one[0]["trained"]["parameters"] for one in both.values()]
    assert "{1:.1f} tokens for each parameter in place of {0:.1f}".format(*each_parameter) in WORDS
    assert f"has {trained['layers']} layers too, of {lm['SIZES']['100m'].hidden} in place of 384" in WORDS
    assert (lm["SIZES"]["30m"].hidden, both["30m"][0]["trained"]["layers"]) == (384, 14)
    eight, fewer = (
        {d: [loss(k, dtype=d, model=m) - loss(k, model=m) for k in ("dense none 0", *keys)] for d in ("int8", "fp8")}
        for m in ("100m", "30m")
    )
    assert all(max(eight[dtype]) < min(fewer[dtype]) for dtype in eight)
    added = {d: ends([f"{value:.2f}" for value in one]) for d, one in eight.items()}
    assert f"INT8 adds {added['int8']}, and FP8 {added['fp8']}, no more than with 30 M" in WORDS

    def off(end: str, model: str = "100m") -> list[str]:
        pairs = [(loss(f"{p} {matched} {end}", model=model), loss(f"{p} {matched} 0", model=model)) for p in patterns]
        return [f"{100 * (1 - recovered / before):.0f}" for recovered, before in pairs]

    gained = [off(end) for end in ("0.03@0.05", "0.03@0.15", "0.01@0.05")]
    assert f"{each(gained[0])} % of the loss at 0.05. At 0.15 it takes {each(gained[1])} % off" in WORDS
    assert all(
        float(here) < 0.5 * float(there) for here, there in zip(gained[0][:2], off("0.03@0.05", "30m"), strict=False)
    )
    assert f"only 2:4 gains**, {gained[2][2]} % of its loss" in WORDS
    assert abs(float(gained[2][1])) <= 1
    perplexity = {
        name: [f"{records[f'{name} {matched} {end}']['packages_perplexity']:.3f}" for end in ("0.01@0.05", "0")]
        for name in ("6:8", "plan@1.2")
    }
    assert "gets worse than in one shot: a perplexity of {} after {}.".format(*perplexity["6:8"]) in WORDS
    assert "So does the plan, {} after {}.".format(*perplexity["plan@1.2"]) in WORDS
    assert all(after > before for after, before in perplexity.values())
    assert f"recovered for 1 %, {records[f'6:8 {matched} 0.01@0.05']['recovery_steps']} steps" in WORDS
    assert not any("0.01@" in key for run in both["30m"].values() for key in run)
    plan, other = ([f"{loss(f'{p} {matched} {end}'):.2f}" for end in ("0", "0.03@0.15")] for p in ("plan@1.2", "4:6"))
    assert f"{plan[0]} % against {other[0]} in one shot, and {plan[1]} against {other[1]} recovered at 0.15" in WORDS
    assert f"and {plan[0]} against {other[0]} % with 101 M; its speed is foretold" in WORDS
    left_out = [loss(f"{count}-layers left-out {end}") for count, end in ((2, "0"), (2, "0.03@0.3"), (4, "0.03@0.3"))]
    assert report["best_recovery"](both["100m"], "2-layers left-out") == "0.03@0.3"
    times = left_out[1] / loss(f"4:6 {matched} {report['best_recovery'](both['100m'], f'4:6 {matched}')}")
    assert f"2 of 14 lose {left_out[0]:.0f} % in one shot, and {left_out[1]:.1f} % at best, {times:.0f} times" in WORDS
    assert f"and {plan[1]} against {left_out[1]:.1f} % with 101 M" in WORDS
    two, four = "2-layers left-out", "4-layers left-out"
    assert all(loss(f"{two} {end}") > loss(f"{two} {end}", model="30m") for end in ("0", "0.03@0.3"))
    assert f"4 of 14 lose less, {loss(f'{four} 0'):.0f} %" in WORDS
    assert loss(f"{four} 0") < loss(f"{four} 0", model="30m")
    assert f"at 0.3, and the larger one {left_out[2]:.1f} %" in WORDS
    points = {
        end: [loss(f"{p} {matched} {end}", "exact_mean") for p in (*patterns, "plan@1.2")] for end in ("0", "0.01@0.05")
    }
    lost = [f"{-value:.1f}" for value in points["0"]]
    assert (
        f"Of {100 * records['dense none 0']['exact_mean']:.1f} % matched patterns lose {each(lost[:3])} points" in WORDS
    )
    assert f"and the plan {lost[3]}. Recovered for 1 % they change by" in WORDS
    assert f"change by {each([f'{value:+.1f}' for value in points['0.01@0.05'][:3]])} points" in WORDS
    worst = max(abs(loss(f"{p} {matched} 0.03@0.15", "exact_mean")) for p in patterns)
    assert f"off, and exact answers stay within {worst:.1f} points" in WORDS
    recovered = [r["exact"] for key, r in records.items() if matched in key and "@0." in key.rpartition(" ")[2]]
    assert len(recovered) == 12
    right = {kind: [one[kind] for one in recovered] for kind in recovered[0]}
    assert max(right, key=lambda kind: max(right[kind]) - min(right[kind])) == "count"
    counted = ends([f"{100 * share:.0f}" for share in right["count"]])
    dense = f"{100 * records['dense none 0']['exact']['count']:.0f} % right"
    assert f"Counting moves most: dense {dense}, and after one recovery or another {counted}" in WORDS
    row = next(line for line in PAGE.splitlines() if line.startswith("| 6:8 recovered by 1 %"))
    brief = [
        [f"{loss(f'{p} {matched} 0.01@0.05', measure):.2f}" for p in patterns[:2]]
        for measure in ("packages_perplexity", "files_perplexity")
    ]
    assert "{} and {} % on held-out packages, {} and {} % on files".format(*brief[0], *brief[1]) in row


def test_the_page_says_of_the_mixture_what_its_records_say() -> None:
    report = runpy.run_path(str(SCRIPTS / "report.py"))
    runs = report["read"](RECORDS, "mixture")
    records, others = runs.pop(0), runs.values()
    told = records["trained"]
    assert [told[name] for name in ("layers", "experts", "vocabulary", "steps")] == [3, 12, 1024, 3600]
    assert f"{told['parameters'] / 1e6:.1f} M parameters, {told['expert_parameters'] / 1e6:.1f} M of them" in WORDS
    assert f"read {told['tokens'] / 1e6:.1f} M tokens" in WORDS
    assert f"judged on {told['judged_tokens'] / 1e3:.0f} thousand tokens" in WORDS
    assert f"perplexity of {records['dense none 0']['packages_perplexity']:.1f}" in WORDS
    later = " and ".join(f"{one['dense none 0']['packages_perplexity']:.1f}" for one in others)
    assert len(others) == 2
    assert "Three seeds" in WORDS
    assert f"and have {later}" in WORDS
    (packages,) = {one["trained"]["corpus"]["train"]["packages"] for one in others}
    assert f"of {packages} packages in place of {told['corpus']['train']['packages']}" in WORDS


def test_named_records_and_pictures_exist() -> None:
    for name in re.findall(r"`([\w*-]+\.jsonl)`", PAGE):
        assert list(RECORDS.glob(name)), name
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


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


def test_a_rotated_model_is_the_same_function() -> None:
    lm, rotation = (runpy.run_path(str(SCRIPTS / name)) for name in ("lm.py", "rotation.py"))
    model = lm["build"](lm["SIZES"]["rotated"], 0, 64).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 2.0)
    ids = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        q = random_rotation(128, 0)
        torch.testing.assert_close(q @ q.T, torch.eye(128))
        weight = model.model.layers[0].mlp.down_proj.weight.clone()
        rotation["fold_gains"](model)
        rotation["rotate"](model, q)
        assert not torch.allclose(model.model.layers[0].mlp.down_proj.weight, weight, atol=1e-3)
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cost", ["gram", "inverse"])
def test_a_learned_rotation_removes_what_costs_less(cost: str) -> None:
    lm, learned, rotation = (
        runpy.run_path(str(SCRIPTS / script)) for script in ("lm.py", "learned_rotation.py", "rotation.py")
    )
    model = lm["build"](replace(lm["SIZES"]["rotated"], hidden=64, intermediate=96, layers=1), 0, 64).eval()
    rotation["fold_gains"](model)
    batches = [{"input_ids": torch.randint(0, 64, (2, 40))}]

    def found() -> list[Any]:
        return [learned["costed"](one, cost, 4) for one in learned["reads"](model, batches)]

    by_hand = []
    for one in learned["reads"](model, batches):
        damped = one.gram.double() + 0.01 * one.gram.diagonal().mean() * torch.eye(len(one.gram))
        each = one.gram.diagonal() if cost == "gram" else 1 / damped.inverse().diagonal()
        groups = (one.weight.square() * each).unflatten(1, (-1, 4)).sort(-1).values
        by_hand.append(float(groups[..., :2].sum() / ((one.weight @ one.gram) * one.weight).sum()))
    before = mean_damage(torch.eye(64), found(), 4)
    assert before == pytest.approx(sum(by_hand) / 4, rel=1e-4)
    q = learn(torch.eye(64), found(), 4, 20)
    torch.testing.assert_close(q @ q.T, torch.eye(64), rtol=1e-5, atol=1e-5)
    after = mean_damage(q, found(), 4)
    assert after < 0.9 * before
    rotation["rotate"](model, q)  # the rotated model has that damage as it is
    assert mean_damage(torch.eye(64), found(), 4) == pytest.approx(after, rel=1e-3)


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


@pytest.mark.parametrize(
    ("script", "experiment"), [("run.py", "Experiment"), ("mixture.py", "Mixture"), ("rotation.py", "Experiment")]
)
def test_results_of_a_model_that_is_gone_stay_alone(tmp_path: Path, script: str, experiment: str) -> None:
    """A model that is trained again is another one, and its results would stand among those of the first."""
    loaded = runpy.run_path(str(SCRIPTS / script))
    records, weights = tmp_path / "tiny-0.jsonl", tmp_path / "tiny-0.pt"
    records.write_text('{"key": "trained"}\n')
    one = SimpleNamespace(log=loaded["Log"](records), weights=weights, data=SimpleNamespace(device="cpu"))
    told = f"{records} has results of a trained model, and {weights} is not there; name its --weights, or another --out"
    with pytest.raises(SystemExit, match=re.escape(told)):
        loaded[experiment].train(
            one, *([weights] if script == "rotation.py" else [1] if script == "mixture.py" else [])
        )
    assert records.read_text() == '{"key": "trained"}\n'


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
    assert 0 < records["plan@1.2 sparsegpt + match 0"]["zeros"] < 0.5
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
