"""Time the linears of a model's blocks as decoding runs them: one after the other, in one CUDA graph, on cold weights.

    python benchmarks/decoding_linears.py OUT.jsonl [--tokens M ...] [--patterns P ...] [--dtypes int8 fp8]

Needs an H100 or H200, and vLLM for its dense layers. Other dense layers are anchors: they tell what fewer bytes give
from what another kernel gives. They are torch's row-wise FP8 product, and Humming's own quantisation and product, where
the package humming-kernels is installed.

Every linear quantises activations of its own, lifts them and multiplies; the blocks together exceed three L2 caches.
What the graph gives is compared, again and again, with the result of single calls: a kernel that started before its
input was there would show. Anchors need not repeat their bits; Humming does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

from slidesparse.layer.linear import SlideLinear
from slidesparse.weights.packed import PackedWeight
from slidesparse_bench import environment
from slidesparse_bench.kernels.dense import vllm_ops, vllm_quantize
from slidesparse_bench.kernels.operands import packed_weight
from slidesparse_bench.known_models import MODELS
from slidesparse_bench.records import DENSE_VARIANT

MODEL = "Qwen2.5-7B"
BLOCKS = 6
CHECKS, SAMPLES, REPLAYS = 10, 25, 4
ALIKE = 0.02
"""Of the norm of a product: Humming has weight scales in BF16."""

Layer = Callable[[torch.Tensor], torch.Tensor]

TORCH, HUMMING = "dense, torch", "dense, Humming"


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


def torch_layer(packed: PackedWeight) -> Layer:
    """Dense, by vLLM's quantisation and torch's row-wise FP8 product."""
    weight, dtype = packed.unpack().t(), packed.dtype
    assert packed.scale is not None
    scale = packed.scale.view(1, -1)

    def run(x: torch.Tensor) -> torch.Tensor:
        values, token_scale = vllm_quantize(x, dtype)
        return torch._scaled_mm(values, weight, token_scale, scale, out_dtype=x.dtype, use_fast_accum=True)

    return run


def humming_layer(packed: PackedWeight) -> Layer:
    """Dense, by Humming's own two kernels with the tiles that its heuristics choose."""
    from humming.layer import HummingLayer

    number = "int" if packed.dtype == torch.int8 else "float"
    kind = {"quant_method": "compressed-tensors", "num_bits": 8, "type": number, "format": f"{number}-quantized"}
    weight = packed.unpack()
    layer = HummingLayer(
        *weight.shape, {**kind, "strategy": "channel"}, {**kind, "dynamic": True}, torch_dtype=torch.bfloat16
    ).cuda()
    assert packed.scale is not None
    layer.load_from_tensors({"weight": weight, "weight_scale": packed.scale.view(-1, 1)})
    layer.transform()
    return layer


ANCHORS: dict[str, Callable[[PackedWeight], Layer]] = {
    TORCH: torch_layer,
    HUMMING: humming_layer,
}


def anchors(dtype: str) -> list[str]:
    """The other dense layers that can run here."""
    found = [TORCH] if dtype == "fp8" else []
    return [*found, HUMMING] if installed("humming-kernels") else found


def installed(package: str) -> bool:
    """Whether a package is installed; a module of its name may be another's."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def layer_of(variant: str, dtype: str, out: int, columns: int) -> Layer:
    """A layer; those of all dense variants have the same weight."""
    dense = variant in ANCHORS or variant == DENSE_VARIANT
    pattern = DENSE_VARIANT if dense else variant
    packed = packed_weight(pattern, dtype, out, columns, torch.device("cuda"))
    if dense:
        return ANCHORS.get(variant, vllm_layer)(packed)
    return SlideLinear(packed, backend="hopper")


def require_alike(variant: str, dtype: str) -> None:
    """End the program if a dense layer does not compute what vLLM's does."""
    out, columns = MODELS[MODEL][0]
    x = torch.randn(64, columns, dtype=torch.bfloat16, device="cuda")
    wanted, found = (layer_of(one, dtype, out, columns)(x) for one in (DENSE_VARIANT, variant))
    if not alike(found, wanted):
        raise SystemExit(f"{variant} {dtype}: its product is another one")


def alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two products differ by roundings alone."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm()) < ALIKE


def calls(variant: str, dtype: str, tokens: int) -> list[Callable[[], torch.Tensor]]:
    """Each linear of each block, on activations of its own."""
    made = []
    for _ in range(BLOCKS):
        for out, columns in MODELS[MODEL]:
            layer = layer_of(variant, dtype, out, columns)
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
        if not all(map(alike if variant in ANCHORS else torch.equal, given, expected)):
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
    parser.add_argument("--no-anchors", action="store_true")
    parser.add_argument("--dtypes", nargs="+", default=["int8", "fp8"], choices=["int8", "fp8"])
    options = parser.parse_args(arguments)
    machine = environment.machine()
    head = {"what": __doc__.splitlines()[0], "gpu": machine.gpu, "commit": machine.commit, "date": str(date.today())}
    with options.file.open("w") as file, torch.inference_mode():
        file.write(json.dumps(head) + "\n")
        for dtype in options.dtypes:
            others = [] if options.no_anchors else anchors(dtype)
            for variant in others:
                require_alike(variant, dtype)
            for tokens in options.tokens:
                rows = []
                for variant in (DENSE_VARIANT, *others, *options.patterns):
                    rows.append(measure(variant, dtype, tokens))
                    file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()
                dense = rows[0]["us"]
                cells = ", ".join(f"{row['variant']} {row['us']:.1f} ({dense / row['us']:.2f})" for row in rows)
                print(f"{dtype} M={tokens:3}: {cells}", flush=True)


if __name__ == "__main__":
    main()
