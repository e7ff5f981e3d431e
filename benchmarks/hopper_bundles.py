"""Compare the two forms of 2:4 weights on the Hopper kernel: metadata step by step, and counts in bundles.

    python benchmarks/hopper_bundles.py OUT.jsonl [--tokens M ...] [--patterns P ...] [--dtypes int8 fp8] [--no-experts]
        [--six-bits]

Needs an H100 or H200. With --six-bits INT8 values are multiples of 4, and forms that keep six bits of them are compared
too. All forms of a layer take turns in CUDA graphs, on as many copies as keep L2 cold. A product is
timed alone, and so is the lift before it; up to 256 tokens also whole blocks, every lift followed by its product. Then
the experts of a mixture: both products and a layer. INT8 products of all forms must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from slidesparse.gemm.backend import Operand
from slidesparse.gemm.hopper.backend import Hopper, HopperCounts, HopperSixBitCounts, HopperSixBits
from slidesparse.gemm.hopper.grouped import HopperExperts
from slidesparse.gemm.hopper.launch import load_kernels
from slidesparse.gemm.hopper.tiles import TILES, WHOLE
from slidesparse.gemm.hopper.weights import COUNTS, METADATA, SLABS
from slidesparse.layer.experts import SlideExperts
from slidesparse.lifting.kernel import quantize_lift
from slidesparse.lifting.layout import Layout
from slidesparse.lifting.prologue import Prologue
from slidesparse.lifting.routed.expert_order import arrange
from slidesparse.offline.known_models import LAYERS, MODELS
from slidesparse.tuning.measure import gaussian
from slidesparse.tuning.timing import CudaStopwatch, copies_needed, copies_of
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.quant import Rounding, parse_dtype
from slidesparse_bench import environment
from slidesparse_bench.expert_sizes import MIXTURES
from slidesparse_bench.interleaved import time_passes
from slidesparse_bench.kernels.expert_operands import PackedExperts, packed_experts
from slidesparse_bench.kernels.mixtures import BALANCED, draw
from slidesparse_bench.kernels.operands import packed_weight

MODEL, MIXTURE = "Qwen2.5-7B", "Qwen3-30B-A3B"
TOKENS = (16, 64, 128, 256, 1024, 4096, 16384)
EXPERT_TOKENS = (64, 16384)
PROLOGUES: dict[str, Prologue] = {"qkv": "add_rms_norm", "o": "none", "gate_up": "add_rms_norm", "down": "silu_mul"}
BLOCKS, MOST_BLOCK_TOKENS = 4, 256
SECONDS = 0.06
MANY, MANY_COPIES = 1024, 2
BF16 = torch.bfloat16
Call = Callable[[], Any]


class Experts(HopperExperts):
    """Experts in one form, whatever their values would allow."""

    def __init__(self, layout: Layout, width: int) -> None:
        self.layout, self.width = layout, width

    def width_of(self, experts: Sequence[PackedWeight]) -> int:
        """See :meth:`HopperExperts.width_of`."""
        return self.width


@dataclass(frozen=True)
class Comparison:
    """The forms that take turns, and how weights are rounded."""

    recipe: Rounding
    forms: dict[str, Hopper]
    experts: dict[str, Experts]


EIGHT_BITS = Comparison(
    "absmax",
    {"metadata": Hopper(), "counts": HopperCounts()},
    {"metadata": Experts(METADATA, 8), "counts": Experts(COUNTS, 8)},
)
SIX_BITS = Comparison(
    "6bit",
    {**EIGHT_BITS.forms, "metadata, six bits": HopperSixBits(), "counts, six bits": HopperSixBitCounts()},
    {**EIGHT_BITS.experts, "metadata, six bits": Experts(METADATA, 6), "counts, six bits": Experts(COUNTS, 6)},
)


@lru_cache(maxsize=4 * len(LAYERS))
def weight_of(dtype: str, pattern: str, layer: str, form: Hopper, recipe: Rounding) -> tuple[PackedWeight, Operand]:
    """A layer's weight, and a form of it."""
    out, columns = MODELS[MODEL][LAYERS.index(layer)]
    packed = packed_weight(pattern, dtype, out, columns, torch.device("cuda"), recipe)
    return packed, form.prepare(packed)


def lift_call(packed: PackedWeight, form: Hopper, layer: str, tokens: int) -> Call:
    """Quantise and lift activations of their own."""
    order, prologue = form.layout.order(packed), PROLOGUES[layer]
    columns = packed.shape[1] * (2 if prologue == "silu_mul" else 1)
    x = gaussian(tokens, columns, dtype=BF16, device=packed.device)
    norm = prologue == "add_rms_norm"
    given = {"gain": torch.ones_like(x[0]), "residual": x.clone(), "eps": 1e-6} if norm else {}
    assert order is not None
    return partial(quantize_lift, x, order, packed.dtype, prologue, slabs=SLABS, **given)


def gemm_call(packed: PackedWeight, form: Hopper, lifted: Any, operand: Any) -> Call:
    """Multiply lifted activations."""
    out = packed.shape[0]
    return partial(form.matmul, lifted.values, lifted.scale, operand, packed.scale, None, out, BF16)


def medians(calls: dict[Any, list[Call]], stopwatch: CudaStopwatch) -> dict[Any, float]:
    """Microseconds of a call, all of them in turn."""
    passes = [stopwatch.prepare(some, True, lambda _: None) for some in calls.values()]
    samples, _ = time_passes(passes, SECONDS)
    return {name: round(statistics.median(one), 2) for name, one in zip(calls, samples, strict=True)}


def layer_rows(
    of: Comparison, dtype: str, pattern: str, layer: str, tokens: int, stopwatch: CudaStopwatch
) -> list[dict[str, Any]]:
    """A product, and the lift before it."""
    lifts: dict[str, Call] = {}
    products: dict[str, list[Call]] = {}
    for name, form in of.forms.items():
        packed, operand = weight_of(dtype, pattern, layer, form, of.recipe)
        lifts[name] = lift_call(packed, form, layer, tokens)
        lifted = lifts[name]()
        count = copies_needed(sum(tensor.nbytes for tensor in operand), stopwatch.l2_bytes, stopwatch.free_bytes() // 8)
        weights = copies_of((operand,), min(count, MANY_COPIES) if tokens >= MANY else count)
        products[name] = [gemm_call(packed, form, lifted, *weight) for weight in weights]
    results = [calls[0]() for calls in products.values()]
    assert dtype != "int8" or all_equal(results), f"{layer} {pattern} M={tokens}: the forms differ"
    del results
    case = {"dtype": dtype, "pattern": pattern, "layer": layer, "tokens": tokens}
    rows = [case | {"what": "product", "us": medians(products, stopwatch)}]
    if layer != "gate_up":  # it has the lift of qkv
        rows.append(
            case | {"what": "lift", "us": medians({form: [lift] * 4 for form, lift in lifts.items()}, stopwatch)}
        )
    return rows


def all_equal(results: Sequence[torch.Tensor]) -> bool:
    """Whether all have the bits of the first."""
    return all(torch.equal(results[0], other) for other in results[1:])


def block_row(of: Comparison, dtype: str, pattern: str, tokens: int, stopwatch: CudaStopwatch) -> dict[str, Any]:
    """The four linears of some blocks, one after the other."""
    calls = {}
    for name, form in of.forms.items():
        linears: list[Call] = []
        for _ in range(BLOCKS):
            for layer in LAYERS:
                packed, operand = copies_of(weight_of(dtype, pattern, layer, form, of.recipe), 2)[1]
                linears.append(partial(linear, packed, form, lift_call(packed, form, layer, tokens), operand))
        calls[name] = [partial(in_a_row, linears)]
    us = {form: round(one / BLOCKS, 2) for form, one in medians(calls, stopwatch).items()}
    return {"dtype": dtype, "pattern": pattern, "tokens": tokens, "what": "block", "us": us}


def linear(packed: PackedWeight, form: Hopper, lift: Call, operand: Operand) -> Any:
    """Lift, and multiply."""
    return gemm_call(packed, form, lift(), operand)()


def in_a_row(calls: Sequence[Call]) -> Any:
    """Run them; the last result."""
    result = None
    for call in calls:
        result = call()
    return result


def expert_rows(of: Comparison, dtype: str, pattern: str, stopwatch: CudaStopwatch) -> list[dict[str, Any]]:
    """Both products of a mixture and a layer of it."""
    sizes, device, rows = MIXTURES[MIXTURE], torch.device("cuda", torch.cuda.current_device()), []
    made = packed_experts(sizes, pattern, dtype, device, of.recipe)
    assert isinstance(made, PackedExperts), made
    layers = {form: SlideExperts(*made.packed.values(), backend) for form, backend in of.experts.items()}
    for tokens in EXPERT_TOKENS:
        x = gaussian(tokens, sizes.hidden, dtype=BF16, device=device)
        weights = torch.rand(tokens, sizes.top_k, generator=torch.Generator(device).manual_seed(3), device=device)
        chosen = draw(BALANCED, tokens, sizes, device)
        results = [layer(x, weights, chosen) for layer in layers.values()]
        assert dtype != "int8" or all_equal(results), "the forms differ"
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


def share(row: dict[str, Any], form: str) -> float:
    """Time of a form over that with metadata."""
    return float(row["us"][form] / row["us"]["metadata"])


def change(rows: Sequence[dict[str, Any]], form: str) -> str:
    """Microseconds with metadata and in another form, and their ratio."""
    before, after = (sum(row["us"][name] for row in rows) for name in ("metadata", form))
    return f"{before:8.1f} -> {after:8.1f} x{after / before:.3f}"


def line_of(tokens: int, own: Sequence[dict[str, Any]], form: str) -> str | None:
    """A line of the table; None where the time did not suffice for all layers."""
    here = {(row["what"], row.get("layer")): row for row in own if row["tokens"] == tokens}
    products = [here["product", layer] for layer in LAYERS if ("product", layer) in here]
    if len(products) < len(LAYERS):
        return None
    cells = " ".join(f"{share(row, form):7.3f}" for row in products)
    lifts = " ".join(f"{share(here['lift', layer], form):.3f}" for layer in LAYERS if ("lift", layer) in here)
    block = here.get(("block", None))
    blocks = "" if block is None else change([block], form)
    return f"{tokens:6} | {cells} | {change(products, form)} | {lifts} | {blocks}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Times of each form over those with metadata, and sums of the four layers in microseconds."""
    lines = []
    kinds = dict.fromkeys((row["dtype"], row["pattern"], form) for row in rows for form in row["us"])
    for dtype, pattern, form in (kind for kind in kinds if kind[2] != "metadata"):
        own = [row for row in rows if (row["dtype"], row["pattern"]) == (dtype, pattern)]
        names = " ".join(f"{layer:>7}" for layer in LAYERS)
        lines.append(f"\n{dtype} {pattern}: {form} / metadata")
        lines.append(f"     M | {names} | the four products, us      | lifts: qkv o down | a block with its lifts, us")
        sizes = dict.fromkeys(row["tokens"] for row in own if row["what"] == "product")
        lines += filter(None, (line_of(tokens, own, form) for tokens in sizes))
        for row in own:
            if row["what"] == "experts":
                lines.append(f"experts {row['layer']:8} M={row['tokens']:5} {change([row], form)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--patterns", nargs="+", default=["6:8", "4:6"])
    parser.add_argument("--dtypes", nargs="+", default=["int8", "fp8"], choices=["int8", "fp8"])
    parser.add_argument("--no-experts", action="store_true")
    parser.add_argument("--six-bits", action="store_true", help="forms with values of six bits beside, in INT8")
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no further case after that")
    options = parser.parse_args(arguments)
    begun, stopwatch, machine = time.monotonic(), CudaStopwatch(), environment.machine()
    dtypes = ["int8"] if options.six_bits else options.dtypes
    of, widths = (SIX_BITS, (8, 6)) if options.six_bits else (EIGHT_BITS, (8,))
    for dtype, field, width in product(dtypes, (0, 3), widths):
        load_kernels(TILES, parse_dtype(dtype), BF16, torch.cuda.current_device(), field, width)
        if not options.no_experts:
            load_kernels(WHOLE, parse_dtype(dtype), BF16, torch.cuda.current_device(), field, width, grouped=True)
    head = {"what": __doc__.splitlines()[0], "gpu": machine.gpu, "commit": machine.commit, "date": str(date.today())}
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    cases = [(dtype, pattern) for pattern in options.patterns for dtype in dtypes]
    jobs: list[Callable[[], list[dict[str, Any]]]] = []
    for dtype, pattern in cases:
        for tokens in options.tokens:
            if tokens <= MOST_BLOCK_TOKENS:
                jobs.append(lambda d=dtype, p=pattern, m=tokens: [block_row(of, d, p, m, stopwatch)])
            jobs += [partial(layer_rows, of, dtype, pattern, layer, tokens, stopwatch) for layer in LAYERS]
    if not options.no_experts:
        jobs += [partial(expert_rows, of, *case, stopwatch) for case in cases]
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
