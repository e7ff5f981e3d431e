"""Layers are measured on the spot, on a GPU: what is kept, what it costs, and that it happens once."""

from __future__ import annotations

import logging
import statistics
from pathlib import Path

import pytest
import torch
from checkpoints import by_magnitude, make_checkpoint
from expert_weights import packed_experts
from gpu_products import needs_hopper

import slidesparse
from slidesparse.gemm import Problem, choose
from slidesparse.gemm.expert_times import ExpertKind, find_expert_times
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.select import backends_to_compare, installation
from slidesparse.gemm.speed import MEASURED_HERE
from slidesparse.gemm.speed_files import load_speeds, tuned_path
from slidesparse.layer.experts import SlideExperts
from slidesparse.layer.linear import SlideLinear
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.pruning import prune_mask
from slidesparse.tuning import at_load
from slidesparse.tuning.at_load import BUDGET_S, LoadTuner
from slidesparse.tuning.measure import TRANSIENT_BYTES, gaussian
from slidesparse.weights.packing import pack
from slidesparse.weights.pattern import Pattern

pytestmark = pytest.mark.gpu

OUT, K = 4608, 3584
LOG = logging.getLogger("slidesparse.test")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_layer_is_measured_once_within_its_memory_and_time(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # Not the seed of the activations: rows that equal tokens sum squares, which an FP8 accumulator cuts off.
    weight = gaussian(OUT, K, dtype=torch.float32, device=torch.device("cuda"), seed=1) * 30
    weight = (weight * prune_mask(weight, "6:8")).to(dtype)
    scale = torch.full((OUT,), 1e-3, device="cuda") if dtype != torch.bfloat16 else None
    packed = pack(weight, "6:8", scale=scale)
    problem = Problem.of(packed)
    if not (backends := backends_to_compare(problem)):
        pytest.skip("no accelerated backend runs here")
    before, _ = torch.cuda.memory_allocated(), torch.cuda.reset_peak_memory_stats()
    tuner = LoadTuner(16384, torch.bfloat16, LOG)
    assert tuner.wants(problem)
    tuner.measure(problem, packed)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * TRANSIENT_BYTES  # workspaces of libraries
    assert torch.cuda.memory_allocated() - before < 96 << 20  # two workspaces of cuBLAS
    assert tuner.spent_s < BUDGET_S + 0.5  # what has begun when the budget ends goes on to its end
    table = load_speeds(tuned_path(installation()))
    assert table.installation.driver
    (layer,) = table.layers
    assert layer.tokens == tuple(tuner.sizes)
    assert set(layer.us) == {"dense", *(f"{name} 6:8" for name in backends[1:])}
    assert None not in layer.us["dense"]
    growth = [later / former for former, later in zip(layer.us["dense"], layer.us["dense"][1:], strict=False)]
    assert growth[-1] > 2.5, "four times the tokens take about four times as long"  # not the host's time
    assert MEASURED_HERE in choose(problem).reason
    assert not LoadTuner(16384, torch.bfloat16, LOG).wants(problem)
    assert [line for line in caplog.messages if "measured int8" in line or "measured f" in line or "measured b" in line]


@needs_hopper
def test_experts_are_measured_once_within_their_memory_and_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hidden, inner, count, device = 2048, 768, 32, torch.device("cuda", torch.cuda.current_device())
    gate_up, down = (
        packed_experts(count, out, columns, torch.int8, "6:8", "cuda")
        for out, columns in ((2 * inner, hidden), (hidden, inner))
    )
    layer = SlideExperts(gate_up, down, HopperExperts())
    kind = ExpertKind(torch.int8, Pattern(6, 8), Pattern(6, 8), hidden, inner, count, count, 8, device)
    before, _ = torch.cuda.memory_allocated(), torch.cuda.reset_peak_memory_stats()
    tuner = LoadTuner(16384, torch.bfloat16, LOG)
    assert tuner.wants_experts(kind)
    tuner.measure_experts(kind, {"dense": layer, "hopper": layer})  # the same experts, so the same times
    assert torch.cuda.max_memory_allocated() - before < 1.1 * TRANSIENT_BYTES
    assert torch.cuda.memory_allocated() - before < 96 << 20
    assert tuner.spent_s < BUDGET_S + 0.5  # what has begun when the budget ends goes on to its end
    found = find_expert_times(kind)
    assert found.tokens == tuple(tuner.expert_sizes)
    dense, packed = found.us["dense"], found.us["hopper"]
    ratios = [a / b for a, b in zip(dense, packed, strict=True) if a and b]
    assert len(ratios) == len(dense)
    assert 0.8 < statistics.median(ratios) < 1.25  # one alone may meet what other programs compute
    (less, more) = (us or 0.0 for us in packed[-2:])
    assert more > 2.5 * less > 0  # four times the tokens
    assert not LoadTuner(16384, torch.bfloat16, LOG).wants_experts(kind)
    assert "measured int8 32 experts 1536x2048 6:8 in" in caplog.text


def test_a_second_load_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert LoadTuner.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(LoadTuner.__init__.__kwdefaults__, "budget_s", 100.0)  # other tests share this GPU
    monkeypatch.setattr(at_load, "NOISE", 10.0)  # and disturb its times
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    make_checkpoint(tmp_path / "m", **sizes)
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    tokens = torch.randint(3, 90, (2, 11), device="cuda")
    first = slidesparse.load(tmp_path / "s", device="cuda")
    layers = [module for module in first.modules() if isinstance(module, SlideLinear)]
    kinds = {(layer.out_features, layer.in_features) for layer in layers}
    if not any("measuring" in line for line in caplog.messages):
        pytest.skip("no accelerated backend runs here")
    assert sum("slidesparse: measured int8" in line for line in caplog.messages) == len(kinds)
    assert all(MEASURED_HERE in layer.choice.reason for layer in layers)
    caplog.clear()
    second = slidesparse.load(tmp_path / "s", device="cuda")
    assert not [line for line in caplog.messages if "measur" in line and "slidesparse:" in line]
    assert torch.equal(first(tokens).logits, second(tokens).logits)
