"""A first look at the kernels on a GPU: correct, then fast, with several launches of each.

    PYTHONPATH=src python3 benchmarks/kernels_probe.py [--quick]

Each time is the median over replays of a CUDA graph that walks through enough buffers to leave L2 cold. "copy" is a
device-to-device copy of as many bytes in all, measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from slidesparse.lifting import kernel as kernels
from slidesparse.lifting.launch import HELD_COLUMNS, WARPS, Launch, configure
from slidesparse.lifting.layout import ColumnOrder, Slabs, slab_view
from slidesparse.lifting.prologue import Prologue, add_rms_norm, rms_norm, silu_mul
from slidesparse.lifting.variant import CHUNKS
from slidesparse.prune import prune_mask
from slidesparse.weights import pack_kernel as packing
from slidesparse.weights.packed import pack_segments
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import quantize_rows
from slidesparse.weights.slide import compress, gather
from slidesparse.weights.support import as_bits, grouped

INT8, FP8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
COLD_BYTES = 400 * 2**20  # several times the 50 to 126 MB of L2
MULTIPLE = 32
EPS = 1e-6


# -- the problems --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One kernel call: pattern (``identity``: quantise only), K, output type, prologue, layout, launch."""

    pattern: str
    columns: int
    dtype: torch.dtype = INT8
    prologue: Prologue = "none"
    slabs: Slabs | None = None
    launch: Launch | None = None

    @property
    def label(self) -> str:
        what = {"none": "", "rms_norm": " rms", "add_rms_norm": " add+rms", "silu_mul": " silu*up"}[self.prologue]
        kind = {INT8: "int8", FP8: "fp8", BF16: "lift"}[self.dtype]
        return f"{self.pattern}{what}{' slabs' if self.slabs else ''} {kind}"


@functools.cache
def weight(pattern: str, columns: int):
    parsed = Pattern.parse(pattern)
    groups = None if parsed.is_uniform else torch.arange(0, parsed.groups(columns), 2)
    return pack_segments(torch.zeros(1, columns, dtype=INT8), parsed, groups=groups)


@functools.cache
def order(pattern: str, columns: int, multiple: int) -> ColumnOrder:
    if pattern == "identity":
        return ColumnOrder.identity(columns, multiple)
    return ColumnOrder.of(weight(pattern, columns).to("cuda"), multiple)


def packed_order(case: Case) -> ColumnOrder:
    return order(case.pattern, case.columns, 128 if case.slabs else MULTIPLE)


def inputs(case: Case, tokens: int) -> dict[str, torch.Tensor]:
    wide = case.columns * (2 if case.prologue == "silu_mul" else 1)
    made = {"x": torch.randn(tokens, wide, dtype=BF16, device="cuda")}
    if "norm" in case.prologue:
        made["gain"] = torch.randn(case.columns, dtype=BF16, device="cuda")
    if case.prologue == "add_rms_norm":
        made["residual"] = torch.randn(tokens, wide, dtype=BF16, device="cuda")
    return made


def use(case: Case) -> None:
    """From here on, calls have the launch of this case."""
    kernels.configure = configure if case.launch is None else (lambda *_: case.launch)
    kernels.find_kernel_lift.cache_clear()


def call(case: Case, made: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    columns, eps = packed_order(case), EPS if "norm" in case.prologue else 0.0
    result = kernels.quantize_lift(
        order=columns, target=case.dtype, prologue=case.prologue, eps=eps, slabs=case.slabs, **made
    )
    return tuple(tensor for tensor in result if tensor is not None)


def moved(case: Case, tokens: int) -> int:
    """Bytes that must be read and written once."""
    width = packed_order(case).k_packed * case.dtype.itemsize
    read = {"none": 2, "rms_norm": 2, "add_rms_norm": 6, "silu_mul": 4}[case.prologue] * case.columns
    return tokens * (read + width + (4 if case.dtype != BF16 else 0))


def launch_of(case: Case, tokens: int) -> Launch:
    quantised = case.dtype != BF16
    return case.launch or configure(tokens, packed_order(case), 2, case.prologue, quantised)


def launches(columns: int) -> list[Launch]:
    """What is worth trying where a row is held: one to four times as few lanes as possible, a store or two a step."""
    fewest = min(warps for warps in WARPS if columns <= CHUNKS * HELD_COLUMNS * warps)
    tried = [warps for warps in WARPS if fewest <= warps <= 8 * fewest and HELD_COLUMNS * warps < 2 * columns]
    made = [Launch(HELD_COLUMNS * warps, 512 * warps * stores, warps) for warps in tried for stores in (1, 2)]
    return made + [replace(launch, registers=most) for launch in made if launch.num_warps == 16 for most in (40, 48)]


# -- correctness ---------------------------------------------------------------------------------------------------


def twin(case: Case, made: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    x = made["x"]
    if case.prologue == "silu_mul":
        x = silu_mul(x)
    elif case.prologue == "rms_norm":
        x = rms_norm(x, made["gain"], EPS)
    elif case.prologue == "add_rms_norm":
        x, made["residual"] = add_rms_norm(x, made["residual"], made["gain"], EPS)
    multiple = 128 if case.slabs else MULTIPLE
    if case.pattern == "identity":
        column_map = torch.arange(case.columns, device="cuda")
        pad = torch.full((-case.columns % multiple,), -1, device="cuda")
        column_map = torch.cat([column_map, pad])
    else:
        column_map = weight(case.pattern, case.columns).column_map(multiple).cuda()
    if case.dtype == BF16:
        return (gather(x, column_map),)
    values, scale = quantize_rows(x, case.dtype)
    return gather(values, column_map), scale


def unslab(values: torch.Tensor, slabs: Slabs) -> torch.Tensor:
    chunks = slab_view(values, slabs).view(torch.uint8).unflatten(-1, (8, 16))
    row, chunk = torch.arange(chunks.shape[1]).unsqueeze(1), torch.arange(8).unsqueeze(0)
    straight = chunks[:, row, chunk ^ row % 8] if slabs.swizzle else chunks
    return straight.transpose(0, 1).flatten(1)[: len(values)].view(values.dtype)


def check(case: Case) -> str:
    """Equal to the twin; ``exact``, or the share of values that differ where the twin sums in another order."""
    torch.manual_seed(0)
    use(case)
    tokens = 65
    made = inputs(case, tokens)
    copies = {name: tensor.clone() for name, tensor in made.items()}
    wanted = twin(case, copies)
    got = list(call(case, made))
    if case.slabs:
        got[0] = unslab(got[0], case.slabs)
    different = (as_bits(got[0]) != as_bits(wanted[0])).float().mean().item()
    if "residual" in made:
        assert torch.equal(got.pop(), copies["residual"]), f"{case}: residual"
    if case.prologue == "none":
        assert different == 0.0, f"{case}: {different:.2%} of the values differ"
        assert len(got) == 1 or torch.equal(got[1], wanted[1]), f"{case}: scales"
        return "exact"
    assert different < 0.02, f"{case}: {different:.2%} of the values differ"
    return f"{different:.1e} differ"


# -- time ----------------------------------------------------------------------------------------------------------


def cold_time(run: Callable[[int], object], sets: int) -> float:
    """Seconds of ``run(i)``, the median over replays of a graph that runs every i once."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            run(i)
    graph.replay()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / sets)
    return statistics.median(times)


def time_case(case: Case, tokens: int) -> float:
    sets = min(64, max(2, -(-COLD_BYTES // moved(case, tokens))))
    made = [inputs(case, tokens) for _ in range(sets)]
    use(case)
    return cold_time(lambda i: call(case, made[i]), sets)


@functools.cache
def copy_time(n_bytes: int) -> float:
    """Seconds to copy so many bytes, read and write counted."""
    sets = min(64, max(2, -(-COLD_BYTES // n_bytes)))
    pairs = [[torch.empty(n_bytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(sets)]
    return cold_time(lambda i: pairs[i][1].copy_(pairs[i][0]), sets)


def report(case: Case, tokens: int, only: float | None = None) -> float:
    seconds = time_case(case, tokens)
    n_bytes = moved(case, tokens)
    share = copy_time(n_bytes // 2**20 * 2**20 or n_bytes) / seconds
    launch = launch_of(case, tokens)
    chosen = " *" if case.launch is None else ""
    cut = f"{launch.write // 4}/{launch.num_warps}/{launch.registers}{chosen}"
    ratio = "" if only is None else f"{seconds / only:6.2f}"
    print(
        f"{case.label:22s} {tokens:6d} {case.columns:6d} {cut:14s} {seconds * 1e6:9.1f} us"
        f" {n_bytes / seconds / 1e9:7.0f} GB/s {share:6.0%} {ratio}",
        flush=True,
    )
    return seconds


def report_pack() -> None:
    for pattern, dtype in (("6:8", INT8), ("4:6", INT8), ("6:8", FP8), ("6:8", BF16)):
        parsed = Pattern.parse(pattern)
        rows, columns = 37888, 3584
        dense = torch.randn(rows, columns, device="cuda")
        dense = torch.where(prune_mask(dense, parsed), dense * 30, 0.0).to(dtype)
        small = dense[:99]
        wanted = compress(grouped(as_bits(small), parsed).view(dtype), parsed)
        got = packing.compress_groups(small, parsed)
        assert torch.equal(as_bits(got.values), as_bits(wanted[0])), f"pack {pattern} {dtype}: values"
        assert torch.equal(got.code, wanted[1]), f"pack {pattern} {dtype}: code"
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            packing.compress_groups(dense, parsed, metadata=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times)
        print(f"pack {pattern} {dtype}: {seconds * 1e3:.2f} ms, {dense.nbytes / seconds / 1e9:.0f} GB/s of dense bytes")


def report_host() -> None:
    case = Case("6:8", 4096)
    made = inputs(case, 16)
    use(case)
    call(case, made)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(500):
        call(case, made)
    print(f"host time of a call: {(time.perf_counter() - begin) / 500 * 1e6:.1f} us")
    torch.cuda.synchronize()


# -- the run -------------------------------------------------------------------------------------------------------


def compile_one(case: Case) -> str | None:
    """Fill Triton's cache from another process."""
    try:
        use(case)
        for tokens in (16, 1024):  # few tokens and many have launches of their own
            call(case, inputs(case, tokens))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case}: {error!r}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    quick = parser.parse_args().quick

    widths = (2560, 3584, 8192, 18944) if quick else (2048, 2560, 3584, 4096, 8192, 14336, 18944)
    plain = [Case(p, k, dtype) for k in widths for dtype in (INT8, FP8) for p in ("identity", "4:6", "6:8")]
    fused = [Case("6:8", k, dtype, f) for k in (3584, 8192) for f in ("rms_norm", "add_rms_norm") for dtype in (INT8,)]
    fused += [Case(p, 18944, dtype, "silu_mul") for dtype in (INT8, FP8) for p in ("6:8", "4:6@50%")]
    others = [Case("4:6@50%", k, dtype) for k in (3584, 18944) for dtype in (INT8, FP8)]
    others += [Case("14:16", 8192), Case("6:8", 8192, BF16)]
    others += [Case("8:10", 2560), Case("6:8", 8192, slabs=Slabs(64, swizzle=True))]
    cases = [*plain, *fused, *others]
    swept = [Case("6:8", 18944, FP8), *fused[-3:], *others[:4]]
    swept += [] if quick else [c for c in plain if c not in swept]
    tried = [replace(case, launch=launch) for case in swept for launch in launches(case.columns)]

    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(14, multiprocessing.cpu_count())) as pool:
        failed = [line for line in pool.imap_unordered(compile_one, [*cases, *tried], chunksize=4) if line]
    print(*failed, f"compiled {len(cases + tried)} cases in {time.perf_counter() - begin:.0f} s", sep="\n", flush=True)

    for case in cases:
        print(f"check {case.label:22s} K={case.columns:6d} {check(case)}", flush=True)
    for case in tried:
        check(case)
    print(f"checked {len(tried)} other launches", flush=True)

    print(f"\n{'kernel':22s} {'M':>6s} {'K':>6s} {'words/warps':14s} {'time':>12s} {'':>12s} {'copy':>6s} quantise=1")
    for tokens in (1, 4096, 16384) if quick else (1, 16, 256, 1024, 4096, 16384):
        only = None
        for case in cases:
            seconds = report(case, tokens, None if case.pattern == "identity" else only if case in plain else None)
            only = seconds if case.pattern == "identity" else only
    for tokens in (16384,) if quick else (1, 64, 4096, 16384):
        for case in tried:
            report(case, tokens)
    report_pack()
    report_host()


if __name__ == "__main__":
    main()
