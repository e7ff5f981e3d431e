"""Variants of a kernel: compiled, loaded and launched by the CUDA driver (cuda-bindings)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, TypeAlias

import torch

from slidesparse.base.other_libraries import need
from slidesparse.errors import UnsupportedError, first_line

AnyTile: TypeAlias = Any
"""The geometry of a variant: any with attributes and methods of :class:`slidesparse.gemm.hopper.tiles.Tile`."""

BLOCK_BYTES = 1024
"""Shared memory that the system takes for each block (CUDA programming guide, from compute capability 8.0 on)."""

INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: nothing has called the CUDA runtime in this thread yet."""


class Arguments(ctypes.Structure):
    """``struct Arguments`` of the source, field for field (tests/gemm/test_step_launch.py compares the two).

    ``dense`` and ``dense_slabs`` stay zero: no weight has dense steps.
    """

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("dense", ctypes.c_void_p),
        ("sparse", ctypes.c_void_p),
        ("scale_x", ctypes.c_void_p),
        ("scale_w", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("tokens", ctypes.c_int),
        ("channels", ctypes.c_int),
        ("dense_slabs", ctypes.c_int),
        ("sparse_slabs", ctypes.c_int),
        ("bias_type", ctypes.c_int),
        ("group", ctypes.c_int),
        ("experts", ctypes.c_void_p),
        ("used", ctypes.c_void_p),
        ("windows", ctypes.c_int),
        ("row", ctypes.c_int),
        ("band", ctypes.c_int),
    )


class Kernel:
    """A variant, loaded on a device.

    Args:
        function: ``CUfunction``.
        context: ``CUcontext`` of the device.
        tile: The variant's geometry.
        shared_bytes: Shared memory of a block.
        multiprocessors: Multiprocessors of the device.
    """

    def __init__(self, function: Any, context: Any, tile: AnyTile, shared_bytes: int, multiprocessors: int) -> None:
        self.function, self.context, self.tile = function, context, tile
        self.shared_bytes, self.multiprocessors, self._cluster = shared_bytes, multiprocessors, tile.cluster
        self._configs: dict[tuple[int, int], Any] = {}  # one for each grid and stream: few, and never dropped

    def grid(self, tiles: int) -> int:
        """Return the number of blocks of a launch over so many tiles."""
        # A cluster computes one tile; blocks without a cluster walk over several.
        blocks: int = tiles * self._cluster
        return min(blocks, self.multiprocessors * self.tile.blocks) if self._cluster == 1 else blocks

    def launch(self, arguments: Arguments, grid: int, stream: int) -> None:
        """Run ``grid`` blocks on ``stream``; the kernel's device must be the current one.

        With ``tile.early`` it is a programmatic dependent launch (CUDA programming guide, by that name): where the
        kernel before it allows that, as quantise-and-lift does, the first weights are fetched while that kernel still
        runs. So an earlier kernel must have written them.
        """
        config = self._configs.get((grid, stream)) or self._configure(grid, stream)
        # The driver copies the struct before the call returns.
        pointer = ctypes.c_void_p(ctypes.addressof(arguments))
        driver = _driver()
        launch = config, self.function, ctypes.addressof(pointer), 0
        (status,) = driver.cuLaunchKernelEx(*launch)
        if status:
            if int(status) == INVALID_CONTEXT:
                _check(driver.cuCtxSetCurrent(self.context)[0], "cuCtxSetCurrent")
                (status,) = driver.cuLaunchKernelEx(*launch)
            _check(status, "cuLaunchKernelEx")

    def _configure(self, grid: int, stream: int) -> Any:
        """Return the cached configuration of a launch, which takes longer to make than a launch."""
        driver = _driver()
        early, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value.programmaticStreamSerializationAllowed = 1
        early.value = value
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.tile.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        config.attrs, config.numAttrs = ([early], 1) if self.tile.early else ([], 0)
        self._configs[grid, stream] = config
        return config


@cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def load_kernel(
    tile: AnyTile,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    device: int,
    count_bits: int,
    value_bits: int,
    grouped: bool,
) -> Kernel:
    """Return a variant, loaded on a device, by its index, for the life of the process.

    The other arguments are those of the tile's ``compile``, all positional for the cache.

    Raises:
        UnsupportedError: No compiler, no driver, or a CUDA graph is being captured: loading code may synchronise.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a kernel is not loaded yet and cannot be while a CUDA graph is captured",
            remedy="run the layer once with as many tokens before the capture",
        )
    driver, code = _driver(), tile.compile(dtype, out_dtype, device, grouped, count_bits, value_bits)
    with torch.cuda.device(device):
        status, context = driver.cuDevicePrimaryCtxRetain(device)
        _check(status, "cuDevicePrimaryCtxRetain")
        _check(driver.cuCtxSetCurrent(context)[0], "cuCtxSetCurrent")
        status, module = driver.cuModuleLoadData(code)
        _check(status, "cuModuleLoadData")
        status, function = driver.cuModuleGetFunction(module, b"sparse_gemm")
        _check(status, "cuModuleGetFunction")
        shared = tile.shared_bytes(dtype.itemsize, count_bits, value_bits)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(function, attribute, shared)
        _check(status, "cuFuncSetAttribute")
    return Kernel(function, context, tile, shared, multiprocessors(device))


def load_kernels(
    tiles: Iterable[AnyTile],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    device: int,
    count_bits: int,
    value_bits: int,
    grouped: bool = False,
) -> None:
    """Load the variants of many tiles, with parallel compilation of those in no cache. See :func:`load_kernel`.

    Raises:
        UnsupportedError: As :func:`load_kernel`.
    """
    tiles = list(tiles)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda tile: tile.compile(dtype, out_dtype, device, grouped, count_bits, value_bits), tiles))
    for tile in tiles:
        load_kernel(tile, dtype, out_dtype, device, count_bits, value_bits, grouped)


@lru_cache(maxsize=1)
def driver_version() -> int:
    """Return the major version of CUDA that the driver supports.

    Raises:
        UnsupportedError: There are no bindings, or no driver.
    """
    driver = _driver()
    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError as error:
        what, remedy = "the CUDA driver cannot be loaded", "install the NVIDIA driver"
        raise UnsupportedError(what, got=first_line(error), remedy=remedy) from error
    _check(status, "cuDriverGetVersion")
    return int(version) // 1000


@lru_cache(maxsize=1)
def _driver() -> Any:
    return need("cuda.bindings.driver", "pip install cuda-bindings", what="cuda-bindings is not installed")


def _check(status: Any, call: str) -> None:
    if int(status):
        raise UnsupportedError(
            f"a kernel: {call} failed",
            got=getattr(status, "name", status),
            remedy="run with CUDA_LAUNCH_BLOCKING=1 to see whether an earlier kernel is the cause",
        )
