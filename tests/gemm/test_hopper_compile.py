"""The Hopper kernel compiles without spills or serialised matrix instructions, every variant: no GPU needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slidesparse import UnsupportedError
from slidesparse.gemm.hopper import compile as hopper_compile
from slidesparse.gemm.hopper.compile import OUTPUTS, SOURCE, TYPES, compile_source, cubin, options
from slidesparse.gemm.hopper.tiles import BLOCK_BYTES, MULTIPROCESSOR_BYTES, SHARED_BYTES, TILES, Tile

TILE = min(TILES, key=lambda tile: tile.tokens)


@pytest.mark.parametrize("out_dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_variant_compiles_well(tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    code, log = compile_source(SOURCE.read_bytes(), [*options(tile, dtype, out_dtype), "--ptxas-options=-v"])
    assert code[:4] == b"\x7fELF"
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "C75" not in log, log  # C7508: setmaxnreg ignored; C7510 and its like: wgmma serialised
    assert "warning" not in log, log


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_shared_memory_fits(tile: Tile, dtype: torch.dtype) -> None:
    assert tile.shared_bytes(dtype.itemsize) <= SHARED_BYTES
    assert tile.blocks * (tile.shared_bytes(dtype.itemsize) + BLOCK_BYTES) <= MULTIPROCESSOR_BYTES


def test_a_refused_source_is_one_line() -> None:
    with pytest.raises(UnsupportedError, match=r"nvrtcCompileProgram failed with status 6; got .*error") as caught:
        compile_source(b"int f( { }", ["--gpu-architecture=sm_90a"])
    assert "\n" not in str(caught.value)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def _compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts compilations from here on."""
    calls: list[int] = []

    def counted(source: bytes, opts: list[str]) -> tuple[bytes, str]:
        calls.append(1)
        return compile_source(source, opts)

    monkeypatch.setattr(hopper_compile, "compile_source", counted)
    return calls


def test_the_second_time_comes_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _compiled(monkeypatch)
    first = cubin(TILE, torch.int8, torch.bfloat16)
    assert cubin(TILE, torch.int8, torch.bfloat16) == first
    assert len(calls) == 1
    cubin(TILE, torch.int8, torch.float16)
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
