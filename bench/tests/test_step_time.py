"""The time of a served step: what it is made of, and how near the records it comes."""

from __future__ import annotations

import runpy
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm import select
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.select import installation
from slidesparse.gemm.speed import Installation, LayerSpeed, SpeedTable
from slidesparse.gemm.speed_files import PACKAGED, add_layers, file_name, load_speeds
from slidesparse.offline.known_models import MODELS
from slidesparse.offline.plan.choose_patterns import PatternChoice, PlanSet, Target, choose_patterns
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse_bench import step_time
from slidesparse_bench.served_records import AGAIN, BURST_LOAD, CONTROL, MIXED_LOAD, STOCK, ServeRecord, read
from slidesparse_bench.step_time import (
    GPUS,
    SERVED_STEPS,
    LayerTimes,
    Loads,
    Rest,
    ServedTime,
    Steps,
    parse_load,
    served_times,
)

ROOT = Path(__file__).parents[2]
PATTERNS = [Pattern.parse(text) for text in ("6:8", "4:6", "2:4")]
LAYERS = 28


def qwen(damages: tuple[float, ...] = (0.01, 0.03, 0.2)) -> list[PlanSet]:
    choices = (PatternChoice(DENSE, 0.0), *map(PatternChoice, PATTERNS, damages))
    shapes = MODELS["Qwen2.5-7B"]
    return [PlanSet((f"{i}.{shape}",), (shape,), choices) for i in range(LAYERS) for shape in shapes]


def forget_six_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no table that ships have times of six bits, as that of an H100 has none."""
    known = step_time.tables_for

    def tables(here: Installation) -> list[SpeedTable]:
        return [
            replace(table, layers=tuple(map(eight_bits, table.layers))) if table.packaged else table
            for table in known(here)
        ]

    def eight_bits(layer: LayerSpeed) -> LayerSpeed:
        return replace(layer, us={name: us for name, us in layer.us.items() if not name.startswith("hopper-6bit")})

    for module in (step_time, select):
        monkeypatch.setattr(module, "tables_for", tables)


def times(dtype: str, load: str) -> ServedTime:
    (found,) = served_times([load], LAYERS, LayerTimes(dtype, torch.device("cpu")), PATTERNS)
    return found


@pytest.mark.parametrize("engine", [CONTROL, "6:8", "2:4"])
@pytest.mark.parametrize("workload", [MIXED_LOAD, BURST_LOAD, "decode 64 at 80"])
@pytest.mark.parametrize(("gpu", "dtype"), [("h200", "int8"), ("h200", "fp8"), ("h100", "int8")])
def test_what_was_served_is_foretold(gpu: str, dtype: str, workload: str, engine: str) -> None:
    """Stock vLLM over the plugin with all layers alike, the control's dense ones too."""
    found = read(ServeRecord, [ROOT / f"results/{gpu}/serve/qwen2.5-7b-{dtype}.jsonl"])
    asked = [r for r in found if r.workload and r.workload.name == workload]
    served = {r.key.engine: r for r in asked if r.key.engine in (STOCK, AGAIN, engine)}
    seconds = {name: statistics.median(record.seconds) for name, record in served.items()}
    foretold = {name: foretold_s(dtype, record) for name, record in served.items()}
    assert over(foretold, engine) == pytest.approx(over(seconds, engine), rel=0.01)
    assert foretold[engine] == pytest.approx(seconds[engine], rel=0.01)


def over(seconds: dict[str, float], engine: str) -> float:
    return statistics.fmean(seconds[name] for name in (STOCK, AGAIN) if name in seconds) / seconds[engine]


def foretold_s(dtype: str, record: ServeRecord) -> float:
    """Seconds of the record's load by its own engine: of a burst the sum of its steps."""
    name, engine = record.workload.name, record.key.engine
    steps = [f"prefill:{tokens}" for tokens in record.step_tokens or ()]
    loads = {MIXED_LOAD: ["mixed"], BURST_LOAD: steps}.get(name, [f"decode:{record.workload.requests}"])
    pattern = DENSE if engine in (STOCK, AGAIN, CONTROL) else Pattern.parse(engine)
    us, layer_times = 0.0, LayerTimes(dtype, torch.device("cpu"), record.machine.gpu or "")
    for time in served_times(loads, LAYERS, layer_times, PATTERNS):
        us += time.rest_before if engine in (STOCK, AGAIN) else time.rest
        us += sum(time.of(one, pattern) for one in qwen())
    return us / 1e6


def test_the_constants_are_what_the_records_say() -> None:
    assert runpy.run_path(str(ROOT / "benchmarks/served_steps.py"))["text"]() == SERVED_STEPS.read_text()


def test_a_plan_reaches_every_load() -> None:
    loads = [times("int8", load) for load in ("mixed", "prefill:8192", "decode:64")]
    plan = choose_patterns(qwen(), Target(speedup=1.18), loads)
    assert set(plan.speedups) == {"mixed", "prefill:8192", "decode:64"}
    assert min(plan.speedups.values()) == plan.speedup >= 1.18
    alone = [choose_patterns(qwen(), Target(speedup=1.18), [load]).damage for load in loads]
    assert plan.damage >= max(alone) - 1e-9
    with pytest.raises(InputError, match=r"at best 1\.\d+x for mixed, 50.0% zeros"):
        choose_patterns(qwen(), Target(speedup=1.5), loads)


def test_time_is_the_steps_times_and_what_stands_beside_them() -> None:
    layer_times = LayerTimes("int8", torch.device("cpu"))
    steps = (Steps(3, 64, Rest(5.0, 2.0)), Steps(1, 1024, Rest(7.0, 4.0)))
    factors, (one, *_) = {"dense": 0.5, "4:6": 7.0, "2:4": 2.0}, qwen()
    time = ServedTime("mine", steps, factors, 10, layer_times, tuple(PATTERNS))
    found = layer_times.find(PATTERNS[2], *one.shapes[0])
    hopper = [found.layer.at("hopper", m) for m in (64, 1024)]
    assert time.of(one, PATTERNS[2]) == pytest.approx(2 * (3 * hopper[0] + hopper[1]))  # type: ignore[operator]
    assert (time.rest, time.rest_before) == (10 * (3 * 2 + 4), 10 * (3 * 5 + 7))
    q, k = PlanSet(("q",), ((2304, 3584),), ()), PlanSet(("q", "k"), ((2304, 3584), (2304, 3584)), ())
    assert time.of(k, DENSE) == time.of(PlanSet(("qk",), ((4608, 3584),), ()), DENSE) != 2 * time.of(q, DENSE)


UNKNOWN = ["", "prefill:", "prefill:0", "decode:-1", "decode:1e3", "decode:1000001", "Mixed", "mixed:1", "burst:5"]


def test_unknown_loads() -> None:
    for text in (*UNKNOWN, f"decode:{10**40}"):
        with pytest.raises(InputError, match="load of a plan"):
            parse_load(text, Loads(Rest(1, 1), Rest(1, 1), (), {}))


def test_what_was_not_measured_is_not_invented() -> None:
    odd = PlanSet(("model.layers.0.odd",), ((64, 64),), ())
    with pytest.raises(UnsupportedError, match=r"no layer like model.layers.0.odd was measured; got 6:8, int8, 64x64"):
        times("int8", "mixed").of(odd, PATTERNS[0])
    with pytest.raises(UnsupportedError, match="loads of a plan; got bf16"):
        served_times(["mixed"], 1, LayerTimes("bf16", torch.device("cpu")), PATTERNS)


def test_times_of_eight_bits_are_a_prior_for_six_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no table has times of six bits; one that has some is a table of them, and of nothing else."""
    forget_six_bits(monkeypatch)
    eight, six = (LayerTimes("int8", torch.device("cpu"), bits=bits) for bits in (8, 6))
    size, told = (4608, 3584), "times of an NVIDIA H200, which ship with the package"
    usual, prior = (one.find(PATTERNS[0], *size) for one in (eight, six))
    assert usual is not None is not prior
    assert prior.layer.us == {"dense": usual.layer.us["dense"], "hopper-6bit": usual.layer.us["hopper"]}
    (one,) = (one for one in qwen()[:4] if one.shapes == (size,))
    assert six.us(one, PATTERNS[0], PATTERNS, 64) == eight.us(one, PATTERNS[0], PATTERNS, 64)
    assert six.basis(PATTERNS[:1], [one]) == [f"linears (1 of 1): {told}, of hopper in place of hopper-6bit"]

    there = load_speeds(PACKAGED / file_name(GPUS["H200"]))
    (shipped,) = (one for one in step_time.tables_for(there.installation) if one.installation == there.installation)
    dense, hopper = (usual.layer.us[name] for name in ("dense", "hopper"))
    us = {"dense": dense, "hopper-6bit 6:8": tuple(0.5 * time for time in hopper if time)}
    libraries = {**shipped.installation.libraries, "hopper-6bit": shipped.installation.libraries["hopper"]}
    measured = replace(shipped, installation=replace(shipped.installation, libraries=libraries))
    measured = replace(measured, layers=(*shipped.layers, replace(usual.layer, us=us)))
    monkeypatch.setattr(step_time, "tables_for", lambda _: [measured])
    eight, six = (LayerTimes("int8", torch.device("cpu"), bits=bits) for bits in (8, 6))
    assert eight.find(PATTERNS[0], *size) == usual
    assert six.us(one, PATTERNS[0], PATTERNS, 64) == pytest.approx(eight.us(one, PATTERNS[0], PATTERNS, 64) / 2)
    assert six.basis(PATTERNS[:2], [one]) == [
        f"linears (1 of 2): {told}",
        f"linears (1 of 2): {told}, of hopper in place of hopper-6bit",
    ]


def test_on_a_gpu_six_bits_go_by_what_its_server_goes_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPUS["H100"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(Hopper, "why_not", lambda *_: None)
    forget_six_bits(monkeypatch)
    six, size = LayerTimes("int8", torch.device("cuda"), bits=6), (4608, 3584)
    (one,) = (one for one in qwen()[:4] if one.shapes == (size,))
    (told,) = six.basis(PATTERNS[:1], [one])
    assert told.startswith("linears (1 of 1): prior: measured at 4608x3584 with ")
    assert told.endswith("hopper-6bit")
    here = installation(torch.device("cuda"))
    us = {"dense": (9.0, 9.0), "hopper 6:8": (5.0, 5.0), "hopper-6bit 6:8": (3.0, 3.0)}  # as tune measures
    add_layers(here, [LayerSpeed("int8", *size, (16, 1024), us)])
    for bits, name in ((8, "hopper"), (6, "hopper-6bit")):
        found = LayerTimes("int8", torch.device("cuda"), bits=bits).find(PATTERNS[0], *size)
        assert set(found.layer.us) == {"dense", name}
        assert found.here == (16, 1024)


def test_on_a_machine_without_a_gpu_only_what_ships_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder that a machine with that GPU shares has times that were measured there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped = load_speeds(PACKAGED / file_name(GPUS["H200"]))
    (layer,) = (one for one in shipped.layers if (one.dtype, one.out, one.columns) == ("int8", 4608, 3584))
    usual = LayerTimes("int8", torch.device("cpu")).find(PATTERNS[0], 4608, 3584)
    add_layers(shipped.installation, [replace(layer, us=dict.fromkeys(layer.us, (1.0,) * 10))])
    assert LayerTimes("int8", torch.device("cpu")).find(PATTERNS[0], 4608, 3584) == usual
