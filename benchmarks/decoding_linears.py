"""Time the linears of a model's blocks as decoding runs them: one after the other, in one CUDA graph, on cold weights.

    python benchmarks/decoding_linears.py OUT.jsonl [--tokens M ...] [--patterns P ...] [--dtypes int8 fp8]

Needs an H100 or H200, and vLLM for its dense layers. Every linear quantises activations of its own, lifts them and
multiplies; the blocks together exceed three L2 caches. What the graph gives is compared, again and again, with the
result of single calls: a kernel that started before its input was there would show.
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
from slidesparse.bench.dense import vllm_ops, vllm_quantize
from slidesparse.bench.operands import packed_weight
from slidesparse.bench.problems import MODELS
from slidesparse.linear import SlideLinear
from slidesparse.packed import PackedWeight
from slidesparse.records import DENSE_VARIANT

MODEL = "Qwen2.5-7B"
BLOCKS = 6
CHECKS, SAMPLES, REPLAYS = 10, 25, 4

Layer = Callable[[torch.Tensor], torch.Tensor]


def vllm_layer(packed: PackedWeight) -> Layer:
    """Dense, by vLLM's own two kernels."""
    ops, weight, dtype = vllm_ops(), packed.unpack().t(), packed.dtype
    if ops is None or packed.scale is None:
        raise SystemExit("dense layers are vLLM's: install it")
    scale = packed.scale.view(-1, 1)

    def run(x: torch.Tensor) -> torch.Tensor:
        values, token_scale = vllm_quantize(x, dtype)
        product: torch.Tensor = ops.cutlass_scaled_mm(values, weight, token_scale, scale, x.dtype)
        return product

    return run


def calls(variant: str, dtype: str, tokens: int) -> list[Callable[[], torch.Tensor]]:
    """Each linear of each block, on activations of its own."""
    made = []
    for _ in range(BLOCKS):
        for out, columns in MODELS[MODEL]:
            packed = packed_weight(variant, dtype, out, columns, torch.device("cuda"))
            layer = vllm_layer(packed) if variant == DENSE_VARIANT else SlideLinear(packed, backend="hopper")
            made.append(partial(layer, torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")))
    return made


def one_by_one(linears: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """What each gives alone."""
    results = []
    for linear in linears:
        torch.cuda.synchronize()
        results.append(linear())
    torch.cuda.synchronize()
    return results


def measure(variant: str, dtype: str, tokens: int) -> dict[str, Any]:
    """Microseconds a block."""
    linears = calls(variant, dtype, tokens)
    expected, graph = one_by_one(linears), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = [linear() for linear in linears]
    for _ in range(CHECKS):
        for y in given:
            y.fill_(float("nan"))
        graph.replay()
        if not all(map(torch.equal, given, expected)):
            raise SystemExit(f"{variant} {dtype} M={tokens}: the graph gives something else")
    times = []
    for _ in range(SAMPLES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / REPLAYS / BLOCKS)
    p20, *_, p80 = statistics.quantiles(times, n=5)
    us = {"us": statistics.median(times), "p20_us": p20, "p80_us": p80}
    return {"dtype": dtype, "variant": variant, "tokens": tokens} | {name: round(time, 2) for name, time in us.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--patterns", nargs="+", default=["2:4", "4:6", "6:8", "8:10"])
    parser.add_argument("--dtypes", nargs="+", default=["int8", "fp8"], choices=["int8", "fp8"])
    options = parser.parse_args(arguments)
    machine = environment.machine()
    head = {"what": __doc__.splitlines()[0], "gpu": machine.gpu, "commit": machine.commit, "date": str(date.today())}
    with options.file.open("w") as file, torch.inference_mode():
        file.write(json.dumps(head) + "\n")
        for dtype in options.dtypes:
            for tokens in options.tokens:
                rows = [measure(variant, dtype, tokens) for variant in (DENSE_VARIANT, *options.patterns)]
                file.writelines(json.dumps(row) + "\n" for row in rows)
                dense = rows[0]["us"]
                cells = " ".join(f"{row['variant']} {row['us']:.1f} ({dense / row['us']:.2f})" for row in rows)
                print(f"{dtype} M={tokens:3} {cells}", flush=True)


if __name__ == "__main__":
    main()
