"""Pruning on the GPU: by magnitude with the CPU's bits, and calibrated with its layers there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint, make_source, write_text

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.evaluate import evaluate
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse.offline.prune_options import PruneRounding
from slidesparse.pruning import prune_mask
from slidesparse.weights.support import check_pattern

pytestmark = pytest.mark.gpu


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path, "qwen3", torch.bfloat16)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("pattern", ["6:8", "4:6", "8:10", "dense"])
@pytest.mark.parametrize(
    ("name", "dtype", "stored", "rounding"),
    [
        ("qwen3", torch.bfloat16, "int8", "absmax"),
        ("qwen3", torch.float16, "fp8", "absmax"),
        ("qwen3", torch.float32, "int8", "absmax"),
        ("qwen3", torch.bfloat16, "bf16", "absmax"),
        ("bitnet", torch.bfloat16, "int8", "ternary"),
    ],
)
def test_magnitude_has_the_bits_of_the_cpu(
    tmp_path: Path, name: str, dtype: torch.dtype, stored: str, rounding: PruneRounding, pattern: str
) -> None:
    make_checkpoint(tmp_path / "m", name, dtype)
    for device in ("cpu", "cuda"):
        prune_checkpoint(
            tmp_path / "m", tmp_path / device, by_magnitude(pattern, stored, rounding=rounding), device=device
        )
    assert contents(tmp_path / "cuda") == contents(tmp_path / "cpu")


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_weights_that_are_quantised_already_have_the_bits_of_the_cpu(tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path / "m")
    prune_checkpoint(tmp_path / "m", tmp_path / "w8", by_magnitude("dense", dtype))
    config = json.loads((tmp_path / "w8/config.json").read_text())
    del config["slidesparse_config"]
    (tmp_path / "w8/config.json").write_text(json.dumps(config))
    for device in ("cpu", "cuda"):
        prune_checkpoint(tmp_path / "w8", tmp_path / device, by_magnitude("4:6"), device=device)
    assert contents(tmp_path / "cuda") == contents(tmp_path / "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_costs_that_nearly_tie_are_chosen_alike(dtype: torch.dtype) -> None:
    """Large weights whose rows have few different values: groups differ in the last bits of a long sum, or not."""
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randint(1, 4, (8192, 512), generator=generator) * 1e-3).to(dtype)
    for pattern in ("6:8", "4:6", "2:4"):
        assert torch.equal(prune_mask(weight.cuda(), pattern).cpu(), prune_mask(weight, pattern))


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("pattern", ["4:6", "6:8"])
def test_as_good_as_on_the_cpu_and_the_same_twice(source: Path, method: str, pattern: str) -> None:
    folder = source.parent
    options = PruneOptions(pattern, "int8", method, Calibration(str(folder / "text.txt"), 12, 32), smooth=False)
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


def test_eval(source: Path) -> None:
    text = source.parent / "text.txt"
    measured = [evaluate(source, text=text, window=64, device=device).perplexity for device in ("cpu", "cuda")]
    assert measured[0] is not None
    assert measured[1] is not None
    assert measured[1].perplexity == pytest.approx(measured[0].perplexity, rel=0.02)  # BF16 sums of other order


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_two_gpus_give_the_bits_of_one(tmp_path: Path, method: str) -> None:
    make_checkpoint(tmp_path / "m", "qwen3", torch.bfloat16, shard_size="60KB")
    add_tokenizer(tmp_path / "m")
    text = write_text(tmp_path / "text.txt", 2000)
    calibration = None if method == "magnitude" else Calibration(str(text), 256, 32)  # eight batches
    prune_checkpoint(tmp_path / "m", tmp_path / "one", PruneOptions("6:8", "int8", method, calibration), device="cuda")
    words = ["prune", str(tmp_path / "m"), str(tmp_path / "two"), "--pattern", "6:8", "--dtype", "int8"]
    words += ["--method", method, "--device", "cuda"]
    if calibration is not None:
        words += ["--calibration", str(text), "--samples", "256", "--length", "32"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "slidesparse"]
    done = subprocess.run([sys.executable, *torchrun, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "two")
    assert set(one.files) == set(two.files)
    for name in one.files:
        assert torch.equal(one.tensor(name), two.tensor(name)), name
