"""Time the tiles of the Hopper kernel for the experts of a mixture: both products alone, and the whole layer.

    python benchmarks/hopper_grouped_tiles.py OUT.jsonl [--models M ...] [--tokens M ...] [--patterns P ...]

Needs an H200. Both products of a layer take tiles of one number of tokens, and what stands around them depends on it
too. So every tile is timed for each product, and for each number of tokens a layer with the fastest tile of each
product. Tokens choose their experts by chance. All of a problem take turns in CUDA graphs, with as many choices in a
graph as keep L2 cold. The last column says how much longer than the fastest layer the chosen one takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slidesparse.bench import environment
from slidesparse.bench.expert_operands import PackedExperts, packed_experts
from slidesparse.bench.mixtures import BALANCED, draw
from slidesparse.expert_sizes import DOWN, GATE_UP, MIXTURES, ExpertSizes
from slidesparse.gemm.grouped import TokenTile
from slidesparse.gemm.hopper.choose_tiles import GROUPED_TILES
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.layer.experts import ExpertLinear, SlideExperts
from slidesparse.lifting.layout import Lifted
from slidesparse.lifting.routed.expert_order import arrange
from slidesparse.tuning.measure import gaussian
from slidesparse.tuning.timing import CudaStopwatch, copies_needed, time_passes

TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
PARTS = (GATE_UP, DOWN)
SECONDS = 0.1
MOST_CHOICES = 16
BF16 = torch.bfloat16
Call = Callable[[], torch.Tensor]


class Fixed(HopperExperts):
    """The kernel with given tiles."""

    def __init__(self, *tiles: Tile) -> None:
        self.chosen = tiles

    def tiles(self, *_: Any) -> tuple[Tile, ...]:
        return self.chosen


def choices(sizes: ExpertSizes, tokens: int, n_bytes: int, stopwatch: CudaStopwatch) -> list[torch.Tensor]:
    """The experts of some batches, together with more weights than caches hold, or all that there are."""
    device = torch.device("cuda", torch.cuda.current_device())
    first = draw(BALANCED, tokens, sizes, device)
    touched = int(first.unique().numel()) * n_bytes
    count = min(MOST_CHOICES, copies_needed(touched, stopwatch.l2_bytes, n_bytes * sizes.experts))
    shuffled = (torch.randperm(sizes.experts, device=device).to(torch.int32) for _ in range(count - 1))
    return [first, *(other[first.long()] for other in shuffled)]


def product_calls(linear: ExpertLinear, x: torch.Tensor, shared: int, chosen: Sequence[torch.Tensor], tile: Tile):
    """A product of every batch by one tile; ``shared`` pairs read one row of x."""
    calls = []
    for experts in chosen:
        at = arrange(experts, len(linear.scale), tile.tokens)
        rows = at.rows.flatten()
        of_pair = torch.arange(len(rows), device=rows.device) // shared
        of_row = torch.full_like(at.tokens, -1).scatter_(0, rows, of_pair)
        by_row = at._replace(rows=rows.view(-1, shared), tokens=of_row)
        values, scale, _ = linear.lift(x, by_row, "none", gather=True)
        calls.append(partial(linear.multiply, Lifted(values, scale, None), at, BF16, tile))
    return calls


def timed(calls: dict[Any, list[Call]], stopwatch: CudaStopwatch) -> dict[Any, float]:
    """Median microseconds of a call."""
    stopwatch.begin()
    passes = [stopwatch.prepare(some, True, lambda _: None) for some in calls.values()]
    samples, _ = time_passes(passes, SECONDS)
    return {name: round(statistics.median(one), 2) for name, one in zip(calls, samples, strict=True)}


def with_tiles(layer: SlideExperts, tiles: Sequence[Tile], x: torch.Tensor, weights: torch.Tensor) -> Any:
    """Call the layer with given tiles, for the experts of a batch."""

    def run(chosen: torch.Tensor) -> torch.Tensor:
        layer.product = Fixed(*tiles)
        y: torch.Tensor = layer(x, weights, chosen)
        return y

    return run


def measure(model: str, dtype: str, pattern: str, tokens: int, stopwatch: CudaStopwatch) -> dict[str, Any]:
    sizes, device = MIXTURES[model], torch.device("cuda", torch.cuda.current_device())
    experts = packed_experts(sizes, pattern, dtype, device)
    assert isinstance(experts, PackedExperts), experts
    layer, pairs = experts.layer, tokens * sizes.top_k
    usual: tuple[TokenTile, ...] = tuple(HopperExperts.tiles(HopperExperts(), *asked(layer, pairs)))
    chosen = choices(sizes, tokens, sum(map(experts.n_bytes, PARTS)), stopwatch)
    products: dict[str, dict[str, float]] = {}
    for part, linear in zip(PARTS, (layer.gate_up, layer.down), strict=True):
        shared = sizes.top_k if part == GATE_UP else 1
        x = gaussian(pairs // shared, linear.in_features, dtype=BF16, device=device)
        calls = {str(tile): product_calls(linear, x, shared, chosen, tile) for tile in GROUPED_TILES}
        products[part] = timed(calls, stopwatch)
    x = gaussian(tokens, sizes.hidden, dtype=BF16, device=device)
    weights = torch.rand(tokens, sizes.top_k, device=device)
    pairs_of = {
        "chosen": usual,
        **{str(n): fastest(n, products) for n in sorted({tile.tokens for tile in GROUPED_TILES})},
    }
    runs = {name: with_tiles(layer, tiles, x, weights) for name, tiles in pairs_of.items()}  # type: ignore[arg-type]
    layers = timed({name: [partial(run, one) for one in chosen] for name, run in runs.items()}, stopwatch)
    named = {name: [str(tile) for tile in tiles] for name, tiles in pairs_of.items()}
    row = {"model": model, "dtype": dtype, "pattern": pattern, "tokens": tokens, "copies": len(chosen)}
    return {**row, "us": products, "tiles": named, "layer_us": layers}


def asked(layer: SlideExperts, pairs: int) -> tuple[int, list[torch.Tensor], list[int]]:
    """What the choice of tiles goes by."""
    linears = (layer.gate_up, layer.down)
    return pairs, [linear.operand for linear in linears], [linear.out_features for linear in linears]


def fastest(tokens: int, products: dict[str, dict[str, float]]) -> tuple[Tile, ...]:
    """The fastest tile of a number of tokens for each product."""
    like = [tile for tile in GROUPED_TILES if tile.tokens == tokens]
    return tuple(min(like, key=lambda tile: us[str(tile)]) for us in products.values())


def describe(row: dict[str, Any]) -> str:
    """A line for whoever waits."""
    layers = dict(row["layer_us"])
    usual = layers.pop("chosen")
    best = sorted(layers, key=layers.__getitem__)[:3]
    cells = " ".join(f"{'+'.join(row['tiles'][name])} {layers[name]:.1f}" for name in best)
    tops = " ".join(f"{part} {min(us, key=us.__getitem__)} {min(us.values()):.1f}" for part, us in row["us"].items())
    case = f"{row['model']} {row['dtype']} {row['pattern']} M={row['tokens']}"
    loss = usual / layers[best[0]] - 1
    return f"{case}: {'+'.join(row['tiles']['chosen'])} {usual:.1f}; {cells}; alone {tops}; {loss:+.1%}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", nargs="+", default=["Qwen3-30B-A3B"], choices=MIXTURES)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--patterns", nargs="+", default=["6:8", "2:4"])
    parser.add_argument("--dtypes", nargs="+", default=["int8"], choices=["int8", "fp8"])
    options = parser.parse_args(arguments)
    stopwatch, machine = CudaStopwatch(), environment.machine()
    head = {"what": __doc__.splitlines()[0], "gpu": machine.gpu, "commit": machine.commit, "date": str(date.today())}
    with options.file.open("w") as file, torch.no_grad():
        file.write(json.dumps(head) + "\n")
        for model in options.models:
            for dtype in options.dtypes:
                for pattern in options.patterns:
                    for tokens in options.tokens:
                        row = measure(model, dtype, pattern, tokens, stopwatch)
                        file.write(json.dumps(row) + "\n")
                        file.flush()
                        print(describe(row), flush=True)


if __name__ == "__main__":
    main()
