"""An experiment: how fast is one persistent launch for the four linears of a block, beside today's eight launches?

    PYTHONPATH=benchmarks python -m decode.chain_launch OUT.jsonl [--seconds S] [--tokens M ...] [--forms PATTERN/BITS ...]

Needs an H100 or H200. The kernel is ``chain_launch.cuh``, compiled in place of the kernel of a mainloop. Each case is checked
first: every product bit for bit against the reference of the lifted values that the kernel itself wrote, and these against
torch's; then the chains and their pieces take turns, pass by pass, each in one CUDA graph over the weights of several
blocks. A wait inside the kernel gives up after a second or so, and what it says ends the case.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import statistics
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decoding_linears import BLOCKS

from decode.linears import BF16, INT8, Row
from decode.patching import PRODUCT
from slidesparse.base.torch_private import current_stream
from slidesparse.gemm.hopper import kernel as hopper_kernel
from slidesparse.gemm.hopper.compile import compile_sources, options, sources
from slidesparse.gemm.hopper.kernel import Kernel
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.gemm.hopper.weights import SLABS, VALUE_BYTES, step_bytes
from slidesparse.gemm.reference import apply_scales
from slidesparse.gemm.reference import product as exact_product
from slidesparse.lifting.layout import SLAB_BYTES
from slidesparse.lifting.prologue import add_rms_norm, silu_mul
from slidesparse.tuning.timing import CudaStopwatch, poison
from slidesparse.weights.quant import quantize_rows
from slidesparse_bench import environment
from slidesparse_bench.interleaved import time_passes

LINEARS, COUNTER, SCRATCH, STAMPS = 4, 32, 7168, 19
NONE, NORM, SILU = range(3)
PROLOGUES = (NONE, NORM, SILU, NORM)
NAMES = ("o", "gate_up", "down", "qkv")
LIFTS, SYNCS, STEPS, AHEAD, EARLY, REST, FURTHER = 1, 2, 4, 8, 16, 32, 64
ALL = LIFTS | SYNCS | STEPS | AHEAD
EPS = 1e-6
MULTIPROCESSOR_BYTES, BLOCK_BYTES = 233472, 1024
CASE_S, STALLED_S, REPLAYS = 0.6, 240, 20
UNITS = ("units", "all")

SHAPES = {
    16: [Tile(16, 1, 1, stages=9, blocks=3), Tile(16, 1, 2, stages=5, blocks=3), Tile(16, 1, 2, stages=9, blocks=2)],
    64: [Tile(64, 1, 1, stages=8, blocks=2), Tile(64, 1, 2, stages=6, blocks=2)],
}
"""By the tokens; of the first one the pieces are timed, too."""

PIECES = {
    "chain": ALL,
    "early": ALL | EARLY,
    "units": ALL,
    "rest": ALL | REST,
    "further": ALL | FURTHER,
    "all": ALL | EARLY | FURTHER,
    "not ahead": ALL & ~AHEAD,
    "no lifts": ALL & ~LIFTS,
    "no steps": ALL & ~STEPS,
    "barriers": SYNCS | AHEAD,
    "products": STEPS | AHEAD,
}
"""What runs: all; with the next launch allowed early; with shares of several steps, so that fewer tiles are divided;
with pauses between polls; with some steps past the ring brought into L2 before a lift; without weights ahead of the
lifts; and parts of it alone."""


class Linear(ctypes.Structure):
    """``struct Linear`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "sparse", "scale_w", "sums", "y", "scale_x", "gain")),
        *((name, ctypes.c_int) for name in ("channels", "slabs", "columns", "prologue", "parts", "unit")),
    )


class Chain(ctypes.Structure):
    """``struct Chain`` of the source."""

    _fields_ = (
        ("linear", Linear * LINEARS),
        *(
            (name, ctypes.c_void_p)
            for name in ("input", "residual", "residual_mid", "residual_out", "counters", "largest", "trace")
        ),
        ("input_stride", ctypes.c_int),
        ("tokens", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("flags", ctypes.c_int),
    )


# -- the kernel ------------------------------------------------------------------------------------------------------


def chain_sources(value_bits: int) -> dict[str, str]:
    """As :func:`slidesparse.gemm.hopper.compile.sources`, with this kernel in place of the product's."""
    files = sources(0, value_bits)
    name, loop = next(iter(files)), {6: "SixBitConsumer", 8: "MetadataConsumer"}[value_bits]
    old = f"KERNEL(const __grid_constant__ Arguments p) {{ run<StepsWithMetadata, {loop}>(p); }}"
    assert files[name].count(old) == 1, old
    sizes = f'static_assert(sizeof(Chain) == {ctypes.sizeof(Chain)} && STAMPS == {STAMPS}, "");\n'
    new = f'#include "chain_launch.cuh"\n{sizes}KERNEL(const __grid_constant__ Chain c) {{ run_chain<{loop}>(c); }}'
    files[name] = files[name].replace(old, new)
    files["chain_launch.cuh"] = Path(__file__).with_name("chain_launch.cuh").read_text()
    return files


def chain_options(tile: Tile, value_bits: int, group: int) -> list[str]:
    """The options for NVRTC, for groups of so many columns."""
    more = [f"-DGROUP_COLUMNS={group}", f"-DWINDOWS={group // 2 - 1}", "--ptxas-options=-v"]
    return [*options(tile, INT8, BF16, value_bits=value_bits), *more]


def shared_bytes(tile: Tile, value_bits: int) -> int:
    """Bytes of shared memory of a block, as the source lays it out."""
    step = max(VALUE_BYTES, step_bytes(1, value_bits))
    stage = -(-(tile.tokens * SLAB_BYTES + tile.row_blocks * step) // 1024) * 1024
    return 1024 + tile.stages * (stage + 16) + SCRATCH * 2 + 32


def fits(tile: Tile, value_bits: int) -> bool:
    """Whether a multiprocessor has memory for all of its blocks."""
    return tile.blocks * (shared_bytes(tile, value_bits) + BLOCK_BYTES) <= MULTIPROCESSOR_BYTES


def fitting(tile: Tile, value_bits: int) -> Tile:
    """The tile with as many stages, or as fit."""
    while not fits(tile, value_bits):
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def load_chain(tile: Tile, value_bits: int, group: int) -> tuple[Kernel, int]:
    """Return the loaded kernel, and the blocks that are resident at once, all of them."""
    code, log = compile_sources(chain_sources(value_bits), chain_options(tile, value_bits, group))
    print(
        "  ", " ".join(line for line in log.splitlines() if "spill" in line or "registers" in line).strip(), flush=True
    )
    driver, check, device = hopper_kernel._driver(), hopper_kernel._check, torch.cuda.current_device()
    status, context = driver.cuDevicePrimaryCtxRetain(device)
    check(status, "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(context)[0], "cuCtxSetCurrent")
    status, module = driver.cuModuleLoadData(code)
    check(status, "cuModuleLoadData")
    status, function = driver.cuModuleGetFunction(module, b"sparse_gemm")
    check(status, "cuModuleGetFunction")
    shared = shared_bytes(tile, value_bits)
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, attribute, shared)[0], "cuFuncSetAttribute")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    check(driver.cuFuncSetAttribute(function, attribute, 100)[0], "cuFuncSetAttribute")
    status, resident = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, tile.threads, shared)
    check(status, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
    if resident < tile.blocks:
        raise SystemExit(f"{tile}: {resident} blocks are resident, {tile.blocks} were meant")
    count = hopper_kernel.multiprocessors(device)
    return Kernel(function, context, tile, shared, count), count * tile.blocks


# -- the chain -------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A linear's sizes."""

    channels: int
    slabs: int
    columns: int


def parts_of(shape: Shape, tokens: int, grid: int, windows: int) -> int:
    """Return the blocks that lift a row of the SiLU together."""
    return max(1, min(grid // tokens, -(-shape.slabs // windows), 128))


def unit_of(shape: Shape, grid: int, channels: int) -> int:
    """Return the most steps to keep together at which the largest share is at most 2 % larger than without."""
    steps = shape.channels // channels * shape.slabs
    least = -(-steps // grid)
    units = [unit for unit in range(1, shape.slabs + 1) if shape.slabs % unit == 0]
    return max(unit for unit in units if -(-(steps // unit) // grid) * unit <= 1.02 * least)


class OneLaunch:
    """The chain of several blocks, one launch each, on the weights of a :class:`decode.linears.Row`.

    Args:
        row: The linears and their inputs.
        kernel: The kernel.
        grid: Its blocks.
        flags: What runs.
        units: Whether steps are kept together where that costs nothing.
    """

    def __init__(self, row: Row, kernel: Any, grid: int, flags: int, units: bool = False) -> None:
        self.row, self.kernel, self.grid, self.flags = row, kernel, grid, flags
        device, self.tokens = row.x.device, row.x.shape[0]
        layouts = [one.backend.layout for one in row.weights]
        self.orders = [layout.order(one.packed) for layout, one in zip(layouts, row.weights, strict=True)]
        self.maps = [layout.column_map(one.packed) for layout, one in zip(layouts, row.weights, strict=True)]
        self.shapes = [Shape(one.out, one.copies[0].sparse.shape[1], one.columns) for one in row.weights]
        assert all(one.copies[0].dense.shape[1] == 0 for one in row.weights) and self.tokens % 8 == 0
        group, tile = self.orders[0].group, kernel.tile
        assert all(shape.channels % tile.channels == 0 for shape in self.shapes)
        self.windows = group // 2 - 1
        self.parts = [
            parts_of(shape, self.tokens, grid, self.windows) if prologue == SILU else 1
            for shape, prologue in zip(self.shapes, PROLOGUES, strict=True)
        ]
        self.units = [unit_of(shape, grid, tile.channels) if units else 1 for shape in self.shapes]
        lifted = -(-self.shapes[2].slabs // self.windows)
        assert -(-lifted // self.parts[2]) * 32 * group <= SCRATCH and row.hidden <= 512 * 7 and grid >= self.tokens
        m = self.tokens

        def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.x = [empty(shape.slabs, m, SLAB_BYTES, dtype=INT8) for shape in self.shapes]
        self.scales = [empty(m, dtype=torch.float32) for _ in self.shapes]
        self.sums = [torch.zeros(m, shape.channels, dtype=torch.int32, device=device) for shape in self.shapes]
        self.y = [[empty(m, shape.channels) for shape in self.shapes] for _ in range(BLOCKS)]
        self.mid, self.out = ([empty(m, row.hidden) for _ in range(BLOCKS)] for _ in range(2))
        self.counters = torch.zeros((2 * LINEARS + 2) * COUNTER, dtype=torch.int32, device=device)
        self.largest = torch.zeros(m * self.parts[2], dtype=torch.int32, device=device)
        self.trace = torch.zeros(grid, STAMPS, dtype=torch.int64, device=device)

    def inputs(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input and the residual of a block."""
        if block == 0:
            return self.row.x, self.row.residual
        return self.y[block - 1][-1][:, : self.row.hidden], self.out[block - 1]

    def arguments(self, block: int, products: bool, traced: bool) -> Chain:
        """Return the arguments; ``products`` says whether all products are written, or the last one alone."""
        x, residual = self.inputs(block)
        linears = (Linear * LINEARS)()
        for at, (shape, weight) in enumerate(zip(self.shapes, self.row.weights, strict=True)):
            y = self.y[block][at].data_ptr() if products or at == LINEARS - 1 else None
            linears[at] = Linear(
                *(self.x[at].data_ptr(), weight.copies[block].sparse.data_ptr(), weight.packed.scale.data_ptr()),
                *(self.sums[at].data_ptr(), y, self.scales[at].data_ptr(), self.row.gain.data_ptr()),
                *(*shape, PROLOGUES[at], self.parts[at], self.units[at]),
            )
        pointers = residual, self.mid[block], self.out[block], self.counters, self.largest
        return Chain(
            *(linears, x.data_ptr(), *(one.data_ptr() for one in pointers), self.trace.data_ptr() if traced else None),
            *(x.stride(0), self.tokens, EPS, self.flags),
        )

    def launch(self, block: int, products: bool = False, traced: bool = False) -> None:
        """Launch one block's chain on the current stream."""
        device = self.row.x.device
        stream = current_stream(device.index) if device.type == "cuda" else 0
        self.kernel.launch(self.arguments(block, products, traced), self.grid, stream)

    def __call__(self) -> list[torch.Tensor]:
        """Launch all blocks; returns the last product of each."""
        for block in range(BLOCKS):
            self.launch(block)
        return [products[-1] for products in self.y]

    # -- checks ------------------------------------------------------------------------------------------------------

    def lifted(self, at: int, values: torch.Tensor) -> torch.Tensor:
        """Return quantised values [M, K] as a linear's activations, in slabs, from its column map."""
        index = self.maps[at]
        return SLABS.arrange(torch.where(index >= 0, values[:, index.clamp(min=0)], 0).to(INT8))

    def unlifted(self, at: int) -> torch.Tensor:
        """Return the values [M, K] of which the activations that the kernel wrote are the lift."""
        index, slabs = self.maps[at], self.x[at]
        # The swizzle is its own inverse, and rows are not padded.
        chunks = slabs.view(-1, self.tokens, 8, 16)
        where = torch.arange(8, device=slabs.device) ^ (torch.arange(self.tokens, device=slabs.device) % 8).unsqueeze(1)
        flat = chunks.gather(2, where[None, :, :, None].expand_as(chunks)).transpose(0, 1).reshape(self.tokens, -1)
        values = torch.zeros(self.tokens, self.shapes[at].columns, dtype=INT8, device=slabs.device)
        values[:, index[index >= 0]] = flat[:, index >= 0]
        return values

    def check(self, block: int) -> dict[str, Any]:
        """Run one block's chain and compare everything that it wrote."""
        for tensor in (*self.x, *self.scales, *self.y[block], self.mid[block], self.out[block]):
            poison(tensor)
        self.launch(block, products=True)
        if self.row.x.is_cuda:
            torch.cuda.synchronize()
        x, residual = self.inputs(block)
        y, found = self.y[block], {}
        for at, name in enumerate(NAMES):
            if PROLOGUES[at] == NORM:
                given, new = add_rms_norm(y[at - 1][:, : self.row.hidden], residual, self.row.gain, EPS)
                residual = self.mid[block] if at == 1 else self.out[block]
                found[f"{name} residual"] = float((residual != new).float().mean())
            else:
                given = x if PROLOGUES[at] == NONE else silu_mul(y[at - 1])
            values, scale = quantize_rows(given, INT8)
            own, wanted = self.unlifted(at), self.row.weights[at].packed
            found[f"{name} slabs"] = int((self.lifted(at, own) != self.x[at]).sum())
            ratio = self.scales[at].view(-1, 1) / scale
            same = (ratio == 1).flatten()  # where the largest number rounds to its neighbour, all others may
            found[f"{name} values off"] = float((own != values)[same].float().mean()) if bool(same.any()) else 0.0
            found[f"{name} rows of that scale"] = int(same.sum())
            found[f"{name} values most"] = int((own.int() - values.int()).abs().max())
            found[f"{name} scale"] = float((ratio - 1).abs().max())
            exact = apply_scales(
                exact_product(own, wanted.unpack()), self.scales[at].view(-1, 1), wanted.scale.view(1, -1), None, BF16
            )
            found[f"{name} product"] = int((exact != y[at]).sum()) + int(y[at].isnan().sum())
        found["left in sums"] = sum(int(one.count_nonzero()) for one in self.sums)
        found["left in counters"] = int(self.counters.count_nonzero() + self.largest.count_nonzero())
        return found


def faults(found: dict[str, Any]) -> list[str]:
    """Return what is wrong of a check: lifts may differ by a rounding, products by nothing."""
    wrong = []
    for name, value in found.items():
        if name.endswith("off"):
            limit = 0.01
        elif name.endswith("rows of that scale"):
            continue
        elif name.endswith("most"):
            limit = 2  # a BF16 number may round to the other neighbour
        elif name.endswith("scale"):
            limit = 0.009  # one step of BF16
        elif name.endswith("residual"):
            limit = 1e-3
        else:
            limit = 0
        if not value <= limit:
            wrong.append(f"{name}: {value}")
    return wrong


# -- times -----------------------------------------------------------------------------------------------------------


def spans(trace: torch.Tensor, lifters: list[int]) -> dict[str, float]:
    """Return when things happened in a traced launch, in microseconds from the first block's start."""
    us = (trace - trace[:, 0].min()).double() / 1000
    found = {"starts end": float(us[:, 0].max())}
    for at, name in enumerate(NAMES):
        rows = us[: lifters[at]]
        found[f"{name} may lift"], found[f"{name} lifted"] = (
            float(rows[:, 4 * at + 1].max()),
            float(rows[:, 4 * at + 2].max()),
        )
        found[f"{name} X may come"] = float(us[:, 4 * at + 3].median())
        found[f"{name} first ends"] = float(us[:, 4 * at + 4].min())
        found[f"{name} median ends"] = float(us[:, 4 * at + 4].median())
        found[f"{name} ends"] = float(us[:, 4 * at + 4].max())
    found["all summed"], found["end"] = float(us[:, -2].max()), float(us[:, -1].max())
    return {name: round(value, 2) for name, value in found.items()}


def checked(chain: OneLaunch, block: int, about: dict[str, Any], title: str, say: Any) -> bool:
    """Check a block's chain, and say so; whether the chain may go on."""
    found = chain.check(block)
    wrong = faults(found)
    verdict = "exact, lifts within rounding" if not wrong else f"WRONG: {wrong}"
    say({"what": "check", **about, "block": block, **found}, f"{title}, block {block}: {verdict}")
    return not any("left in" in fault or "product" in fault for fault in wrong)


def run_case(pattern: str, bits: int, tokens: int, say: Any, stopwatch: CudaStopwatch) -> None:
    """Check and time one case."""
    row = Row(pattern, bits, True, tokens)
    head = {"pattern": pattern, "bits": bits, "tokens": tokens}
    stopwatch.begin()
    passes = {"product": stopwatch.prepare([row.call(PRODUCT)], True, lambda _: None)}
    theirs, kept, first = row.call(PRODUCT)()[-1].float(), [], None
    for number, shape in enumerate(SHAPES[tokens]):
        tile = fitting(shape, bits)
        kernel, grid = load_chain(tile, bits, row.weights[0].backend.layout.order(row.weights[0].packed).group)
        chain, label = OneLaunch(row, kernel, grid, ALL), f"{tile}x{tile.stages}"
        title = f"{pattern}/{bits} M={tokens} {label}, {grid} blocks, {chain.parts[2]} a row of SiLU"
        about = {**head, "tile": label, "grid": grid, "parts": chain.parts[2]}
        if not all(checked(chain, block, about, title, say) for block in (0, 1, 0)):  # counters and sums stay zeros
            continue
        ours = chain()[-1].float()
        alike = float((ours - theirs).norm() / theirs.norm())
        if first is None:
            first = chain
        chain()
        chain.launch(BLOCKS // 2, traced=True)
        torch.cuda.synchronize()
        when = spans(chain.trace, [tokens * parts for parts in chain.parts])
        say({"what": "trace", **head, "tile": label, "differs from the product's chain by": alike, "us": when},
            f"  last product differs from today's chain by {alike:.4f} of its norm; one launch, us: {when}")  # fmt: skip
        for name, flags in (
            PIECES.items() if number == 0 else ((name, PIECES[name]) for name in ("chain", "units", "all"))
        ):
            own = OneLaunch(row, kernel, grid, flags, name in UNITS)
            for at in range(LINEARS):
                own.x[at].copy_(chain.x[at])  # numbers draw power
            label = f"{name} {tile}x{tile.stages}"
            if (
                flags & LIFTS
                and flags & STEPS
                and not checked(own, 0, {**about, "name": name}, f"{title}, {name}", say)
            ):
                continue
            given: list[torch.Tensor] = []
            passes[label] = stopwatch.prepare([own], True, given.extend)
            if flags & LIFTS and flags & STEPS:
                kept.append((label, own, given, [one.clone() for one in given]))
    samples, noise = time_passes(list(passes.values()), CASE_S * len(passes) / 2)
    us = {name: round(statistics.median(one) / BLOCKS, 2) for name, one in zip(passes, samples, strict=True)}
    wrong = []
    for label, _, given, expected in kept:
        for _ in range(REPLAYS):
            poison(given)
            passes[label].launch()
            wrong += [] if all(map(torch.equal, given, expected)) else [label]
        assert first is not None
        wrong += [] if torch.equal(expected[-1], first()[-1]) else [f"{label} is not the first tile's"]
    gave_up = [label for label, own, *_ in kept if int(own.counters.count_nonzero())]
    wrong += gave_up
    eager = [name for name, one in passes.items() if one.method != "graph"]
    print(
        f"{pattern}/{bits} M={tokens}: us a block; noise {noise:.1%}" + (f"; not in a graph: {eager}" if eager else "")
    )
    for name, time_us in us.items():
        print(f"  {name:28} {time_us:7.2f}  {time_us / us['product']:.3f}", flush=True)
    say({"what": "times", **head, "noise": round(noise, 4), "us": us, "eager": eager, "wrong in replays": sorted(set(wrong))},
        f"  replays: {'the same bits' if not wrong else f'DIFFER: {sorted(set(wrong))}'}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--forms", nargs="+", default=["6:8/6", "4:6/6", "2:4/6"])
    given = parser.parse_args()
    end, machine = time.monotonic() + given.seconds, environment.machine()
    with given.file.open("w") as file, torch.inference_mode():

        def say(row: dict[str, Any], line: str) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(line, flush=True)

        head = {
            "what": __doc__.splitlines()[0],
            "gpu": machine.gpu,
            "commit": machine.commit,
            "date": str(date.today()),
        }
        say(head, str(head))
        stopwatch = CudaStopwatch()
        for form in given.forms:
            for tokens in given.tokens:
                pattern, bits = form.split("/")
                if time.monotonic() > end:
                    say({"what": "no time", "for": [form, tokens]}, f"no time for {form} M={tokens}")
                    continue
                faulthandler.dump_traceback_later(STALLED_S, exit=True)
                run_case(pattern, int(bits), tokens, say, stopwatch)
                faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
