"""Time tiles of the Hopper kernel at the linears of a model, and fit the costs of ``gemm/hopper/tiles.py``.

    python benchmarks/hopper_tiles.py OUT.jsonl [--models M ...] [--tokens M ...] [--patterns P ...] [--dtype int8]
        [--six-bits]

Needs an H100 or H200. The tiles of a shape are timed in turn, CUDA graphs on a warm cache, so that they share one
clock; with vLLM installed its CUTLASS kernel takes part, for the reader. Tiles of 96 tokens and more:
``hopper_few_tokens.py`` is for the others. ``chosen`` is what the product chooses, which may be two bands. ``--fit
FEW.jsonl`` reads a record that is there, and one of few tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.choose_tiles import MULTIPROCESSORS, blocks_of, cheapest, work
from slidesparse.gemm.hopper.tiles import TILES, Tile
from slidesparse.tuning.timing import CudaStopwatch
from slidesparse.weights.quant import parse_dtype, quantize_rows
from slidesparse_bench import environment
from slidesparse_bench.interleaved import interleave
from slidesparse_bench.kernels import operands
from slidesparse_bench.kernels.dense import vllm_ops
from slidesparse_bench.known_models import LAYERS, MODELS

SIZES = {
    **MODELS,
    "12B": ((6144, 5120), (5120, 4096), (28672, 5120), (5120, 14336)),  # Mistral-Nemo
    "32B": ((7168, 5120), (5120, 5120), (55296, 5120), (5120, 27648)),  # Qwen2.5
}
"""Model -> (out, in) of its linears."""

CHOSEN = "chosen"
TOKENS = (256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
ROUND_S = 0.02
GHZ = 1.5
"""Cycles are times at this clock: the choice needs their ratios alone."""

LAUNCH = 3500
"""Of them, what every launch takes, whatever its tile."""

WIDE = [tile for tile in TILES if tile.tokens >= 96]


def work_of(tile: Tile, tokens: int, out: int, steps: int) -> tuple[float, float]:
    """Return what a multiprocessor does for one product, as ``choose_tiles.work`` counts it."""
    blocks = blocks_of((tile,), tokens, out, MULTIPROCESSORS)
    in_sequence, tiles = work((tile,), blocks, steps, MULTIPROCESSORS)
    return float(in_sequence), float(tiles)


def times(calls: Sequence[Callable[[], object]], stopwatch: CudaStopwatch) -> list[float]:
    """Median microseconds of each, in turn."""
    passes = [stopwatch.prepare([call] * 3, True, lambda _: None) for call in calls]
    (first,) = zip(*interleave(passes, 1), strict=True)
    rounds = max(4, min(15, int(ROUND_S * 1e6 / statistics.mean(first) / 3)))
    return [statistics.median(samples) for samples in interleave(passes, rounds)]


def measure(
    dtype: str, model: str, layer: str, pattern: str, tokens: int, backend: Hopper, stopwatch: CudaStopwatch
) -> dict[str, object]:
    (out, columns), device = SIZES[model][LAYERS.index(layer)], torch.device("cuda")
    packed = operands.packed_weight(pattern, dtype, out, columns, device, operands.rounding_for(backend.name, dtype))
    operand = operands.operand(backend.name, pattern, dtype, out, columns, device)
    x = operands.gaussian(tokens, columns, dtype=torch.bfloat16, device=device)
    lifted, scale_x = operands.lifted(x, packed, backend.layout, "hopper")

    def run(tile: Tile | None) -> torch.Tensor:
        return backend.matmul(lifted, scale_x, operand, packed.scale, None, out, torch.bfloat16, tile)

    (steps,) = operand
    wide = [tile for tile in WIDE if work_of(tile, tokens, out, steps.shape[1])[0] < math.inf]
    expected = run(wide[0])
    for tile in wide:
        assert torch.equal(run(tile), expected) or dtype != "int8", str(tile)
    names = [*map(str, wide), CHOSEN]
    calls: list[Callable[[], object]] = [partial(run, tile) for tile in (*wide, None)]
    vllm = vllm_ops()
    if vllm is not None and packed.scale is not None:
        quantised = quantize_rows(x, parse_dtype(dtype))
        weight, scale_w = packed.unpack().t(), packed.scale.view(-1, 1)
        calls.append(
            partial(vllm.cutlass_scaled_mm, quantised.values, weight, quantised.scale, scale_w, torch.bfloat16)
        )
    us = [round(t, 2) for t in times(calls, stopwatch)]
    row: dict[str, object] = {"model": model, "layer": layer, "out": out, "columns": columns, "tokens": tokens}
    row |= {"pattern": pattern, "bits": backend.value_bits, "dtype": dtype, "slabs": (steps.shape[1], 0)}
    row["us"] = dict(zip(names, us[: len(names)], strict=True))
    return row | ({"dense_us": us[-1]} if len(us) > len(names) else {})


def fit(rows: Sequence[dict[str, Any]]) -> None:
    """Costs with the least relative error, and how far the choice by today's costs is from the best tile."""
    equations, losses = defaultdict(list), []
    for row in rows:
        slabs, _ = row["slabs"]
        us = {tile: row["us"][str(tile)] for tile in TILES if str(tile) in row["us"]}
        for tile, time_us in us.items():
            cycles = max(1.0, time_us * 1e3 * GHZ - LAUNCH)
            steps, tiles = work_of(tile, row["tokens"], row["out"], slabs)
            equations[tile].append((steps / cycles, tiles / cycles))
        chosen = cheapest(row["tokens"], row["out"], slabs)
        losses.append((us.get(chosen, float("inf")) / min(us.values()) - 1, row["layer"], row["tokens"], str(chosen)))
    for tile, lines in equations.items():
        (step, once), _ = nnls(np.array(lines), np.ones(len(lines)))
        errors = np.abs(np.array(lines) @ (step, once) - 1)
        print(f"{tile!s:12} step {step:5.0f}  tile {once:6.0f}  error {errors.mean():.1%}, most {errors.max():.1%}")
    mean = statistics.mean(loss for loss, *_ in losses)
    print(f"the tile chosen today is {mean:.2%} slower than the best, at most", *max(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", nargs="+", default=["Qwen2.5-7B"], choices=SIZES)
    parser.add_argument("--six-bits", action="store_true", help="INT8 weights whose values have six bits")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--patterns", nargs="+", default=["2:4", "6:8"])
    parser.add_argument("--dtype", default="int8", choices=["int8", "fp8", "bf16"])
    parser.add_argument("--fit", type=Path, metavar="FEW", help="only fit what the file and this one hold")
    options = parser.parse_args()
    if options.fit is None:
        stopwatch = CudaStopwatch()
        machine = environment.machine()
        head = {
            "what": __doc__.splitlines()[0],
            "gpu": machine.gpu,
            "commit": machine.commit,
            "date": str(date.today()),
        }
        with options.file.open("w") as file:
            file.write(json.dumps(head) + "\n")
            backend = HopperSixBits() if options.six_bits else Hopper()
            for case in product(options.models, LAYERS, options.patterns, options.tokens):
                row = measure(options.dtype, *case, backend, stopwatch)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(*case, "dense", row.get("dense_us"), sorted(row["us"].items(), key=itemgetter(1))[:3], flush=True)
    files = [options.file] if options.fit is None else [options.file, options.fit]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    fit([row for row in rows if "us" in row])


if __name__ == "__main__":
    main()
