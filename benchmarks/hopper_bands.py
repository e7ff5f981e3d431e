"""Time products of the Hopper kernel in one launch and in two bands, which save the last wave of large tiles.

    python benchmarks/hopper_bands.py OUT.jsonl [--models M ...] [--tokens M ...] [--patterns P ...] [--dtype int8]

Needs an H100 or H200. Both ways run in turn in CUDA graphs, so that they share one clock, the single launch twice: its
second time shows the noise. Every case is timed in which two bands save cycles by the estimate, whether or not
:func:`slidesparse.gemm.hopper.choose_tiles.choose_bands` takes them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.choose_tiles import (
    MULTIPROCESSORS,
    blocks_of,
    cheapest,
    cycles_of,
    two_bands,
)
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.gemm.launch import SECOND_LAUNCH, Band
from slidesparse.tuning.timing import CudaStopwatch
from slidesparse_bench import environment
from slidesparse_bench.interleaved import interleave
from slidesparse_bench.kernels import operands
from slidesparse_bench.known_models import MODELS

TOKENS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096)
ROUND_S = 0.01


def measure(
    dtype: str, pattern: str, size: tuple[int, int], tokens: Sequence[int], stopwatch: CudaStopwatch
) -> Iterator[dict[str, Any]]:
    """Time one weight in both ways, at each number of tokens at which two bands save cycles by the estimate."""
    (out, columns), device = size, torch.device("cuda")
    packed = operands.packed_weight(pattern, dtype, out, columns, device)
    (steps,) = operands.operand("hopper", pattern, dtype, out, columns, device)
    slabs = steps.shape[1], 0
    for m in tokens:
        one, two, estimate = candidates(m, out, slabs[0])
        if estimate >= 1:
            continue
        x = operands.gaussian(m, columns, dtype=torch.bfloat16, device=device)
        lifted, scale_x = operands.lifted(x, packed, Hopper.layout, "hopper")
        given = lifted, scale_x, (steps,), packed.scale, None, out, torch.bfloat16
        ways = [partial(Hopper().matmul, *given, tile) for tile in (one, two, one)]
        names = [f"{band.channels} in {band.tile}" for band in two]
        row = {"out": out, "columns": columns, "slabs": slabs, "tokens": m, "pattern": pattern, "dtype": dtype}
        row |= {"one": str(one), "two": names, "us": times(ways, stopwatch), "estimate": round(estimate, 3)}
        yield row | {"same": torch.equal(ways[0](), ways[1]())}


def candidates(tokens: int, channels: int, steps: int) -> tuple[Tile, tuple[Band, ...], float]:
    """Return the cheapest tile, the cheapest two bands, and their cycles over those of the tile, without the launch."""
    one, ((cycles, two),) = cheapest(tokens, channels, steps), two_bands(torch.tensor([tokens]), channels, steps)
    blocks = blocks_of((one,), tokens, channels, MULTIPROCESSORS)
    return one, two, (cycles - SECOND_LAUNCH) / float(cycles_of((one,), blocks, steps, MULTIPROCESSORS))


def times(calls: Sequence[Callable[[], object]], stopwatch: CudaStopwatch) -> list[float]:
    """Median microseconds of each, in turn."""
    passes = [stopwatch.prepare([call] * 4, True, lambda _: None) for call in calls]
    (first,) = zip(*interleave(passes, 1), strict=True)
    rounds = max(6, min(30, int(ROUND_S * 1e6 / first[0] / 4)))
    return [round(statistics.median(samples), 2) for samples in interleave(passes, rounds)]


def show(row: dict[str, Any]) -> None:
    """Print a line about a case."""
    alone, in_two, again = row["us"]
    ratios = (
        f"{alone:8.1f} us, {in_two / alone:.3f} of it in two, {again / alone:.3f} again, {row['estimate']} foretold"
    )
    print(f"{row['out']:6} x {row['columns']:<6} {row['pattern']} {row['tokens']:5} {row['one']:9}", end=" ")
    print(f"{' + '.join(row['two']):34} {ratios}{'' if row['same'] else ', NOT EQUAL'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", nargs="+", default=["Qwen2.5-7B", "Llama-3-8B", "Qwen2.5-14B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--patterns", nargs="+", default=["6:8", "2:4"])
    parser.add_argument("--dtype", default="int8", choices=["int8", "fp8", "bf16"])
    options = parser.parse_args()
    stopwatch, machine = CudaStopwatch(), environment.machine()
    head = {"what": __doc__.splitlines()[0], "gpu": machine.gpu, "commit": machine.commit, "date": str(date.today())}
    with options.file.open("w") as file:
        file.write(json.dumps(head) + "\n")
        for model in options.models:
            for size in MODELS[model]:
                for pattern in options.patterns:
                    for row in measure(options.dtype, pattern, size, options.tokens, stopwatch):
                        file.write(json.dumps(row) + "\n")
                        file.flush()
                        show(row)


if __name__ == "__main__":
    main()
