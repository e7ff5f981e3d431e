"""Estimate the time of a calibrated pruning, from its arithmetic and the rate of one matrix product on the device.

Counted per weight [out, in] on ``n`` tokens: two passes, the gram matrix of its input, the factor of that in float64,
SparseGPT's sweep and its 25 conjugate-gradient steps, and three passes for each step of matching. A column of the sweep
or of rounding takes some launches more. The rest is left out: the result is no better than a factor of two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch

from slidesparse.models.gram_tree import windows_of_a_batch
from slidesparse.offline.calibrate.layer_store import LayersToPrune
from slidesparse.offline.plan import Plan
from slidesparse.pruning import SparseGPT
from slidesparse.pruning.sparsegpt import sweep
from slidesparse.weights.pattern import DENSE, Pattern

SIDE, SMALL = 1024, 128
"""Rows and columns of the matrices whose product is timed, and of the weight whose columns are."""

OVERHEAD = {"cpu": 2.0, "cuda": 0.3}
"""Measured over counted time without columns: of SmolLM2-135M on two CPU cores; a 0.5B and layers of 7B on an H200."""


def estimate_seconds(plan: Plan, device: torch.device) -> float | None:
    """Return the estimated seconds for the layers of a plan on a device; None without calibration."""
    if plan.layers is None:
        return None
    operations, single = _counted(plan, plan.layers)
    return OVERHEAD[device.type] * operations / operations_a_second(device) + single * column_seconds(device)


def _counted(plan: Plan, layers: LayersToPrune) -> tuple[float, int]:
    """Return operations, and the columns that are swept or rounded one by one, of all linears of a set together."""
    solves, columns_of = isinstance(layers.pruner, SparseGPT), dict[str, int]()
    steps = 0 if layers.matching is None else layers.matching.steps
    step_tokens = windows_of_a_batch(layers.windows) * layers.windows.shape[1]
    total = 0.0
    for job in (job for jobs in plan.shards.values() for job in jobs.values() if job.layer is not None):
        for names in job.becomes:
            rows, columns = sum(job.outputs[name].shape[-2] for name in names), job.outputs[names[0]].shape[-1]
            tokens = layers.windows.numel() // (1 if job.expert is None else len(job.becomes))
            total += 4 * tokens * rows * columns + 6 * steps * step_tokens * rows * columns
            if job.layer in layers.changed:
                total += 2 * tokens * columns**2
                total += (4 * columns**3 + (5 if job.pattern == DENSE else 55) * rows * columns**2) * solves
                columns_of[job.layer] = columns
    passes = {one: (solves and layers.patterns[one] != DENSE) + (layers.rounder is not None) for one, *_ in layers.sets}
    return total, sum(columns_of[layers.experts.layer_of.get(one, one)] * times for one, times in passes.items())


@lru_cache(maxsize=8)
def operations_a_second(device: torch.device, dtype: torch.dtype = torch.float32, side: int = SIDE) -> float:
    """Return the rate of a product of two square matrices on a device, measured once."""
    a = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / _seconds(lambda: a @ a)


@lru_cache(maxsize=8)
def column_seconds(device: torch.device) -> float:
    """Return the seconds of a column of the sweep, measured once on a small weight; rounding takes about as long."""
    weight, factor = torch.randn(SMALL, SMALL, device=device), torch.eye(SMALL, device=device)
    return _seconds(lambda: sweep(weight, factor, Pattern.parse("4:6"))) / SMALL


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(4):  # the first starts threads or loads a library
        begin = time.perf_counter()
        float(work()[0, 0])  # waits for the device
        times.append(time.perf_counter() - begin)
    return min(times)


def describe_seconds(seconds: float) -> str:
    """Return a rough time in words.

    >>> describe_seconds(8), describe_seconds(130), describe_seconds(9000)
    ('less than a minute', 'about 3 minutes', 'about 3 hours')
    """
    minutes = -(-seconds // 60)
    if minutes <= 1:
        return "less than a minute"
    return f"about {minutes:.0f} minutes" if minutes < 100 else f"about {-(-minutes // 60):.0f} hours"
