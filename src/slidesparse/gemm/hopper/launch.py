"""Load and launch the Hopper kernel: the CUDA driver through cuda-bindings, one struct of arguments a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch

from slidesparse.errors import UnsupportedError
from slidesparse.gemm.hopper.compile import Tile, cubin

INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: a thread in which nothing has called the CUDA runtime yet."""

BIAS_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class Arguments(ctypes.Structure):
    """``struct Problem`` of the source."""

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
    )


@dataclass(frozen=True)
class Kernel:
    """A variant, loaded on a device: its handle and what a launch needs."""

    function: Any
    context: Any
    tile: Tile
    shared_bytes: int
    multiprocessors: int
    _configs: dict[tuple[int, int], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def grid(self, tiles: int) -> int:
        """Blocks of a product of so many tiles."""
        tile = self.tile  # a cluster has one tile; blocks without a cluster walk over theirs
        return min(tiles, self.multiprocessors * tile.blocks) if tile.split == 1 else tiles * tile.split

    def launch(self, arguments: Arguments, grid: int, stream: int) -> None:
        """Run ``grid`` blocks on ``stream``; the kernel's device must be the current one.

        The launch is a programmatic dependent one (CUDA programming guide, "Programmatic Dependent Launch"): where the
        kernel before it on the stream allows that, as quantise-and-lift does, the first weights are fetched while that
        one still runs. So they must have been written by an earlier kernel.
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
        """How ``grid`` blocks are launched on a stream; kept, since making it takes longer than a launch."""
        driver = _driver()
        early, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value.programmaticStreamSerializationAllowed = 1
        early.value = value
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.tile.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        config.attrs, config.numAttrs = [early], 1
        self._configs[grid, stream] = config
        return config


@cache
def load(tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype, device: int) -> Kernel:
    """The variant on a device, for the life of the process.

    Raises:
        UnsupportedError: No compiler, no driver, or a CUDA graph is being captured: loading code may synchronise.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "the Hopper kernel is not loaded yet and cannot be while a CUDA graph is captured",
            remedy="run the layer once with as many tokens before the capture",
        )
    driver, code = _driver(), cubin(tile, dtype, out_dtype)
    with torch.cuda.device(device):
        status, context = driver.cuDevicePrimaryCtxRetain(device)
        _check(status, "cuDevicePrimaryCtxRetain")
        _check(driver.cuCtxSetCurrent(context)[0], "cuCtxSetCurrent")
        status, module = driver.cuModuleLoadData(code)
        _check(status, "cuModuleLoadData")
        status, function = driver.cuModuleGetFunction(module, b"sparse_gemm")
        _check(status, "cuModuleGetFunction")
        shared = tile.shared_bytes(dtype.itemsize)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(function, attribute, shared)
        _check(status, "cuFuncSetAttribute")
    return Kernel(function, context, tile, shared, torch.cuda.get_device_properties(device).multi_processor_count)


def load_all(tiles: Iterable[Tile], dtype: torch.dtype, out_dtype: torch.dtype, device: int) -> None:
    """:func:`load` of many tiles, those that are in no cache compiled side by side.

    Raises:
        UnsupportedError: As :func:`load`.
    """
    tiles = list(tiles)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda tile: cubin(tile, dtype, out_dtype), tiles))
    for tile in tiles:
        load(tile, dtype, out_dtype, device)


@lru_cache(maxsize=1)
def driver_version() -> int:
    """CUDA's major version that the driver speaks.

    Raises:
        UnsupportedError: There are no bindings, or no driver.
    """
    driver = _driver()
    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError:
        raise UnsupportedError("the CUDA driver cannot be loaded", remedy="install the NVIDIA driver") from None
    _check(status, "cuDriverGetVersion")
    return int(version) // 1000


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise UnsupportedError("cuda-bindings is not installed", remedy="pip install 'slidesparse[cuda]'") from None
    return driver


def _check(status: Any, call: str) -> None:
    if int(status):
        raise UnsupportedError(
            f"the Hopper kernel: {call} failed",
            got=getattr(status, "name", status),
            remedy="run with CUDA_LAUNCH_BLOCKING=1 to see whether an earlier kernel is the cause",
        )
