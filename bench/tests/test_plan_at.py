"""``slidesparse plan --at``: a speed-up over stock vLLM as it is served, by measured times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from checkpoints import make_source, write_text
from small_models import make

from slidesparse.cli import main
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.gemm.speed import LayerSpeed, MeasuredLayer
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.plan.choose_patterns import Target
from slidesparse.offline.plan.plan import plan_checkpoint
from slidesparse.offline.plan.plan_file import describe
from slidesparse.offline.plan.plan_options import PlanOptions
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse_bench.step_time import GPUS, LayerTimes, served_steps


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path, "llama", torch.float32)


def options(source: Path, **changes: Any) -> PlanOptions:
    given: dict[str, Any] = {
        "target": Target(speedup=1.2),
        "calibration": Calibration(str(source.parent / "text.txt"), 8, 32),
        "method": "wanda",
        "patterns": ("8:10", "6:8", "4:6@50%", "2:4"),
    }
    return PlanOptions(**(given | changes))


def test_a_plan_by_measured_times(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2:4 takes half of dense's time, 8:10 all of it, and nothing else was measured."""

    def measured(_: LayerTimes, pattern: Pattern, out: int, columns: int) -> MeasuredLayer | None:
        share = {"2:4": 0.5, "8:10": 1.0}.get(str(pattern))
        us = {} if share is None else {"dense": (1e3, 1e5), "hopper": (1e3 * share, 1e5 * share)}
        return MeasuredLayer(LayerSpeed("fp8", out, columns, (1, 100), us), gpu=GPUS["H100"]) if us else None

    monkeypatch.setattr(LayerTimes, "_look_up", measured)
    loads, out = ("prefill:100", "decode:1"), source.parent / "plan.json"
    wanted = options(source, target=Target(speedup=1.3), at=loads, dtype="fp8", gpu="H100")
    plan = plan_checkpoint(source, out, wanted)
    assert set(map(str, plan.patterns.values())) == {"dense", "2:4"}
    assert set(plan.speedups) == set(loads)
    assert plan.speedup >= 1.3
    stored, words = json.loads(out.read_text()), describe(plan, wanted, out, Checkpoint(source))
    assert stored["modelled"]["speedups"] == plan.speedups
    assert f"nats a token, measured with all of it pruned {stored['modelled']['damage_together']:.4f}\n" in words
    assert (stored["at"], stored["dtype"], stored["gpu"], "mma_gain" in stored) == (list(loads), "fp8", "H100", False)
    assert f"predicted over stock vLLM: {plan.speedups['prefill:100']:.3f}x at prefill:100" in words
    assert "linears (16 of 16): times of an NVIDIA H100 80GB HBM3" in words
    assert "\nleft out, since not measured: 6:8, 4:6@50%\n" in words
    assert "--dtype fp8" in words


def test_a_plan_counts_the_time_of_what_it_leaves_alone(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of 8 bits takes 1000 us, and one of 16 bits 3000: attention alone cannot make it twice as fast."""

    def measured(times: LayerTimes, pattern: Pattern, out: int, columns: int) -> MeasuredLayer | None:
        dense = 3e3 if times.dtype == "bf16" else 1e3
        return MeasuredLayer(
            LayerSpeed(times.dtype, out, columns, (1, 100), {"dense": (dense,) * 2, "hopper": (1,) * 2})
        )

    monkeypatch.setattr(LayerTimes, "_look_up", measured)
    wanted = options(source, target=Target(speedup=1.1), at=("decode:8",), ignore=("re:.*mlp",), patterns=("2:4",))
    plan = plan_checkpoint(source, source.parent / "plan.json", wanted)
    steps = served_steps("int8").dtypes["int8"]
    factors, rest = steps.factors["decode"], steps.decode
    left = 2 * (3e3 + 3e3)  # gate and up as one, and down
    pruned = [plan.patterns[f"model.layers.{i}.self_attn.{leaf}"] for i in range(2) for leaf in ("q_proj", "o_proj")]
    linears = sum(1e3 * factors["dense"] if one == DENSE else factors["2:4"] for one in pruned)
    before, after = left + 4e3 * factors["dense"] + 2 * rest.stock, left + linears + 2 * rest.plugin
    assert DENSE in pruned
    assert plan.speedup == pytest.approx(before / after)
    assert "6 linears left alone: in 16 bits, in stock vLLM too" in describe(plan, wanted, source, Checkpoint(source))
    with pytest.raises(InputError, match=r"no choice of patterns reaches the target; got at best 1.3"):
        plan_checkpoint(source, source.parent / "fast.json", replace(wanted, target=Target(speedup=2)))


def test_no_load_is_a_mistake(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a shell variable that is not set: a plan by modelled times is another plan."""
    command = ["plan", str(source), "--out", str(source.parent / "plan.json"), "--method", "magnitude"]
    command += ["--calibration", str(source.parent / "text.txt"), "--length", "16", "--speedup", "1.1", "--at", ""]
    assert main(command) == 1
    assert "load of a plan; got ''; needed mixed, prefill:TOKENS" in capsys.readouterr().err
    assert not (source.parent / "plan.json").exists()


def test_loads_without_times(source: Path) -> None:
    """The layers of the model are smaller than any that was measured."""
    out = source.parent / "plan.json"
    told = "no layer like model.layers.0.self_attn.q_proj was measured; got 8:10, 6:8, .*, int8, 128x64; measure it"
    told += " with slidesparse tune --dtype int8 on a machine with an NVIDIA H100 80GB HBM3, and plan there; or leave"
    with pytest.raises(UnsupportedError, match=told):
        plan_checkpoint(source, out, options(source, at=("mixed",), gpu="H100"))
    with pytest.raises(UnsupportedError, match=r"self_attn.q_proj was measured; got dense, int8, 128x64; measure"):
        plan_checkpoint(source, out, options(source, at=("mixed",), patterns=("dense",)))
    with pytest.raises(InputError, match="load of a plan; got 'mix'"):
        plan_checkpoint(source, out, options(source, at=("mix",)))
    with pytest.raises(InputError, match="--gpu; got A100; needed H100 or H200"):
        options(source, at=("mixed",), gpu="A100")
    assert not list(source.parent.glob("plan*"))


@pytest.mark.parametrize("more", [[], ["--ignore", "re:.*experts"]])
def test_plan_does_not_foretell_how_a_mixture_is_served(
    tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts that stay dense take time, too."""
    make(tmp_path / "m", ARCHITECTURES["mixtral"])
    words = ["plan", tmp_path / "m", "--out", tmp_path / "plan.json", "--speedup", "1.1", "--at", "mixed"]
    assert main([*map(str, words), "--calibration", str(write_text(tmp_path / "text.txt")), *more]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "slidesparse: the speed of a served mixture of experts cannot be predicted; got --at and"
        " model.layers.0.mlp.experts; needed records of a whole mixture that was served dense and at each pattern;"
        " leave out --at, and matrix products alone are modelled"
    )
