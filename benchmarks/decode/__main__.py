"""Check and time variants of the Hopper kernel for decoding, beside the product's own kernel.

    PYTHONPATH=benchmarks python -m decode OUT.jsonl [--seconds S] [--only NAME ...] [--join "NAME + NAME" ...]
        [--tokens M ...] [--forms PATTERN/BITS ...]

Needs an H100 or H200. First everything is compiled, in parallel processes. Then results of ragged sizes are compared
with the reference bit for bit. Then single products are timed, and the four linears of a block in one CUDA graph, on
weights that no cache holds: the variants of a case take turns pass by pass without a pause, the product's own kernel
twice. A variant that is wrong leaves, and one that is more than 5 % slower at the first two sizes. When the seconds are
over, what is left is named and left out; a case that hangs ends the program, and the record says which.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
from decoding_linears import BLOCKS

from decode.linears import Product, Row, Weight
from decode.patching import PRODUCT, Misfit, Variant, applied
from decode.variants import VARIANTS
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.hopper.choose_tiles import choose_bands
from slidesparse.gemm.hopper.compile import cubin
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.gemm.hopper.weights import ROWS, step_bytes
from slidesparse.lifting.layout import SLAB_BYTES
from slidesparse.offline.known_models import LAYERS, MODELS
from slidesparse.tuning.timing import CudaStopwatch, Pass, copies_needed, poison
from slidesparse.weights.pattern import Pattern
from slidesparse_bench import environment
from slidesparse_bench.interleaved import time_passes

SIZES = {"32B gate_up": (55296, 5120)} | {f"7B {n}": s for n, s in zip(LAYERS, MODELS["Qwen2.5-7B"], strict=True)}
FORMS, TOKENS = ("6:8/6", "6:8/8", "2:4/6", "4:6/6"), (16, 64, 128, 256)
RAGGED, RAGGED_TOKENS = (1100, 2072), (1, 7, 16, 33, 64, 100, 129, 256)
SLOWER, CASE_S, STALLED_S = 1.05, 0.5, 120
KNOWN = {one.name: one for one in (PRODUCT, *VARIANTS)}
"""By their names: processes that compile are forked, and know them."""


def joined(names: str) -> Variant:
    """The changes of several variants at once; all else is that of the last one that has tiles of its own."""
    parts = [KNOWN[name] for name in names.split(" + ")]
    last = next((one for one in reversed(parts) if one.tiles), parts[-1])
    edits = tuple(dict.fromkeys(edit for one in parts for edit in one.edits))
    flags = {flag: any(getattr(one, flag) for one in parts) for flag in ("starts_early", "only_six_bits")}
    flags["only_these"] = any(one.only_these and bool(one.edits) for one in parts)  # else other tiles stay as they are
    return replace(last, name=names, edits=edits, predicted=sum(one.predicted for one in parts), **flags)


def slabs_of(pattern: str, columns: int) -> int:
    """Return the 2:4 steps of a row."""
    return -(-round(Pattern.parse(pattern).expansion * columns) // SLAB_BYTES)


def compiled(job: tuple[str, Tile, int]) -> tuple[str, str]:
    """Compile a tile of a variant into the cache; returns its name and what is wrong."""
    variant, tile, bits = KNOWN[job[0]], *job[1:]
    try:
        with applied(variant):
            cubin(variant.tile(tile), torch.int8, torch.bfloat16, False, 0, bits)
    except (UnsupportedError, Misfit) as error:
        return variant.name, str(error)
    return variant.name, ""


def compile_all(variants: Sequence[Variant], forms: Sequence[tuple[str, int]], tokens: Sequence[int]) -> dict[str, str]:
    """Compile what the cases need, before this process has a GPU; returns why some variants do not compile."""
    jobs, sizes = set(), [(RAGGED, RAGGED_TOKENS), *((size, tokens) for size in SIZES.values())]
    for (pattern, bits), ((out, columns), some) in product(forms, sizes):
        bands = (choose_bands(count, out, slabs_of(pattern, columns), 0) for count in some)
        tiles = {band.tile for some_bands in bands for band in some_bands}
        jobs |= {(one.name, tile, bits) for one, tile in product(variants, tiles) if one.takes(tile, bits)}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        return {name: wrong for name, wrong in pool.map(compiled, sorted(jobs, key=str)) if wrong}


class Session:
    """The variants that are still in, the record, and the clock."""

    def __init__(self, file: Path, end: float, variants: Sequence[Variant]) -> None:
        self.file, self.end, self.variants = file.open("w"), end, list(variants)
        self.stopwatch, self.ratios = CudaStopwatch(), []

    def say(self, row: dict[str, Any], line: str = "") -> None:
        """Write a row of the record, and print it or the line."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        print(line or row, flush=True)

    def leave(self, variant: Variant, why: str) -> None:
        self.variants = [one for one in self.variants if one is not variant]
        self.say({"what": "left", "variant": variant.name, "why": why})

    def run(self, what: Callable[..., None], cases: Iterable[tuple[Any, ...]]) -> None:
        """Run the cases, as long as there is time."""
        for (pattern, bits), *case in cases:
            if time.monotonic() > self.end:
                self.say({"what": "no time", "for": [what.__name__, pattern, bits, *case]})
            else:
                faulthandler.dump_traceback_later(STALLED_S, exit=True)
                self.say({"what": "begins", "case": [what.__name__, pattern, bits, *case]})
                self.stopwatch.begin()
                what(pattern, bits, *case)
                faulthandler.cancel_dump_traceback_later()

    def check(self, pattern: str, bits: int, tokens: int) -> None:
        """Compare all variants with the reference at a ragged size."""
        one = Product(Weight(*RAGGED, pattern, bits, tokens))
        expected = one.reference()
        for variant in filter(one.weight.takes, (PRODUCT, *self.variants)):
            poison(one.y)
            found = one.calls(variant)[0]()
            if not torch.equal(found, expected):
                self.leave(variant, f"wrong at {pattern}, {bits} bits, {tokens} tokens")

    def time_product(self, pattern: str, bits: int, size: str, tokens: int) -> None:
        """Time one product, and let slow variants go after the first two."""
        out, columns = SIZES[size]
        n_bytes = out * slabs_of(pattern, columns) * step_bytes(1, bits) // ROWS
        copies = max(3, copies_needed(n_bytes, self.stopwatch.l2_bytes, self.stopwatch.free_bytes() // 4))
        one = Product(Weight(out, columns, pattern, bits, tokens, copies))
        expected, wrong, passes = one.calls(PRODUCT)[0]().clone(), [], {}
        singles = [each for each in self.variants if not each.starts_early and one.weight.takes(each)]
        for variant in (PRODUCT, *singles):
            given: list[torch.Tensor] = []
            passes[variant.name] = self.stopwatch.prepare(one.calls(variant), True, given.append)
            wrong += [] if torch.equal(given[0], expected) else [variant]
        for variant in wrong:
            del passes[variant.name]
            self.leave(variant, f"wrong at {size}, {tokens} tokens")
        row = {"what": "product", "size": size, "pattern": pattern, "bits": bits, "tokens": tokens}
        row |= {"tiles": [str(band.tile) for band in one.weight.bands], "bytes": n_bytes, "copies": copies}
        self.ratios.append(self.timed(row, passes, 1))
        for variant in singles if len(self.ratios) == 2 else ():
            if all(found.get(variant.name, 0) > SLOWER for found in self.ratios):
                self.leave(variant, "slower at the first two sizes")

    def time_row(self, pattern: str, bits: int, chained: bool, tokens: int) -> None:
        """Time the four linears of a block."""
        one = Row(pattern, bits, chained, tokens)
        expected, passes = one.expected(), {}
        for variant in (PRODUCT, *self.variants):
            if not any(weight.takes(variant) for weight in one.weights):
                continue
            given: list[torch.Tensor] = []
            passes[variant.name] = self.stopwatch.prepare([one.call(variant)], True, given.extend)
            if not one.repeats(passes[variant.name].launch, given, expected):
                del passes[variant.name]
                self.leave(variant, f"wrong in a row, {tokens} tokens, chained {chained}")
        row = {"what": "block", "chained": chained, "pattern": pattern, "bits": bits, "tokens": tokens}
        self.timed(row, passes, BLOCKS)

    def timed(self, row: dict[str, Any], passes: dict[str, Pass], each: int) -> dict[str, float]:
        """Time passes by turns and record them; returns the time of each over that of the product's own kernel."""
        samples, noise = time_passes(list(passes.values()), CASE_S)
        us = {name: round(statistics.median(one) / each, 2) for name, one in zip(passes, samples, strict=True)}
        head, own = " ".join(map(str, row.values())), us[PRODUCT.name]
        ratios = {name: time_us / own for name, time_us in us.items()}
        rate = f" {row['bytes'] / own / 1e6:.2f} TB/s" if "bytes" in row else ""
        found = ", ".join(f"{name} {ratio:.3f}" for name, ratio in sorted(ratios.items(), key=lambda item: item[1]))
        eager = [name for name, one in passes.items() if one.method != "graph"]
        row |= {"eager": eager} if eager else {}
        self.say({**row, "noise": round(noise, 4), "us": us}, f"{head}: {own} us{rate}; noise {noise:.1%}; {found}")
        return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--only", nargs="*", default=[one.name for one in VARIANTS], metavar="NAME")
    parser.add_argument("--join", nargs="+", default=[], metavar="NAME + NAME")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--forms", nargs="+", default=FORMS, help="pattern/bits, the one that matters most first")
    options = parser.parse_args()
    end, tokens = time.monotonic() + options.seconds, options.tokens
    chosen = [KNOWN[name] for name in options.only] + [joined(names) for names in options.join]
    KNOWN.update((one.name, one) for one in chosen)
    first, *others = forms = [(pattern, int(bits)) for pattern, bits in (one.split("/") for one in options.forms)]
    failed = compile_all((PRODUCT, *chosen), forms, tokens)
    print(f"compiled; {end - time.monotonic():.0f} s are left", flush=True)
    session, machine = Session(options.file, end, chosen), environment.machine()
    head = {"what": __doc__.splitlines()[0], "gpu": machine.gpu, "commit": machine.commit, "date": str(date.today())}
    session.say(head | {"predicted": {one.name: one.predicted for one in chosen}})
    for name, why in failed.items():
        session.leave(KNOWN[name], why)
    few, (large, *small) = [count for count in tokens if count <= 64], SIZES
    session.run(session.check, product(forms, RAGGED_TOKENS))
    session.run(session.time_product, product([first], [large], tokens))
    session.run(session.time_row, ((first, chained, count) for count in tokens for chained in (False, True)))
    session.run(session.time_product, product([first], small, tokens))
    session.run(session.time_product, product(others, [large], few))
    session.run(session.time_row, product(others, [False], few))


if __name__ == "__main__":
    main()
