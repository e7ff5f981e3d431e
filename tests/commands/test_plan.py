"""Choosing patterns: that the choice is the best one, that it is measured once, and that ``prune`` takes it."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import resource
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from checkpoints import SMALL, edited_config, make_source, reverse_letters
from oracles import calibration_gram
from safetensors.torch import load_file, save_file
from torch import nn

import slidesparse.offline.plan.plan as planning
from slidesparse.base import from_bench
from slidesparse.cli import main
from slidesparse.errors import CheckpointError, InputError, UnsupportedError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.marker import Marker
from slidesparse.gemm import get_backend
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.offline.calibrate.calibration import Calibration, calibration_windows
from slidesparse.offline.plan import sensitivity
from slidesparse.offline.plan.choose_patterns import (
    Multiplies,
    PatternChoice,
    PlanSet,
    Target,
    choose_patterns,
    least_zeros,
    modelled_bytes,
    modelled_cost,
)
from slidesparse.offline.plan.plan import plan_checkpoint
from slidesparse.offline.plan.plan_options import HELD_OUT, PlanOptions, parse_gain
from slidesparse.offline.plan.sensitivity import Sensitivity, measure_sensitivities
from slidesparse.offline.plan.sensitivity_file import opened_measurements
from slidesparse.offline.stored_plan import read_plan
from slidesparse.prune import Linears, get_pruner, prune_mask, sparsegpt
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import Rounding
from slidesparse.weights.support import check_pattern, value_bits

TEXTS = ("8:10", "6:8", "4:6", "2:4")


def sets(count: int, seed: int = 0) -> list[PlanSet]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        damages = torch.rand(len(TEXTS), generator=generator).sort().values.tolist()
        choices = [
            PatternChoice(DENSE, 0.0),
            *(PatternChoice(Pattern.parse(t), d) for t, d in zip(TEXTS, damages, strict=True)),
        ]
        made.append(PlanSet((f"l{i}.a", f"l{i}.b"), ((64, 120 * (1 + i % 3)), (32, 120 * (1 + i % 3))), tuple(choices)))
    return made


# -- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [Target(speedup=1.0), Target(speedup=1.2), Target(speedup=1.5), Target(sparsity=0.3), Target(gigabytes=9e-5)],
    ids=str,
)
@pytest.mark.parametrize("gain", [Fraction(2), Fraction(8, 5)], ids=str)
def test_no_other_choice_is_better(target: Target, gain: Fraction) -> None:
    candidates = sets(5)
    plan, time = choose_patterns(candidates, target, [Multiplies(gain)]), Multiplies(gain)
    dense, all_weights = (
        sum(time.of(one, DENSE) for one in candidates),
        sum(o * k for s in candidates for o, k in s.shapes),
    )

    def reaches(chosen: tuple[PatternChoice, ...]) -> bool:
        pairs = [(one, choice.pattern) for one, choice in zip(candidates, chosen, strict=True)]
        shapes = [(pattern, *shape) for one, pattern in pairs for shape in one.shapes]
        if target.speedup is not None:
            return sum(time.of(*pair) for pair in pairs) * target.speedup <= dense * (1 + 1e-9)
        if target.sparsity is not None:
            return sum(out * least_zeros(p, k) for p, out, k in shapes) >= target.sparsity * all_weights * (1 - 1e-9)
        return float(sum(modelled_bytes(*shape) for shape in shapes)) <= target.gigabytes * 1e9 * (1 + 1e-9)

    every = itertools.product(*(one.choices for one in candidates))
    best = min(sum(choice.damage for choice in chosen) for chosen in every if reaches(chosen))
    assert plan.damage == pytest.approx(best, abs=1e-9)
    if target.speedup is not None:
        assert plan.speedup >= target.speedup * (1 - 1e-9)
    if target.sparsity is not None:
        assert plan.sparsity >= target.sparsity - 1e-9
    if target.gigabytes is not None:
        assert plan.gigabytes <= target.gigabytes * (1 + 1e-9)


@pytest.mark.parametrize("largest", [1e2, 1e4, 1e8])
def test_one_ruinous_choice_does_not_blur_the_others(largest: float) -> None:
    """The solver's tolerances are absolute: next to damages of this size, all that matter would be alike."""
    mild = sets(5)
    spoilt = [
        PlanSet(
            s.names,
            s.shapes,
            tuple(PatternChoice(c.pattern, largest * (i == 4) or c.damage * 1e-4) for i, c in enumerate(s.choices)),
        )
        for s in mild
    ]
    without = [PlanSet(s.names, s.shapes, s.choices[:-1]) for s in spoilt]
    expected = choose_patterns(without, Target(speedup=1.25))
    assert choose_patterns(spoilt, Target(speedup=1.25)).damage == pytest.approx(expected.damage, rel=1e-5)
    assert expected.damage < 5e-4


def test_an_answer_that_is_not_proven_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HiGHS says at its time limit, with a plan in its hands."""
    import scipy.optimize

    def out_of_time(damages: Any, **_: Any) -> scipy.optimize.OptimizeResult:
        return scipy.optimize.OptimizeResult(status=1, x=damages * 0, message="Time limit reached.")

    monkeypatch.setattr(scipy.optimize, "milp", out_of_time)
    with pytest.raises(UnsupportedError, match="did not find the best plan"):
        choose_patterns(sets(3), Target(speedup=1.2))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"speedup": 1.2, "sparsity": 0.2},
        {"speedup": 0.9},
        {"speedup": float("nan")},
        {"sparsity": 1.0},
        {"gigabytes": 0.0},
    ],
)
def test_unusable_targets(given: dict[str, float]) -> None:
    with pytest.raises(InputError, match="target of a plan"):
        Target(**given)


@pytest.mark.parametrize(("text", "gain"), [("6:8", 2), ("4:6", Fraction(8, 5)), ("4:6@50%", 2), ("dense", 2)])
def test_the_model_of_speed_is_the_patterns_own(text: str, gain: Fraction) -> None:
    pattern = Pattern.parse(text)
    assert 10 * 240 / modelled_cost(pattern, 10, 240, Fraction(gain)) == pattern.speedup(Fraction(gain))


def test_padding_costs() -> None:
    # 152 = 19 groups of 8 but 15.2 of 10: the last group is multiplied whole
    assert modelled_cost(Pattern.parse("8:10"), 1, 152, Fraction(2)) == 16 * 16 / 2
    assert modelled_cost(Pattern.parse("4:6@50%"), 1, 14, Fraction(2)) == 2 * 8 / 2 + 2


@pytest.mark.parametrize(("backend", "recipe", "bits"), [("hopper", "absmax", 8), ("hopper-6bit", "6bit", 6)])
@pytest.mark.parametrize("text", ["2:4", "6:8", "14:16", "4:6@50%", "dense"])
def test_sizes_are_those_of_the_kernel(text: str, backend: str, recipe: Rounding, bits: int) -> None:
    """Dense groups, and all of a dense weight, have eight bits in any case."""
    pattern, out = Pattern.parse(text), 256
    weight = torch.randn(out, 128 * pattern.group)  # whole slabs
    weight = weight * prune_mask(weight, pattern) if pattern != DENSE else weight
    form = get_backend(backend).prepare(pack_weight(weight, pattern, torch.int8, recipe))
    assert sum(part.nbytes for part in form) == modelled_bytes(pattern, *weight.shape, bits=bits)
    if text == "6:8":
        assert modelled_bytes(pattern, 1, 1, bits=bits) == Fraction(15 if bits == 8 else 12, 16)


@pytest.mark.parametrize("columns", [32, 40, 100, 120, 320])
@pytest.mark.parametrize("text", ["2:4", "6:8", "14:16", "4:6@25%"])
def test_promised_zeros_are_there(text: str, columns: int) -> None:
    pattern, weight = Pattern.parse(text), torch.rand(3, columns) + 1
    weight[:, -(columns % pattern.group or pattern.group) :] *= 0.01  # so that the cut group is among the cheapest
    mask = prune_mask(weight, pattern)
    assert 3 * least_zeros(pattern, columns) == int((~mask).sum())


# -- the measurement -----------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path, "llama", torch.float32)


def test_damage_by_definition_and_the_model_is_as_before(source: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    linears = find_targets(model).linears
    coupled = dict.fromkeys(linears, Pattern.parse("6:8"))
    groups = sets_to_prune(model, linears, coupled, get_pruner("wanda"), run_once(model))
    ids, held_out = torch.randint(3, 70, (4, 16)), torch.randint(3, 70, (2, 16))
    wanted = {tuple(names): [Pattern.parse("6:8"), Pattern.parse("2:4")] for names in groups}
    text, judged = ([{"input_ids": one, "use_cache": False}] for one in (ids, held_out))
    found = list(measure_sensitivities(model, wanted, get_pruner("wanda"), text, judged))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(found) == 2 * len(groups)
    with torch.no_grad():
        log_p = model(held_out).logits.double().log_softmax(-1)
        for one in (found[0], found[5], found[-1]):
            other: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
            read: list[torch.Tensor] = []
            handle = other.get_submodule(one.names[0]).register_forward_pre_hook(
                lambda _, args, read=read: read.append(args[0])
            )
            other(ids)
            handle.remove()
            gram = calibration_gram(read[0])
            weights = {name: other.get_submodule(name).weight.detach().clone() for name in one.names}
            for name, weight in get_pruner("wanda").prune(Linears(weights, Pattern.parse(one.pattern), gram)).items():
                other.get_submodule(name).weight.data.copy_(weight)
            log_q = other(held_out).logits.double().log_softmax(-1)
            expected = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
            assert one.damage == pytest.approx(expected, rel=1e-3, abs=1e-7)  # float32 softmax


class Twice(nn.Module):
    """A model whose layers run twice in a pass, so that none of them has one input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        for layer in (*self.layers, *self.layers):
            x = x + layer(x).tanh()
        return SimpleNamespace(logits=x)


def test_a_model_whose_layers_cannot_run_one_at_a_time_runs_whole() -> None:
    model, x = Twice().eval(), torch.randn(2, 8, 16)
    pruner, pattern = get_pruner("magnitude"), Pattern.parse("2:4")
    [found] = measure_sensitivities(model, {("layers.1.0",): [pattern]}, pruner, [], [{"x": x}])
    with torch.no_grad():
        dense, weight = model(x).logits, model.layers[1][0].weight
        weight.copy_(pruner.prune(Linears({"w": weight}, pattern))["w"])
        assert found.damage == sensitivity.mean_divergence([dense], lambda _: model(x).logits) > 0


def test_only_layers_from_the_pruned_one_on_run_and_a_factor_is_shared(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers, the first ran again for each pattern of the second."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    first, factors = [], []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: first.append(1))
    made = sparsegpt.inverse_factor
    monkeypatch.setattr(sparsegpt, "inverse_factor", lambda *given: factors.append(1) or made(*given))
    batch, runs = {"input_ids": torch.arange(3, 35)[None], "use_cache": False}, []
    for texts in (["6:8"], ["6:8", "4:6", "2:4"]):
        first.clear()
        wanted = {("model.layers.1.mlp.up_proj",): list(map(Pattern.parse, texts))}
        assert len([*measure_sensitivities(model, wanted, get_pruner("sparsegpt"), [batch], [batch])]) == len(texts)
        runs.append(len(first))
    assert runs[0] == runs[1]
    assert len(factors) == 2


def options(source: Path, **changes: Any) -> PlanOptions:
    given: dict[str, Any] = {
        "target": Target(speedup=1.2),
        "calibration": Calibration(str(source.parent / "text.txt"), 8, 32),
        "method": "wanda",
        "patterns": ("8:10", "6:8", "4:6@50%", "2:4"),
    }
    return PlanOptions(**(given | changes))


def test_measured_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source.parent
    calls = []
    damage = sensitivity._damage

    def counted(*arguments: Any) -> float:
        calls.append(arguments[1:3])
        if len(calls) == 10:
            raise KeyboardInterrupt
        return float(damage(*arguments))

    monkeypatch.setattr(sensitivity, "_damage", counted)
    with pytest.raises(KeyboardInterrupt):
        plan_checkpoint(source, folder / "plan.json", options(source))
    assert not (folder / "plan.json").exists()
    with open(folder / "plan.sensitivities.jsonl", "a") as file:
        file.write('{"names": ["half a li')  # killed while writing
    plan = plan_checkpoint(source, folder / "plan.json", options(source))
    assert len(calls) == 10 + 4 * 8 - 9
    again = plan_checkpoint(source, folder / "again.json", options(source))  # another file: measured anew, equal
    assert again == plan
    (folder / "plan.json").unlink()
    calls.clear()
    copy = folder / "copy"  # other times, another place, the same weights
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    faster = plan_checkpoint(copy, folder / "plan.json", options(source, target=Target(speedup=1.4)))
    assert not calls
    assert faster.damage > plan.damage
    (folder / "plan.json").unlink()
    for changed in ({"method": "magnitude"}, {"calibration": Calibration(str(folder / "text.txt"), 8, 32, seed=1)}):
        with pytest.raises(CheckpointError, match="was measured on another model, text or method"):
            plan_checkpoint(source, folder / "plan.json", options(source, **changed))
    reverse_letters(source)
    with pytest.raises(CheckpointError, match="was measured on another model, text or method"):
        plan_checkpoint(source, folder / "plan.json", options(source))


def test_rounding_to_16_bits_is_no_damage(tmp_path: Path) -> None:
    """After the least change all that follows is rounded anew, in each measurement once; a plan would add it up."""
    damages = []
    for dtype in (torch.bfloat16, torch.float32):
        (tmp_path / str(dtype)).mkdir()
        source = make_source(tmp_path / str(dtype), "llama", torch.bfloat16)
        weights = {name: one.to(dtype) for name, one in load_file(source / "model.safetensors").items()}
        save_file(weights, source / "model.safetensors", {"format": "pt"})
        with edited_config(source) as config:
            config["dtype"] = str(dtype).removeprefix("torch.")
        damages.append(plan_checkpoint(source, tmp_path / f"{dtype}.json", options(source)).damage)
    assert damages[0] == pytest.approx(damages[1], rel=1e-4)


def test_the_modelled_speed_counts_what_is_left_alone(source: Path) -> None:
    """All matrices of the model: attention is faster, and the MLP is not."""
    wanted = options(source, target=Target(speedup=1.1), ignore=("re:.*mlp",), patterns=("2:4",), method="magnitude")
    plan = plan_checkpoint(source, source.parent / "plan.json", wanted)
    shapes = {name: tuple(one.shape) for name, one in load_file(source / "model.safetensors").items()}
    every = {name: math.prod(shape) for name, shape in shapes.items() if "_proj.weight" in name}
    saved = sum(every[f"{name}.weight"] / 2 for name, pattern in plan.patterns.items() if pattern != DENSE)
    assert not any("mlp" in name for name in plan.patterns)
    assert 1.1 <= plan.speedup == pytest.approx(sum(every.values()) / (sum(every.values()) - saved))
    with pytest.raises(InputError, match=r"no choice of patterns reaches the target; got at best 1\.\d+x, 50.0% zeros"):
        plan_checkpoint(source, source.parent / "fast.json", replace(wanted, target=Target(speedup=1.5)))


def test_magnitude_reads_the_windows_alone_on_which_damage_is_measured(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text may be that short, and no window goes through the layers for statistics that nobody reads."""
    for module in (sensitivity, planning):
        for name in ("collect_grams", "prune_layers"):
            monkeypatch.setattr(module, name, lambda *_: pytest.fail("the method is calibrated"), raising=False)
    text = source.parent / "short.txt"
    text.write_text((source.parent / "text.txt").read_text()[: HELD_OUT * 32])
    wanted = options(source, method="magnitude", patterns=("6:8", "2:4"), calibration=Calibration(str(text), length=32))
    too_long = replace(wanted, calibration=Calibration(str(text), length=33))
    with pytest.raises(InputError, match="; needed 4 windows"):
        plan_checkpoint(source, source.parent / "plan.json", too_long)
    plan = plan_checkpoint(source, source.parent / "plan.json", wanted)
    assert plan.damage > 0
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    windows = calibration_windows(source, model.config, replace(wanted.calibration, samples=HELD_OUT))
    with torch.no_grad():
        before = [model(ids[None]).logits for ids in windows]
        for name, pattern in plan.patterns.items():
            weight = model.get_submodule(name).weight
            if pattern != DENSE:
                weight.copy_(get_pruner("magnitude").prune(Linears({name: weight}, pattern))[name])
        found = sensitivity.mean_divergence(before, lambda i: model(windows[i][None]).logits)
    assert plan.together == pytest.approx(found, rel=1e-4)


def test_options_of_loads_alone(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="got --at without --speedup"):
        options(source, at=("mixed",), target=Target(sparsity=0.2))
    with pytest.raises(InputError, match="--gpu; got no --at"):
        options(source, gpu="H100")
    monkeypatch.setattr(from_bench, "entry_points", lambda **_: [])
    with pytest.raises(UnsupportedError, match="slidesparse plan --at needs slidesparse-bench"):
        options(source, at=("mixed",))


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"names": [], "pattern": "6:8", "damage": 0.1}',
        b'{"names": ["a"], "pattern": "6:8", "damage": -0.1}',
        b'{"names": ["a"], "pattern": "6:8", "damage": NaN}',
        b'{"names": ["a"], "pattern": "6:8", "damage": ' + b"9" * 5000 + b"}",
        b"\xff",
    ],
    ids=lambda line: line[-24:].decode("ascii", "replace"),
)
def test_damaged_measurements_are_refused(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.sensitivities.jsonl"
    path.write_bytes(b"{}\n" + line + b"\n")
    with pytest.raises(CheckpointError, match=r"is damaged: .*remove it") as error:
        enter(path)
    assert str(error.value).count("; got ") <= 1


@pytest.mark.parametrize("content", ["", '{"model": "ha', '{"model": "other"}\n'])
def test_a_file_without_a_measurement_stops_nobody(content: str, tmp_path: Path) -> None:
    """As a run leaves it that failed at once, with a remedy that changes what is measured."""
    path = tmp_path / "plan.sensitivities.jsonl"
    path.write_text(content)
    with opened_measurements(path, {"model": "m", "ignore": []}) as file:
        file.add(Sensitivity(("a", "b"), "6:8", 0.25))
    with opened_measurements(path, {"model": "m", "ignore": []}) as again:
        assert again.damages_of([["a", "b"], ["c"]]) == {("a", "6:8"): 0.25}
        assert again.damages_of([["a"]]) == {}  # another set


def test_nothing_is_left_without_a_measurement(tmp_path: Path) -> None:
    path = tmp_path / "plan.sensitivities.jsonl"
    with opened_measurements(path, {"model": "m"}):
        assert path.exists()
    assert not path.exists()


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    """Closing the file writes once more what could not be written, and that error was the one to be told."""
    path = tmp_path / "plan.sensitivities.jsonl"
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)

    def run() -> None:
        with opened_measurements(path, {"model": "m"}) as file:
            file.add(Sensitivity(("a",), "6:8", 0.25))
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, allowed[1]))
            file.add(Sensitivity(("b",), "6:8", 0.25))

    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*plan.sensitivities.jsonl"):
            run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    with opened_measurements(path, {"model": "m"}) as again:
        assert again.damages_of([["a"], ["b"]]) == {("a", "6:8"): 0.25}


def test_the_second_of_two_plans_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.sensitivities.jsonl"
    with opened_measurements(path, {"model": "m"}) as file:
        file.add(Sensitivity(("a",), "6:8", 0.25))
        content = path.read_bytes()
        with pytest.raises(CheckpointError, match=r"another run is measuring into .*jsonl"):
            enter(path)
        assert path.read_bytes() == content


def enter(path: Path) -> None:
    with opened_measurements(path, {"model": "m"}):
        pass


def test_a_pipe_or_a_link_in_the_place_of_measurements(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "l").symlink_to("victim")
    for name, kind in (("p", "a pipe"), ("l", "a link")):
        with pytest.raises(CheckpointError, match=f"cannot be used; got {kind}"):
            enter(tmp_path / name)
    assert (tmp_path / "victim").read_text() == "precious"


def test_from_a_plan_to_a_checkpoint(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = source.parent
    text = ["--calibration", str(folder / "text.txt"), "--samples", "8", "--length", "32", "--device", "cpu"]
    command = ["plan", str(source), "--out", str(folder / "plan.json"), "--method", "wanda", *text]
    command += ["--patterns", "8:10", "6:8", "4:6", "2:4", "4:6@50%"]
    assert main([*command, "--speedup", "1.3"]) == 0
    told = capsys.readouterr().out
    assert "modelled 1.3" in told
    size = json.loads((folder / "plan.json").read_text())["modelled"]["gigabytes"] * 1e9
    assert f" zeros, {size / 1e3:.3g} kB, predicted damage" in told  # of 0.000 GB nobody learns anything
    seen = f"--calibration {folder}/text.txt --samples 8 --length 32"  # the same text, or prune may refuse it
    assert f"--plan {folder}/plan.json --method wanda {seen} --dtype int8" in told
    layers = read_plan(folder / "plan.json").layers
    assert len(layers) == 7 * SMALL["num_hidden_layers"]
    prune = ["prune", str(source), str(folder / "s"), "--plan", str(folder / "plan.json"), "--dtype", "int8"]
    assert main([*prune]) == 1  # without --method the plan's counts, not magnitude
    assert "wanda needs calibration text; add --calibration FILE" in capsys.readouterr().err
    assert main([*prune, *text]) == 0
    out = Checkpoint(folder / "s")
    marker = Marker.require(out.config, folder)
    for name, pattern in layers.items():
        assert str(marker.pattern_of(name)) == pattern
        check_pattern(out.tensor(f"{name}.weight"), pattern, name=name)
    for i in range(SMALL["num_hidden_layers"]):
        assert len({layers[f"model.layers.{i}.self_attn.{x}_proj"] for x in "qkv"}) == 1
        assert len({layers[f"model.layers.{i}.mlp.{x}_proj"] for x in ("gate", "up")}) == 1
    capsys.readouterr()
    assert main([*command, "--speedup", "1.3"]) == 1
    assert "plan.json exists" in capsys.readouterr().err
    assert main([*prune[:2], str(folder / "t"), *prune[3:], "--layer", "a=6:8"]) == 1
    assert "--layer and --plan" in capsys.readouterr().err


def test_prune_rounds_as_the_plan_says(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = source.parent / "plan.json"
    command = ["plan", str(source), "--out", str(out), "--method", "magnitude", "--patterns", "6:8", "--recipe", "6bit"]
    command += ["--calibration", str(source.parent / "text.txt"), "--length", "16", "--device", "cpu"]
    assert main([*command, "--sparsity", "0.2"]) == 0
    told, plan = capsys.readouterr().out, json.loads(out.read_text())
    assert "\nsizes are those of six bits; damage is measured in float, without what rounding to them adds\n" in told
    weights = load_file(source / "model.safetensors")
    rows = {name: weights[f"{name}.weight"].numel() for name in plan["layers"]}
    expected = sum(n * (0.75 if plan["layers"][name] == "6:8" else 1) for name, n in rows.items())
    assert "dense" in plan["layers"].values()
    assert plan["modelled"]["gigabytes"] * 1e9 == pytest.approx(expected)
    assert plan["recipe"] == "6bit"
    prune = ["prune", str(source), "--plan", str(out), "--dtype", "int8", "--device", "cpu"]
    pruned = next(name for name, pattern in plan["layers"].items() if pattern == "6:8")

    def bits(name: str, *more: str) -> int:
        assert main([*prune[:2], str(source.parent / name), *prune[2:], *more]) == 0
        return value_bits(Checkpoint(source.parent / name).tensor(f"{pruned}.weight"))

    assert bits("followed") == 6
    assert bits("overruled", "--recipe", "absmax") == 8
    capsys.readouterr()
    assert main([*prune[:2], str(source.parent / "f"), *prune[2:-3], "fp8"]) == 1
    told = capsys.readouterr().err
    assert "the 6bit recipe ends in INT8 storage; got fp8; needed --dtype int8, or --recipe absmax" in told
    del plan["recipe"]  # as plans were before there was one
    out.write_text(json.dumps(plan))
    assert bits("older") == 8


def test_json_is_not_mixed_with_what_the_solver_prints(
    source: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS has a printf left in it, which large problems reach."""
    import scipy.optimize

    libc, solve = ctypes.CDLL(None), scipy.optimize.milp

    def chatty(*arguments: Any, **named: Any) -> Any:
        libc.puts(b"HighsMipSolverData")
        return solve(*arguments, **named)

    monkeypatch.setattr(scipy.optimize, "milp", chatty)
    command = ["plan", str(source), "--out", str(source.parent / "plan.json"), "--method", "magnitude"]
    command += ["--calibration", str(source.parent / "text.txt"), "--length", "16", "--device", "cpu"]
    assert main([*command, "--patterns", "6:8", "--speedup", "1.1", "--json"]) == 0
    libc.fflush(None)
    told = capfd.readouterr()
    assert json.loads(told.out)["method"] == "magnitude"
    assert "HighsMipSolverData" in told.err


def test_a_plan_of_other_weights_is_told(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = source.parent
    plan_checkpoint(source, folder / "plan.json", options(source))
    other = Path(shutil.copytree(source, folder / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    for path, warned in ((source, False), (other, True)):
        prune = ["prune", str(path), str(folder / f"{path.name}-s"), "--plan", str(folder / "plan.json")]
        assert main([*prune, "--dtype", "int8", "--method", "magnitude", "--device", "cpu"]) == 0
        told = capsys.readouterr().err
        assert (f"the plan was measured on another checkpoint than {path}, whose" in told) is warned
        assert "no pattern" not in told


def test_layers_that_a_plan_does_not_name_are_told(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As when the plan of a smaller model of the family is taken: it would be pruned in part, without a word."""
    layers = {f"model.layers.0.{name}": "6:8" for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan = {"version": 1, "method": "magnitude", "layers": layers, "ignore": ["re:.*[qkv]_proj"]}
    (source.parent / "plan.json").write_text(json.dumps(plan))
    prune = ["prune", str(source), str(source.parent / "s"), "--plan", str(source.parent / "plan.json"), "--dry-run"]
    assert main([*prune, "--dtype", "int8", "--device", "cpu"]) == 0
    told = f"the plan has no pattern for 6 linears of {source}, which stay dense: "
    assert f"{told}model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj, model.layers.1.self_attn.o_proj" in (
        line := capsys.readouterr().err
    )
    assert line.endswith(" and 3 more\n")
    assert line.count("\n") == 1
    ignore = ["re:.*layers.1.*", "re:.*[qkv]_proj", "re:.*gate_proj", "re:.*up_proj"]
    (source.parent / "plan.json").write_text(json.dumps({**plan, "ignore": ignore}))
    assert main([*prune, "--dtype", "int8", "--device", "cpu"]) == 0
    assert "no pattern" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["6:9", 5])
def test_a_pattern_that_is_none_is_told_with_its_place(tmp_path: Path, text: object) -> None:
    """People edit plans by hand."""
    layers = {"model.layers.0.mlp.up_proj": "6:8", "model.layers.1.mlp.up_proj": text}
    (tmp_path / "p.json").write_text(json.dumps({"version": 1, "method": "magnitude", "layers": layers}))
    with pytest.raises(InputError, match=rf"p\.json, model\.layers\.1\.mlp\.up_proj: not a .*pattern; got {text}"):
        read_plan(tmp_path / "p.json")


def test_prune_can_leave_more_alone_than_a_plan(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = source.parent
    plan_checkpoint(source, folder / "plan.json", options(source))
    prune = ["prune", str(source), str(folder / "s"), "--plan", str(folder / "plan.json"), "--dtype", "int8"]
    prune += ["--method", "magnitude", "--device", "cpu", "--json"]
    assert main([*prune, "--ignore", "re:.*o_proj"]) == 0
    assert json.loads(capsys.readouterr().out)["dense"]["model.layers.0.self_attn.o_proj"] == "on the ignore list"
    assert main([*prune[:2], str(folder / "t"), *prune[3:], "--ignore", "re:.*"]) == 1
    assert "no layer of the plan is left" in capsys.readouterr().err
    assert not (folder / "t").exists()


def test_bad_input(source: Path) -> None:
    folder = source.parent

    def refuse(says: str, **changes: Any) -> None:
        with pytest.raises((InputError, CheckpointError), match=says):
            plan_checkpoint(source, folder / "plan.json", options(source, **changes))
        assert not (folder / "plan.json").exists()

    refuse("unknown pruning method", method="best")
    refuse("not a pattern", patterns=("6_8",))
    refuse("no choice of patterns reaches the target", target=Target(speedup=3.0))
    with pytest.raises(InputError, match="folder of the plan does not exist"):
        plan_checkpoint(source, folder / "no/plan.json", options(source))
    (folder / "other.json").write_text("{}")
    odd = {"version": 1, "method": "wanda", "layers": {"a": "6:8"}, "ignore": [1]}
    (folder / "odd.json").write_text(json.dumps(odd))
    (folder / "round.json").write_text(json.dumps({**odd, "ignore": [], "recipe": "ternary"}))
    for path, told in (
        ("other.json", "is no plan; needed"),
        ("round.json", "is no plan; needed"),
        ("odd.json", "is no plan; needed"),
        ("missing.json", "is missing; make a plan with"),
    ):
        with pytest.raises(InputError, match=rf"^{folder / path} {told}"):
            read_plan(folder / path)
    for gain in ("fast", "0", "3", "1/0", "nan", "1e-400", "1e-999999999", "-1e999999999", "0.05"):
        with pytest.raises(InputError, match="--mma-gain"):
            parse_gain(gain)


def test_gains_are_read_exactly() -> None:
    assert [parse_gain(text) for text in ("2", "1.6", "0.1")] == [Fraction(2), Fraction(8, 5), Fraction(1, 10)]


def test_a_target_out_of_reach_is_refused_before_anything_is_measured(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "load_any", None)  # the model is not even loaded
    for target in (Target(speedup=3.0), Target(speedup=1e9), Target(sparsity=0.9), Target(gigabytes=1e-9)):
        with pytest.raises(InputError, match=r"no choice of patterns reaches the target; got at best 2.000x"):
            plan_checkpoint(source, source.parent / "plan.json", options(source, target=target))
    assert not (source.parent / "plan.sensitivities.jsonl").exists()


def test_a_plan_refuses_what_prune_would_refuse(source: Path) -> None:
    with pytest.raises(InputError, match=r"different patterns; got .*q_proj: dense, .*k_proj: 6:8"):
        plan_checkpoint(source, source.parent / "plan.json", options(source, ignore=("re:.*q_proj",)))


def test_a_pruned_source_is_refused(source: Path) -> None:
    with edited_config(source) as config:
        config["slidesparse_config"] = Marker(Pattern.parse("6:8")).to_config()
    with pytest.raises(CheckpointError, match="pruned or quantised already"):
        plan_checkpoint(source, source.parent / "plan.json", options(source))


def test_experts_cost_a_token_what_reaches_it_and_a_file_all_of_them() -> None:
    """Of a linear and eight experts as large, a token multiplies by the linear and by two of the experts."""
    choices = (PatternChoice(DENSE, 0.0), PatternChoice(Pattern.parse("2:4"), 1.0))
    linear = PlanSet(("l",), ((64, 64),), choices[:1])
    experts = PlanSet(("e",), ((8 * 64, 64),), choices, Fraction(2, 8))
    plan = choose_patterns([linear, experts], Target(sparsity=8 / 9 / 2))
    assert plan.has_experts
    assert plan.sparsity == pytest.approx(8 / 9 / 2)
    assert plan.speedup == pytest.approx(3 / (1 + 2 / 2))
    assert choose_patterns([linear, experts], Target(speedup=1.49)).patterns["e"] == Pattern.parse("2:4")
    with pytest.raises(InputError, match=r"at best 1.500x, 44.4% zeros"):
        choose_patterns([linear, experts], Target(speedup=1.51))
