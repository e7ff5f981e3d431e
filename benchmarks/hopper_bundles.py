"""Compare the two forms of 2:4 weights on the Hopper kernel: metadata step by step, and counts in bundles.

    python benchmarks/hopper_bundles.py OUT.jsonl [--tokens M ...] [--patterns P ...] [--dtypes int8 fp8] [--no-experts]

Needs an H100 or H200. Both forms of a layer take turns in CUDA graphs, on as many copies as keep L2 cold. A product is
timed alone, and so is the lift before it; up to 256 tokens also whole blocks, every lift followed by its product. Then
the experts of a mixture: both products and a layer. INT8 products of the two forms must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from slidesparse.bench import environment
from slidesparse.bench.expert_operands import PackedExperts, packed_experts
from slidesparse.bench.mixtures import BALANCED, draw
from slidesparse.bench.operands import packed_weight
from slidesparse.bench.problems import MODELS
from slidesparse.expert_order import arrange
from slidesparse.expert_sizes import MIXTURES
from slidesparse.experts import SlideExperts
from slidesparse.gemm.backend import Operand
from slidesparse.gemm.hopper.backend import Hopper, HopperCounts
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.hopper.launch import load_kernels
from slidesparse.gemm.hopper.tiles import TILES, WHOLE
from slidesparse.gemm.hopper.weights import METADATA, SLABS
from slidesparse.kernels.lift import quantize_lift
from slidesparse.packed import PackedWeight
from slidesparse.prologue import Prologue
from slidesparse.quant import parse_dtype
from slidesparse.records import LAYERS
from slidesparse.tuning.measure import gaussian
from slidesparse.tuning.timing import CudaStopwatch, copies_needed, copies_of, time_passes

MODEL, MIXTURE = "Qwen2.5-7B", "Qwen3-30B-A3B"
TOKENS = (16, 64, 128, 256, 1024, 4096, 16384)
EXPERT_TOKENS = (64, 16384)
FORMS = {"metadata": Hopper(), "counts": HopperCounts()}
PROLOGUES: dict[str, Prologue] = {"qkv": "add_rms_norm", "o": "none", "gate_up": "add_rms_norm", "down": "silu_mul"}
BLOCKS, MOST_BLOCK_TOKENS = 4, 256
SECONDS = 0.06
MANY, MANY_COPIES = 1024, 2
BF16 = torch.bfloat16
Call = Callable[[], Any]


class MetadataExperts(HopperExperts):
    """The backend of experts as it was, with metadata."""

    layout = METADATA


EXPERT_FORMS = {"metadata": MetadataExperts(), "counts": HopperExperts()}


@lru_cache(maxsize=2 * len(LAYERS))
def weight_of(dtype: str, pattern: str, layer: str, form: str) -> tuple[PackedWeight, Operand]:
    """A layer's weight, and a form of it."""
    out, columns = MODELS[MODEL][LAYERS.index(layer)]
    packed = packed_weight(pattern, dtype, out, columns, torch.device("cuda"))
    return packed, FORMS[form].prepare(packed)


def lift_call(packed: PackedWeight, form: str, layer: str, tokens: int) -> Call:
    """Quantise and lift activations of their own."""
    order, prologue = FORMS[form].layout.order(packed), PROLOGUES[layer]
    columns = packed.shape[1] * (2 if prologue == "silu_mul" else 1)
    x = gaussian(tokens, columns, dtype=BF16, device=packed.device)
    norm = prologue == "add_rms_norm"
    given = {"gain": torch.ones_like(x[0]), "residual": x.clone(), "eps": 1e-6} if norm else {}
    assert order is not None
    return partial(quantize_lift, x, order, packed.dtype, prologue, slabs=SLABS, **given)


def gemm_call(packed: PackedWeight, form: str, lifted: Any, operand: Any) -> Call:
    """Multiply lifted activations."""
    out = packed.shape[0]
    return partial(FORMS[form].matmul, lifted.values, lifted.scale, operand, packed.scale, None, out, BF16)


def medians(calls: dict[Any, list[Call]], stopwatch: CudaStopwatch) -> dict[Any, float]:
    """Microseconds of a call, all of them in turn."""
    passes = [stopwatch.prepare(some, True, lambda _: None) for some in calls.values()]
    samples, _ = time_passes(passes, SECONDS)
    return {name: round(statistics.median(one), 2) for name, one in zip(calls, samples, strict=True)}


def layer_rows(dtype: str, pattern: str, layer: str, tokens: int, stopwatch: CudaStopwatch) -> list[dict[str, Any]]:
    """A product, and the lift before it."""
    lifts: dict[str, Call] = {}
    products: dict[str, list[Call]] = {}
    for form in FORMS:
        packed, operand = weight_of(dtype, pattern, layer, form)
        lifts[form] = lift_call(packed, form, layer, tokens)
        lifted = lifts[form]()
        count = copies_needed(sum(tensor.nbytes for tensor in operand), stopwatch.l2_bytes, stopwatch.free_bytes() // 8)
        weights = copies_of((operand,), min(count, MANY_COPIES) if tokens >= MANY else count)
        products[form] = [gemm_call(packed, form, lifted, *weight) for weight in weights]
    results = [calls[0]() for calls in products.values()]
    assert dtype != "int8" or torch.equal(*results), f"{layer} {pattern} M={tokens}: the forms differ"
    del results
    case = {"dtype": dtype, "pattern": pattern, "layer": layer, "tokens": tokens}
    rows = [case | {"what": "product", "us": medians(products, stopwatch)}]
    if layer != "gate_up":  # it has the lift of qkv
        rows.append(case | {"what": "lift", "us": medians({form: [lifts[form]] * 4 for form in FORMS}, stopwatch)})
    return rows


def block_row(dtype: str, pattern: str, tokens: int, stopwatch: CudaStopwatch) -> dict[str, Any]:
    """The four linears of some blocks, one after the other."""
    calls = {}
    for form in FORMS:
        linears: list[Call] = []
        for _ in range(BLOCKS):
            for layer in LAYERS:
                packed, operand = copies_of(weight_of(dtype, pattern, layer, form), 2)[1]
                linears.append(partial(linear, packed, form, lift_call(packed, form, layer, tokens), operand))
        calls[form] = [partial(in_a_row, linears)]
    us = {form: round(one / BLOCKS, 2) for form, one in medians(calls, stopwatch).items()}
    return {"dtype": dtype, "pattern": pattern, "tokens": tokens, "what": "block", "us": us}


def linear(packed: PackedWeight, form: str, lift: Call, operand: Operand) -> Any:
    """Lift, and multiply."""
    return gemm_call(packed, form, lift(), operand)()


def in_a_row(calls: Sequence[Call]) -> Any:
    """Run them; the last result."""
    result = None
    for call in calls:
        result = call()
    return result


def expert_rows(dtype: str, pattern: str, stopwatch: CudaStopwatch) -> list[dict[str, Any]]:
    """Both products of a mixture and a layer of it."""
    sizes, device, rows = MIXTURES[MIXTURE], torch.device("cuda", torch.cuda.current_device()), []
    made = packed_experts(sizes, pattern, dtype, device)
    assert isinstance(made, PackedExperts), made
    layers = {form: SlideExperts(*made.packed.values(), backend) for form, backend in EXPERT_FORMS.items()}
    for tokens in EXPERT_TOKENS:
        x = gaussian(tokens, sizes.hidden, dtype=BF16, device=device)
        weights = torch.rand(tokens, sizes.top_k, generator=torch.Generator(device).manual_seed(3), device=device)
        chosen = draw(BALANCED, tokens, sizes, device)
        results = [layer(x, weights, chosen) for layer in layers.values()]
        assert dtype != "int8" or torch.equal(*results), "the forms differ"
        parts: dict[str, dict[str, list[Call]]] = {"gate_up": {}, "down": {}, "layer": {}}
        for form, layer in layers.items():
            first, second = layer.tiles(chosen.numel())
            at = arrange(chosen, sizes.experts, first.tokens)
            up = layer.gate_up.lift(x, at, "none", gather=True)
            inner = layer.gate_up.multiply(up, at, BF16, first)
            down = layer.down.lift(inner, at, "silu_mul", gather=False)
            parts["gate_up"][form] = [partial(layer.gate_up.multiply, up, at, BF16, first)] * 2
            parts["down"][form] = [partial(layer.down.multiply, down, at, BF16, second)] * 2
            parts["layer"][form] = [partial(layer, x, weights, chosen)] * 2
        for part, calls in parts.items():
            stopwatch.begin()
            case = {"dtype": dtype, "pattern": pattern, "layer": part, "tokens": tokens}
            rows.append(case | {"what": "experts", "us": medians(calls, stopwatch)})
    return rows


def share(row: dict[str, Any]) -> float:
    """Time with counts over that with metadata."""
    return float(row["us"]["counts"] / row["us"]["metadata"])


def change(us: Sequence[float]) -> str:
    """Microseconds with metadata and with counts, and their ratio."""
    return f"{us[0]:8.1f} -> {us[1]:8.1f} x{us[1] / us[0]:.3f}"


def line_of(tokens: int, own: Sequence[dict[str, Any]]) -> str | None:
    """A line of the table; None where the time did not suffice for all layers."""
    here = {(row["what"], row.get("layer")): row for row in own if row["tokens"] == tokens}
    products = [here["product", layer] for layer in LAYERS if ("product", layer) in here]
    if len(products) < len(LAYERS):
        return None
    cells = " ".join(f"{share(row):7.3f}" for row in products)
    sums = change([sum(row["us"][form] for row in products) for form in FORMS])
    lifts = " ".join(f"{share(here['lift', layer]):.3f}" for layer in LAYERS if ("lift", layer) in here)
    block = here.get(("block", None))
    return f"{tokens:6} | {cells} | {sums} | {lifts} | {'' if block is None else change(list(block['us'].values()))}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Times with counts over those with metadata, and sums of the four layers in microseconds."""
    lines = []
    for dtype, pattern in dict.fromkeys((row["dtype"], row["pattern"]) for row in rows):
        own = [row for row in rows if (row["dtype"], row["pattern"]) == (dtype, pattern)]
        names = " ".join(f"{layer:>7}" for layer in LAYERS)
        lines.append(f"\n{dtype} {pattern}: counts / metadata")
        lines.append(f"     M | {names} | the four products, us      | lifts: qkv o down | a block with its lifts, us")
        sizes = dict.fromkeys(row["tokens"] for row in own if row["what"] == "product")
        lines += filter(None, (line_of(tokens, own) for tokens in sizes))
        for row in own:
            if row["what"] == "experts":
                lines.append(f"experts {row['layer']:8} M={row['tokens']:5} {change(list(row['us'].values()))}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--patterns", nargs="+", default=["6:8", "4:6"])
    parser.add_argument("--dtypes", nargs="+", default=["int8", "fp8"], choices=["int8", "fp8"])
    parser.add_argument("--no-experts", action="store_true")
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no further case after that")
    options = parser.parse_args(arguments)
    begun, stopwatch, machine = time.monotonic(), CudaStopwatch(), environment.machine()
    for dtype in options.dtypes:
        for field in (0, 3):
            load_kernels(TILES, parse_dtype(dtype), BF16, torch.cuda.current_device(), field, 8)
            if not options.no_experts:
                load_kernels(WHOLE, parse_dtype(dtype), BF16, torch.cuda.current_device(), field, 8, grouped=True)
    head = {"what": __doc__.splitlines()[0], "gpu": machine.gpu, "commit": machine.commit, "date": str(date.today())}
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    cases = [(dtype, pattern) for pattern in options.patterns for dtype in options.dtypes]
    jobs: list[Callable[[], list[dict[str, Any]]]] = []
    for dtype, pattern in cases:
        for tokens in options.tokens:
            if tokens <= MOST_BLOCK_TOKENS:
                jobs.append(lambda d=dtype, p=pattern, m=tokens: [block_row(d, p, m, stopwatch)])
            jobs += [partial(layer_rows, dtype, pattern, layer, tokens, stopwatch) for layer in LAYERS]
    if not options.no_experts:
        jobs += [partial(expert_rows, *case, stopwatch) for case in cases]
    with options.file.open("w") as file:
        file.write(json.dumps(head) + "\n")
        for job in jobs:
            if time.monotonic() - begun > options.seconds:
                print("out of time", flush=True)
                break
            stopwatch.begin()
            made = job()
            rows += made
            file.writelines(json.dumps(row) + "\n" for row in made)
            file.flush()
    print(table(rows))
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
