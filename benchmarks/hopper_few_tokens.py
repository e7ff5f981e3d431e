"""Time the tiles of the Hopper kernel for few tokens, on weights that no cache holds.

    python benchmarks/hopper_few_tokens.py OUT.jsonl [--models M ...] [--tokens M ...] [--patterns P ...]
        [--dtypes int8 fp8] [--layers L ...] [--six-bits]

The pattern dense stands for dense weights of six bits.

Needs an H100 or H200. A decode step reads every weight of a model once, so none is found in L2: the CUDA graph of a
tile goes round so many copies of the weight that together they exceed three L2 caches (``slidesparse.tuning.timing``).
The same calls on one copy are recorded beside, and those of vLLM's CUTLASS kernel where it is installed. All of a shape
take turns, so that they share one clock; with --six-bits INT8 weights whose values have six bits do, too. Operands are
random bytes, as the kernel waits for memory whatever they say.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.choose_tiles import MULTIPROCESSORS, blocks_of, cycles_of
from slidesparse.gemm.hopper.tiles import DENSE_TILES, TILES, Tile
from slidesparse.gemm.steps import BLOCKS, ROWS, STEP_BYTES, TILE_ROWS, ZERO_NIBBLE, step_bytes
from slidesparse.lifting.layout import SLAB_BYTES
from slidesparse.tuning.timing import CudaStopwatch, Pass, copies_needed, copies_of
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import parse_dtype
from slidesparse_bench import environment
from slidesparse_bench.interleaved import time_passes
from slidesparse_bench.kernels.dense import vllm_ops
from slidesparse_bench.known_models import LAYERS, MODELS

TOKENS = (16, 32, 64, 128, 256, 384, 512, 768)
MOST_BLOCKS = 8
"""Tiles of few tokens, or split, that need more blocks for each multiprocessor than this are no candidates."""

SECONDS = 0.03
"""For each tile, and as much for it on a warm cache."""

WARM_CALLS = 12
Call = Callable[[], torch.Tensor]


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Finite numbers of an 8-bit type."""
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    return (data & 0x3F).view(dtype) if dtype.is_floating_point else data.view(dtype)


def operand(out: int, slabs: int, dtype: torch.dtype, width: int = 8, dense: bool = False) -> torch.Tensor:
    """A dense weight, or a 2:4 one that keeps the first two values of every window: see ``weights.pack_steps``."""
    if dense:
        return numbers(-(-out // TILE_ROWS), slabs, BLOCKS, step_bytes(1, width, dense), dtype=torch.uint8)
    steps = numbers(-(-out // TILE_ROWS), slabs, BLOCKS, step_bytes(1, width), dtype=dtype).view(torch.uint8)
    metadata = steps.unflatten(-1, (-1, 16))[..., 12:] if width == 6 else steps[..., ROWS * STEP_BYTES :]
    metadata[...] = ZERO_NIBBLE * 0x11
    return steps


def candidates(tiles: Iterable[Tile], tokens: int, out: int) -> list[Tile]:
    """Those that make sense for so many tokens."""

    def sensible(tile: Tile) -> bool:
        blocks = blocks_of((tile,), tokens, out, MULTIPROCESSORS)
        if cycles_of((tile,), blocks, 1, MULTIPROCESSORS) == math.inf:
            return False
        wide = tile.tokens >= 96 and tile.split == 1
        return wide or tile.count(tokens, out) * tile.split <= MOST_BLOCKS * MULTIPROCESSORS

    return list(filter(sensible, tiles))


def our_calls(
    tokens: int, out: int, slabs: int, dtype: torch.dtype, copies: int, backend: Hopper, dense: bool
) -> dict[str, list[Call]]:
    """The product by every tile, on each copy of the weight."""
    x = numbers(-(-tokens // 8) * 8, slabs * SLAB_BYTES, dtype=dtype)[:tokens]
    scale_x, scale_w = torch.rand(tokens, 1, device="cuda"), torch.rand(out, device="cuda")
    weights = copies_of((operand(out, slabs, dtype, backend.value_bits, dense),), copies)
    tiles = DENSE_TILES if dense else TILES

    def run(tile: Tile, steps: torch.Tensor) -> torch.Tensor:
        return backend.matmul(x, scale_x, (steps,), scale_w, None, out, torch.bfloat16, tile)

    expected = run(next(iter(tiles)), *weights[0])
    for tile in tiles:
        assert torch.equal(run(tile, *weights[0]), expected) or dtype != torch.int8, str(tile)
    after = "" if backend.value_bits == 8 else " 6 bits"
    chosen = candidates(tiles, tokens, out)
    return {f"{tile}{after}": [partial(run, tile, *weight) for weight in weights] for tile in chosen}


def dense_calls(tokens: int, out: int, columns: int, dtype: torch.dtype, copies: int) -> dict[str, list[Call]]:
    """vLLM's CUTLASS kernel, if it is there."""
    ops = vllm_ops()
    if ops is None:
        return {}
    x, scale_x = numbers(tokens, columns, dtype=dtype), torch.rand(tokens, 1, device="cuda")
    scale_w, weights = torch.rand(out, 1, device="cuda"), copies_of((numbers(out, columns, dtype=dtype),), copies)
    return {
        "vllm": [partial(ops.cutlass_scaled_mm, x, w.t(), scale_x, scale_w, torch.bfloat16) for (w,) in weights],
    }


def times(calls: dict[str, list[Call]], stopwatch: CudaStopwatch) -> dict[str, dict[str, float]]:
    """Median microseconds: ``us`` over all copies, ``warm_us`` over one again and again."""
    passes: list[Pass] = []
    for each in calls.values():
        passes += [stopwatch.prepare(some, True, lambda _: None) for some in (each, each[:1] * WARM_CALLS)]
    samples, _ = time_passes(passes, SECONDS)
    medians = [round(statistics.median(one), 2) for one in samples]
    return {
        "us": dict(zip(calls, medians[::2], strict=True)),
        "warm_us": dict(zip(calls, medians[1::2], strict=True)),
    }


def measure(
    dtype: str, model: str, layer: str, pattern: str, tokens: int, stopwatch: CudaStopwatch, six_bits: bool = False
) -> dict[str, Any]:
    (out, columns), kind = MODELS[model][LAYERS.index(layer)], parse_dtype(dtype)
    slabs = -(-round(Pattern.parse(pattern).expansion * columns) // SLAB_BYTES)
    stopwatch.begin()
    copies = [
        copies_needed(n_bytes, stopwatch.l2_bytes, stopwatch.free_bytes() // 2)
        for n_bytes in (out * columns, out * slabs * step_bytes(1) // ROWS)
    ]
    calls = dense_calls(tokens, out, columns, kind, copies[0])
    dense = Pattern.parse(pattern) == DENSE
    backends = [] if dense else [Hopper()]
    for backend in [*backends, HopperSixBits()] if dense or six_bits else backends:
        calls |= our_calls(tokens, out, slabs, kind, copies[1], backend, dense)
    row = {"model": model, "layer": layer, "out": out, "columns": columns, "tokens": tokens}
    return {**row, "pattern": pattern, "dtype": dtype, "slabs": (slabs, 0), **times(calls, stopwatch)}


def describe(row: dict[str, Any], best: int = 3) -> str:
    """A line for whoever waits."""
    us = dict(row["us"])
    dense = us.pop("vllm", float("nan"))
    fastest = sorted(us, key=us.__getitem__)[:best]
    cells = " ".join(f"{name} {us[name]:.1f} ({row['warm_us'][name]:.1f})" for name in fastest)
    case = f"{row['dtype']} {row['model']} {row['layer']:8} M={row['tokens']:3} {row['pattern']}"
    return f"{case} dense {dense:.1f}, x{dense / us[fastest[0]]:.2f}: {cells}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", nargs="+", default=["Qwen2.5-7B"], choices=MODELS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--patterns", nargs="+", default=["2:4", "4:6", "6:8"])
    parser.add_argument("--dtypes", nargs="+", default=["int8", "fp8"], choices=["int8", "fp8"])
    parser.add_argument("--layers", nargs="+", default=LAYERS, choices=LAYERS)
    parser.add_argument("--six-bits", action="store_true", help="weights of six bits beside, in INT8")
    options = parser.parse_args(arguments)
    stopwatch, machine = CudaStopwatch(), environment.machine()
    head = {"what": __doc__.splitlines()[0], "gpu": machine.gpu, "commit": machine.commit, "date": str(date.today())}
    with options.file.open("w") as file:
        file.write(json.dumps(head) + "\n")
        for case in product(options.dtypes, options.models, options.layers, options.patterns, options.tokens):
            row = measure(*case, stopwatch, options.six_bits)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(describe(row), flush=True)


if __name__ == "__main__":
    main()
