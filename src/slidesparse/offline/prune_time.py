"""Estimate how long pruning takes, from some of the same work, which is timed here.

Nothing is known of the disk, so reading and writing are left out, and named as left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slidesparse.files.data_digest import data_digest
from slidesparse.models.experts import experts_of_a_token
from slidesparse.models.parts import text_config
from slidesparse.offline.calibrate.layer_store import windows_of_a_batch
from slidesparse.offline.prune_job import PruneJob
from slidesparse.prune import Linears
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import QUANTISED, quantize_weight

SAMPLE = 1 << 20
"""Weights that are pruned and quantised for the measurement, and bytes whose digest is taken."""

SIDE = 768
"""Most rows and columns of the matrices with which calibration is measured."""

TOKENS = 512
"""Tokens that go through them."""


@dataclass(frozen=True)
class PruneTime:
    """An estimate.

    Attributes:
        seconds: Computing alone.
        basis: What it follows from.
    """

    seconds: float
    basis: str


def estimate_time(job: PruneJob) -> PruneTime:
    """Return how long pruning takes on the job's device, by some tenths of a second of measurement."""
    name = max(job.targets.linears, key=lambda linear: job.targets.linears[linear].weight.numel())
    weight = job.float_weight(name)
    sample = weight[: max(SAMPLE // weight.shape[1], 1)]
    experts = [tensor for tensor in job.experts.tensors if job.experts.treats(tensor)]
    treated = [job.checkpoint.stored(tensor) for tensor in (*job.layer_of, *experts)]
    copied = job.checkpoint.n_bytes - sum(stored.n_bytes for stored in treated)

    def treat() -> None:
        pruned = sample
        if job.windows is None and job.patterns[name] != DENSE:
            pruned = job.pruner.prune(Linears({name: sample}, job.patterns[name]))[name]
        values = quantize_weight(pruned, job.dtype).values if job.dtype in QUANTISED else pruned
        data_digest(values.cpu())

    seconds = sum(math.prod(stored.shape) for stored in treated) * _seconds(treat, job.device) / sample.numel()
    seconds += copied * _seconds(lambda: data_digest(torch.zeros(SAMPLE, dtype=torch.uint8)), job.device) / SAMPLE
    basis = f"measured here on {sample.numel()} weights of {name}"
    sets = [names for names in job.sets if job.patterns[names[0]] != DENSE]
    if job.windows is not None and (sets or job.expert_rows):
        seconds += _calibration_seconds(job, sets)
        basis += f", and {TOKENS} tokens through matrices of at most {SIDE} columns; attention is not counted"
    return PruneTime(seconds, f"{basis}; reading and writing are not counted")


def _calibration_seconds(job: PruneJob, sets: list[list[str]]) -> float:
    """Return the time of running the layers, of the gram matrices, of the method, and of the steps around it."""
    assert job.windows is not None
    tokens, linears, steps = job.windows.numel(), job.targets.linears, job.steps
    shapes = [(sum(linears[name].out_features for name in names), linears[names[0]].in_features) for names in sets]
    work = [(tokens, *shape) for shape in shapes] + _expert_work(job, tokens)
    side = min(SIDE, max(columns for _, _, columns in work))
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(TOKENS, side, generator=generator).to(job.device)
    weight, gram = wide[:side].T @ wide[:side], wide.T @ wide
    narrow, like = (x if job.device.type == "cpu" else x.to(torch.bfloat16) for x in (wide, weight))
    product = _seconds(lambda: narrow @ like, job.device) / (TOKENS * side * side)
    square = _seconds(lambda: wide.T @ wide, job.device) / (TOKENS * side * side)
    pattern = next((p for p in (*job.patterns.values(), *job.experts.patterns.values()) if p != DENSE), DENSE)
    method = _seconds(lambda: job.pruner.prune(Linears({"cut": weight}, pattern, gram)), job.device)
    runs = 0 if steps.smooth is None else tokens  # the dense layers run once more
    if steps.matching is not None:
        # The dense layer runs too; a step runs one batch, then goes back to inputs and weights, which takes twice that.
        runs += tokens + 3 * steps.matching.steps * windows_of_a_batch(job.windows) * job.windows.shape[1]
    seconds = runs * product * sum(rows * columns for rows, columns in shapes)
    for seen, rows, columns in work:
        seconds += seen * (2 * rows * columns * product + columns**2 * square)
        # SparseGPT factors the gram matrix, updates the columns on the right, and multiplies the rows by the gram
        # matrix to solve for what it keeps: columns^2 (rows + columns).
        seconds += method * (columns / side) ** 2 * (rows + columns) / (2 * side)
    return seconds


def _expert_work(job: PruneJob, tokens: int) -> list[tuple[int, int, int]]:
    """Return for each weight of experts the tokens that reach it on the average, its rows and its columns."""
    if job.expert_rows is None:
        return []
    routed = experts_of_a_token(text_config(getattr(job.meta.model, "config", None)))
    return [
        (tokens * routed // one.count, one.rows(leaf)[0] // one.count, one.rows(leaf)[1])
        for one in job.experts.found
        for leaf in one.weights
        if one.layer(leaf) in job.expert_rows.layers
        for _ in range(one.count)
    ]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shorter of two times, after the first, which pays for what is loaded and allocated once."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])
