"""Calibrated pruning with its layers on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_source

from slidesparse.commands.evaluate import evaluate
from slidesparse.commands.plan import PlanOptions, plan_checkpoint
from slidesparse.commands.prune import PruneOptions, prune_checkpoint
from slidesparse.files.calibration import Calibration
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.models.choose_patterns import Target
from slidesparse.support import check_pattern

pytestmark = pytest.mark.gpu


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path, "qwen3", torch.bfloat16)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("pattern", ["4:6", "6:8", "4:6@50%"])
def test_as_good_as_on_the_cpu_and_the_same_twice(source: Path, method: str, pattern: str) -> None:
    folder = source.parent
    options = PruneOptions(pattern, "int8", method, Calibration(str(folder / "text.txt"), 12, 32))
    losses = {}
    for name, device in (("cpu", "cpu"), ("gpu", "cuda"), ("again", "cuda")):
        losses[name] = prune_checkpoint(source, folder / name, options, device=device).losses
    gpu, again = Checkpoint(folder / "gpu"), Checkpoint(folder / "again")
    for linears, loss in losses["cpu"].items():
        # BF16 activations there, float32 here: statistics differ by their rounding, 2^-8 for each.
        assert losses["gpu"][linears] == pytest.approx(loss, rel=0.05)
        for linear in linears.split():
            weight = gpu.tensor(f"{linear}.weight")
            check_pattern(weight, pattern, name=linear)
            assert torch.equal(weight, again.tensor(f"{linear}.weight"))


def test_plan_and_eval(source: Path) -> None:
    text = source.parent / "text.txt"
    options = PlanOptions(Target(speedup=1.2), Calibration(str(text), 8, 32), patterns=("8:10", "6:8", "2:4"))
    plan = plan_checkpoint(source, source.parent / "plan.json", options, device="cuda")
    assert plan.speedup >= 1.2
    measured = [evaluate(source, text=text, window=64, device=device).perplexity for device in ("cpu", "cuda")]
    assert measured[0] is not None
    assert measured[1] is not None
    assert measured[1].perplexity == pytest.approx(measured[0].perplexity, rel=0.02)  # BF16 sums of other order
