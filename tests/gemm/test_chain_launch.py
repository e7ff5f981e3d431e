"""The experiment benchmarks/decode/chain_launch compiles without spills, and its chain is right: several blocks, emulated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ptx_emulator import machine, values
from ptx_emulator.machine import Machine
from ptx_emulator.operands import address_of, value_of
from ptx_emulator.program import Statement, read_program
from ptx_emulator.state import LANES, GlobalMemory, Group, Step, Warp

from slidesparse.gemm.hopper.backend import Hopper, HopperSixBits
from slidesparse.gemm.hopper.compile import compile_sources
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.prune import prune_mask
from slidesparse.weights.packing import pack_weight

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[2] / "bench" / "src"))

from decode import chain_launch
from decode.chain_launch import (
    ALL,
    EARLY,
    FURTHER,
    REST,
    SHAPES,
    OneLaunch,
    chain_options,
    chain_sources,
    faults,
    fitting,
    shared_bytes,
)

HIDDEN, MLP, QKV, TOKENS, GRID = 256, 512, 384, 8, 17


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group"), [(6, 8), (6, 6), (6, 4), (8, 8)])
@pytest.mark.parametrize("tile", [tile for tiles in SHAPES.values() for tile in tiles], ids=str)
def test_it_compiles_well(tile: Tile, bits: int, group: int) -> None:
    _, log = compile_sources(chain_sources(bits), chain_options(fitting(tile, bits), bits, group))
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "C75" not in log, log
    assert "warning" not in log, log


# -- what the emulator does not know ----------------------------------------------------------------------------------


def _add(machine: Machine, statement: Statement) -> Step:
    """red and atom, add of 32 bits: lane by lane, since two may have one address."""
    returns = statement.name.startswith("atom")
    place, number = statement.operands[1:] if returns else statement.operands
    address, value = address_of(place), value_of(number, "u32")

    def add(warp: Warp, group: Group) -> None:
        found = np.zeros(LANES, np.uint32)
        lanes = np.flatnonzero(group.lanes)
        machine.events += 1
        for lane, at in zip(lanes, address(warp, group.lanes), strict=True):
            array, offsets = machine.memory.at(np.array([at]), 4)
            word = array[int(offsets[0]) : int(offsets[0]) + 4].view(np.uint32)
            found[lane] = word[0]
            with np.errstate(over="ignore"):
                word += value(warp)[lane]
        if returns:
            warp.write(statement.operands[0], found, group.lanes)

    return add


def _shuffle(machine: Machine, statement: Statement) -> Step:
    """shfl.sync.bfly of a whole warp."""
    target = statement.operands[0].partition("|")[0]
    source, by = value_of(statement.operands[1], "b32"), value_of(statement.operands[2], "u32")

    def shuffle(warp: Warp, group: Group) -> None:
        assert group.lanes.all()
        warp.write(target, source(warp)[np.arange(LANES) ^ int(by(warp)[0])], group.lanes)

    return shuffle


def _nothing(machine: Machine, statement: Statement) -> Step:
    return lambda warp, group: None


def _permuted(a: np.ndarray, b: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    data = b.astype(np.uint64) << np.uint64(32) | a
    found = np.zeros_like(a)
    for i in range(4):
        nibble = chosen >> np.uint32(4 * i) & np.uint32(7)
        found |= (data >> (nibble.astype(np.uint64) * np.uint64(8)) & np.uint64(255)).astype(np.uint32) << np.uint32(
            8 * i
        )
    return found


MORE: dict[str, tuple[Any, Callable[..., np.ndarray]]] = {
    "abs.f32": ("f32", np.abs),
    "max.f32": ("f32", np.fmax),
    "div.rn.f32": ("f32", lambda a, b: np.where(b == 0, 0, a / np.where(b == 0, 1, b)).astype(np.float32)),
    "sqrt.rn.f32": ("f32", np.sqrt),
    "ex2.approx.ftz.f32": ("f32", np.exp2),
    "rcp.approx.ftz.f32": ("f32", lambda a: (1 / a).astype(np.float32)),
    "cvt.rni.s32.f32": ("f32", lambda a: np.rint(a).astype(np.int32)),
    "cvt.rn.f32.s32": ("s32", lambda a: a.astype(np.float32)),
    "prmt.b32": ("u32", _permuted),
}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for start, make in (("red.", _add), ("atom.", _add), ("shfl", _shuffle), ("membar", _nothing)):
        monkeypatch.setitem(machine.CONTROL, start, make)
    monkeypatch.setattr(
        machine, "CONTROL", {"cp.async.bulk.prefetch": _nothing, "nanosleep": _nothing, **machine.CONTROL}
    )
    monkeypatch.setitem(values.TYPES, "u8", np.uint8)
    before = values.function_of
    monkeypatch.setattr(machine, "function_of", lambda name: MORE.get(name) or before(name))
    for name, function in (
        ("and", np.logical_and),
        ("or", np.logical_or),
        ("xor", np.logical_xor),
        ("not", np.logical_not),
    ):
        old = values.SAME_TYPE[name]
        by_kind = lambda *x, old=old, function=function: function(*x) if x[0].dtype == np.bool_ else old(*x)  # noqa: E731
        monkeypatch.setitem(values.SAME_TYPE, name, by_kind)


# -- a small block ----------------------------------------------------------------------------------------------------


class Emulated:
    """The kernel, as :class:`slidesparse.gemm.hopper.kernel.Kernel` is used; all blocks run at once."""

    def __init__(self, tile: Tile, bits: int, group: int, memory: GlobalMemory, seed: int) -> None:
        from cuda.bindings import nvrtc

        opts = [
            one.replace("sm_90a", "compute_90a").encode()
            for one in chain_options(tile, bits, group)
            if "ptxas" not in one
        ]
        (name, source), *headers = [(one.encode(), text.encode()) for one, text in chain_sources(bits).items()]
        texts, names = [text for _, text in headers], [one for one, _ in headers]
        _, made = nvrtc.nvrtcCreateProgram(source, name, len(headers), texts, names)
        (status,) = nvrtc.nvrtcCompileProgram(made, len(opts), opts)
        assert int(status) == 0
        _, size = nvrtc.nvrtcGetPTXSize(made)
        text = bytes(size)
        nvrtc.nvrtcGetPTX(made, text)
        nvrtc.nvrtcDestroyProgram(made)
        self.tile, self.bits, self.memory, self.seed = tile, bits, memory, seed
        self.program = read_program(text.decode())

    def launch(self, arguments: Any, grid: int, stream: int) -> None:
        Machine(
            self.program,
            bytes(arguments),
            self.memory,
            threads=self.tile.threads,
            shared_bytes=shared_bytes(self.tile, self.bits),
            grid=grid,
            cluster=grid,
            seed=self.seed,
        ).run()


def small_row(pattern: str, bits: int) -> Any:
    """The linears of a small block, as :class:`decode.linears.Row` has them."""
    torch.manual_seed(3)
    backend = HopperSixBits() if bits == 6 else Hopper()
    weights = []
    for out, columns in ((HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP), (QKV, HIDDEN)):
        weight = torch.randn(out, columns) * columns**-0.5
        weight = torch.where(prune_mask(weight, pattern), weight, 0)
        packed = pack_weight(weight, pattern, torch.int8, "6bit" if bits == 6 else "absmax")
        operand = backend.prepare(packed)
        weights.append(SimpleNamespace(out=out, columns=columns, backend=backend, packed=packed, copies=[operand] * 2))
    x, residual = (torch.randn(TOKENS, HIDDEN).bfloat16() for _ in range(2))
    return SimpleNamespace(
        weights=weights, x=x, residual=residual, gain=torch.rand(HIDDEN).bfloat16() + 0.5, hidden=HIDDEN
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "bits", "row_blocks", "flags"),
    [("6:8", 6, 1, ALL), ("4:6", 6, 2, ALL & ~chain_launch.AHEAD), ("2:4", 8, 1, ALL | EARLY | FURTHER | REST)],
)
def test_a_chain_is_right(
    pattern: str, bits: int, row_blocks: int, flags: int, known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_launch, "BLOCKS", 2)
    row, memory = small_row(pattern, bits), GlobalMemory()
    tile = Tile(16, 1, row_blocks, stages=4, blocks=3)
    for weight in row.weights:
        memory.add(weight.copies[0].sparse)
        memory.add(weight.packed.scale)
    chain = OneLaunch(
        row,
        Emulated(tile, bits, row.weights[0].backend.layout.order(row.weights[0].packed).group, memory, 1),
        GRID,
        flags,
    )
    for tensor in (
        row.x,
        row.residual,
        row.gain,
        *chain.x,
        *chain.scales,
        *chain.sums,
        *chain.mid,
        *chain.out,
        chain.counters,
    ):
        memory.add(tensor)
    for tensor in (chain.largest, *(y for some in chain.y for y in some)):
        memory.add(tensor)
    for block in (0, 1, 0):
        found = chain.check(block)
        assert not faults(found), found
    assert chain.parts[2] > 1
