"""What the driver is told of a launch of the Hopper kernel: cuda-bindings' own structs, and a driver that listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slidesparse import UnsupportedError
from slidesparse.gemm.hopper import launch as hopper_launch
from slidesparse.gemm.hopper.compile import Tile
from slidesparse.gemm.hopper.launch import INVALID_CONTEXT, Arguments, Kernel

driver = pytest.importorskip("cuda.bindings.driver")

PLAIN = Tile(tokens=192, warpgroups=2, row_blocks=2, stages=4)
SPLIT = Tile(tokens=64, warpgroups=1, row_blocks=1, stages=7, split=2, blocks=2)
STREAM = 4096


class Listener:
    """``answers`` are the status of one launch after another."""

    def __init__(self, *answers: int) -> None:
        self.answers, self.launches, self.contexts = list(answers), [], []
        structs = ("CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchAttributeValue", "CUlaunchConfig")
        self.driver = SimpleNamespace(
            cuLaunchKernelEx=self.launch, cuCtxSetCurrent=self.set_context, **{n: getattr(driver, n) for n in structs}
        )

    def launch(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[int]:
        assert parameters
        assert extra == 0
        self.launches.append((config, function))
        return (self.answers.pop(0) if self.answers else 0,)

    def set_context(self, context: Any) -> tuple[int]:
        self.contexts.append(context)
        return (0,)


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(*answers: int) -> Listener:
        listener = Listener(*answers)
        monkeypatch.setattr(hopper_launch, "_driver", lambda: listener.driver)
        return listener

    return start


def kernel(tile: Tile) -> Kernel:
    return Kernel("function", "context", tile, tile.shared_bytes(1), multiprocessors=132)


@pytest.mark.parametrize(
    ("tile", "tiles", "grid"), [(PLAIN, 7, 7), (PLAIN, 1000, 132), (SPLIT, 7, 14), (SPLIT, 500, 1000)]
)
def test_a_launch_may_start_before_the_kernel_before_it_has_ended(
    listen: Any, tile: Tile, tiles: int, grid: int
) -> None:
    listener, loaded = listen(), kernel(tile)
    loaded.launch(Arguments(), loaded.grid(tiles), STREAM)
    ((config, function),) = listener.launches
    assert function == "function"
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (grid, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (tile.threads, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream)) == (tile.shared_bytes(1), STREAM)
    (attribute,) = config.attrs[: config.numAttrs]
    assert attribute.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_what_a_launch_is_told_is_kept_for_each_grid_and_stream(listen: Any) -> None:
    listener, loaded = listen(), kernel(PLAIN)
    for tiles, stream in ((7, 0), (7, 0), (1000, 0), (2000, 0), (7, STREAM)):
        loaded.launch(Arguments(), loaded.grid(tiles), stream)
    first, again, most, more, elsewhere = (config for config, _ in listener.launches)
    assert first is again
    assert most is more
    assert len({id(config) for config in (first, most, elsewhere)}) == 3
    kernel(PLAIN).launch(Arguments(), 7, 0)
    assert listener.launches[-1][0] is not first  # another kernel keeps its own


def test_a_thread_without_a_context_gets_the_kernels(listen: Any) -> None:
    listener = listen(INVALID_CONTEXT)
    kernel(PLAIN).launch(Arguments(), 7, STREAM)
    assert listener.contexts == ["context"]
    assert len(listener.launches) == 2


def test_a_launch_that_fails_says_so(listen: Any) -> None:
    listen(700)
    with pytest.raises(UnsupportedError, match="cuLaunchKernelEx failed"):
        kernel(PLAIN).launch(Arguments(), 7, STREAM)
