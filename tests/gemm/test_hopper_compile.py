"""The Hopper kernel compiles without spills or serialised matrix instructions, every variant: no GPU needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from slidesparse import UnsupportedError
from slidesparse.gemm import nvrtc
from slidesparse.gemm.hopper import compile as hopper_compile
from slidesparse.gemm.hopper.compile import cubin, options, sources
from slidesparse.gemm.hopper.tiles import DENSE_TILES, MULTIPROCESSOR_BYTES, TILES, Tile
from slidesparse.gemm.kernel import BLOCK_BYTES
from slidesparse.gemm.nvrtc import OUTPUTS, TYPES, compile_sources

TILE = min(TILES, key=lambda tile: tile.tokens)

SHARED_BYTES = 232448
"""Shared memory that a block can have (CUDA programming guide, compute capability 9.0: 227 KB)."""


PLAIN = [(dtype, out_dtype, 0, 8) for dtype in TYPES for out_dtype in OUTPUTS]
BUNDLES = [
    (dtype, torch.bfloat16, count_bits, 8)
    for dtype, count_bits in ((torch.int8, 3), (torch.int8, 4), (torch.float8_e4m3fn, 3))
]
SIX_BITS = [(torch.int8, out_dtype, 0, 6) for out_dtype in OUTPUTS]


def sizes_of(tile: Tile, itemsize: int, count_bits: int, value_bits: int) -> str:
    """Assertions for the end of the source: what the host takes its sizes to be."""
    barriers = "(2 * STAGES + 1) * 8"
    memory = "1024 + STAGES * STAGE_BYTES + SLOTS * SLOT_BYTES + WARPGROUPS * RESULT_BYTES + APART_BYTES"
    facts = {
        "THREADS": tile.threads,
        "TILE_BLOCKS * ROWS": tile.channels,
        "SHARE": tile.share,
        "SLOTS": tile.slots(count_bits),
        f"{memory} + {barriers}": tile.shared_bytes(itemsize, count_bits, value_bits),
    }
    return "".join(f'static_assert({name} == {value}, "");\n' for name, value in facts.items())


@pytest.mark.parametrize(("dtype", "out_dtype", "count_bits", "value_bits"), PLAIN + BUNDLES + SIX_BITS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_variant_compiles_well(
    tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype, count_bits: int, value_bits: int
) -> None:
    assert_compiles_well(tile, dtype, out_dtype, count_bits, value_bits)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("tile", DENSE_TILES, ids=str)
def test_every_dense_variant_compiles_well(tile: Tile, out_dtype: torch.dtype, grouped: bool) -> None:
    if not grouped or tile.split == 1:
        assert_compiles_well(tile, torch.int8, out_dtype, 0, 6, grouped)


def assert_compiles_well(
    tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype, count_bits: int, value_bits: int, grouped: bool = False
) -> None:
    opts = options(tile, dtype, out_dtype, grouped, count_bits, value_bits)
    files = sources(count_bits, value_bits, tile.dense)
    files[next(iter(files))] += sizes_of(tile, dtype.itemsize, count_bits, value_bits)
    code, log = compile_sources(files, [*opts, "--ptxas-options=-v"])
    assert code[:4] == b"\x7fELF"
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "C75" not in log, log  # C7508: setmaxnreg ignored; C7510 and its like: wgmma serialised
    assert "warning" not in log, log


@pytest.mark.parametrize(
    ("itemsize", "count_bits", "value_bits"), [(1, 0, 8), (2, 0, 8), (1, 3, 8), (1, 4, 8), (1, 0, 6)]
)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_shared_memory_fits(tile: Tile, itemsize: int, count_bits: int, value_bits: int) -> None:
    assert_fits(tile, itemsize, count_bits, value_bits)


@pytest.mark.parametrize("tile", DENSE_TILES, ids=str)
def test_shared_memory_fits_dense_weights(tile: Tile) -> None:
    assert_fits(tile, 1, 0, 6)


def assert_fits(tile: Tile, itemsize: int, count_bits: int, value_bits: int) -> None:
    n_bytes = tile.shared_bytes(itemsize, count_bits, value_bits)
    assert n_bytes <= SHARED_BYTES
    assert tile.blocks * (n_bytes + BLOCK_BYTES) <= MULTIPROCESSOR_BYTES


@pytest.mark.parametrize(("count_bits", "windows"), [(3, 2), (3, 3), (4, 4), (4, 5), (4, 6), (4, 7)])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_no_slot_is_filled_while_a_bundle_is_in_it(tile: Tile, count_bits: int, windows: int) -> None:
    # A range of steps may begin and end within a bundle; before each bundle, its first step and its last.
    for skipped in range(windows if tile.split > 1 else 1):
        steps = [step + skipped for step in range(10 * tile.stages)]
        bundles = [step // windows for step in steps]
        for bundle in range(tile.slots(count_bits), bundles[-1]):
            first = bundles.index(bundle)
            given_back = first - tile.stages  # the last step that all consumers are through with
            last_read = bundles.index(bundle - tile.slots(count_bits) + 1) - 1
            assert last_read <= given_back


def test_a_refused_source_is_one_line() -> None:
    with pytest.raises(UnsupportedError, match=r"nvrtcCompileProgram failed with status 6; got .*error"):
        compile_sources({"f.cu": "int f( { }"}, ["--gpu-architecture=sm_90a"])


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def _compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts compilations from here on."""
    calls: list[int] = []

    def counted(files: Mapping[str, str], opts: list[str]) -> tuple[bytes, str]:
        calls.append(1)
        return compile_sources(files, opts)

    monkeypatch.setattr(nvrtc, "compile_sources", counted)
    return calls


def test_the_second_time_comes_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _compiled(monkeypatch)
    first = cubin(TILE, torch.int8, torch.bfloat16)
    assert cubin(TILE, torch.int8, torch.bfloat16) == first
    assert len(calls) == 1
    cubin(TILE, torch.int8, torch.float16)
    assert len(calls) == 2


def test_a_changed_header_is_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _compiled(monkeypatch)
    cubin(TILE, torch.int8, torch.bfloat16)
    changed = sources()
    changed["epilogue.cuh"] += "\n// changed"
    monkeypatch.setattr(hopper_compile, "sources", lambda *_: changed)
    cubin(TILE, torch.int8, torch.bfloat16)
    assert len(calls) == 2


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None) -> None:
    calls = _compiled(monkeypatch)
    first = cubin(TILE, torch.int8, torch.bfloat16)
    (file,) = cache.rglob("*.cubin")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage is None else damage)
    assert cubin(TILE, torch.int8, torch.bfloat16) == first
    assert len(calls) == 2
    assert file.read_bytes() == data


def test_a_cache_that_cannot_be_written_is_only_slower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slidesparse").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cubin(TILE, torch.int8, torch.bfloat16)[:4] == b"\x7fELF"
