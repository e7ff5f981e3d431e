"""Load and launch the Hopper kernel by the CUDA driver (cuda-bindings), with one struct of arguments a launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from slidesparse.base.torch_private import current_stream
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.hopper.compile import OUTPUTS, cubin
from slidesparse.gemm.hopper.tiles import GROUP, Band, Tile, choose_bands
from slidesparse.gemm.hopper.weights import SLABS, TILE_ROWS, VALUE_BYTES, SparseForm
from slidesparse.lifting.layout import SLAB_BYTES

INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: nothing has called the CUDA runtime in this thread yet."""

BIAS_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class Arguments(ctypes.Structure):
    """``struct Arguments`` of the source, field for field (tests/gemm/test_hopper_launch.py compares the two)."""

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


class WeightAddresses(NamedTuple):
    """The addresses of a weight that a launch reads, in the order of :class:`Arguments`.

    Attributes:
        dense: Address of the dense segment.
        sparse: Address of the 2:4 segment.
        scale: Address of the weight's scales, float32 [out]; None without.
        bias: Address of the bias [out]; None without.
        bias_type: Number of its type in :data:`BIAS_TYPES`; 0 without a bias.
    """

    dense: int
    sparse: int
    scale: int | None
    bias: int | None
    bias_type: int


class Kernel:
    """A variant that is loaded on a device.

    Args:
        function: ``CUfunction``.
        context: ``CUcontext`` of the device.
        tile: The variant's geometry.
        shared_bytes: Shared memory of a block.
        multiprocessors: Multiprocessors of the device.
    """

    def __init__(self, function: Any, context: Any, tile: Tile, shared_bytes: int, multiprocessors: int) -> None:
        self.function, self.context, self.tile = function, context, tile
        self.shared_bytes, self.multiprocessors = shared_bytes, multiprocessors
        self._configs: dict[tuple[int, int], Any] = {}  # one for each grid and stream: few, and never dropped

    def grid(self, tiles: int) -> int:
        """Return the blocks of a launch over this many tiles."""
        tile = self.tile  # a cluster computes one tile; blocks without a cluster walk over several
        return min(tiles, self.multiprocessors * tile.blocks) if tile.split == 1 else tiles * tile.split

    def launch(self, arguments: Arguments, grid: int, stream: int) -> None:
        """Run ``grid`` blocks on ``stream``; the kernel's device must be the current one.

        The launch is a programmatic dependent one (CUDA programming guide, "Programmatic Dependent Launch"): where the
        kernel before it on the stream allows that, as quantise-and-lift does, the first weights are fetched while that
        kernel still runs. So an earlier kernel must have written the weights.
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
        """Return the configuration of a launch, and keep it: making it takes longer than a launch."""
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


WHOLE, LEADING, FOLLOWING = range(3)
"""``enum Band`` of the source."""


class BandLaunch(NamedTuple):
    """A launch of a product, or of a band of it.

    Attributes:
        kernel: The variant.
        grid: Its blocks.
        sizes: The numbers in the arguments.
        start: The first channel, a multiple of :data:`TILE_ROWS`.
        row_bytes: Bytes of :data:`TILE_ROWS` channels in the dense and in the 2:4 segment.
    """

    kernel: Kernel
    grid: int
    sizes: Arguments
    start: int
    row_bytes: tuple[int, int]

    def weight(self, whole: WeightAddresses) -> WeightAddresses:
        """Return the addresses of this band of a weight."""
        tiles, (dense, sparse) = self.start // TILE_ROWS, self.row_bytes
        bias_bytes = 4 if whole.bias_type == BIAS_TYPES[torch.float32] else 2
        return WeightAddresses(
            whole.dense + tiles * dense,
            whole.sparse + tiles * sparse,
            None if whole.scale is None else whole.scale + 4 * self.start,
            None if whole.bias is None else whole.bias + bias_bytes * self.start,
            whole.bias_type,
        )


class GemmLaunch:
    """Everything about a product's launches that follows from its sizes: variants, grids and numbers in the arguments.

    Args:
        bands: The tiles, and the channels of each; none where there is nothing to compute.
        types: What :func:`load_kernel` takes besides the tile.
        sizes: The numbers of the whole product.
        slab_bytes: See below.
        row_bytes: See :class:`BandLaunch`.

    Attributes:
        bands: The launches.
        slab_bytes: Bytes of the activations.

    Raises:
        UnsupportedError: See :func:`load_kernel`.
    """

    __slots__ = ("_row_bytes", "_sizes", "_types", "bands", "slab_bytes")

    def __init__(
        self,
        bands: Sequence[Band],
        types: tuple[torch.dtype, torch.dtype, int, int, int],
        sizes: Arguments,
        slab_bytes: int,
        row_bytes: tuple[int, int],
    ) -> None:
        self.slab_bytes, self._types, self._sizes, self._row_bytes = slab_bytes, types, sizes, row_bytes
        self.bands: list[BandLaunch] = []
        start = 0
        for tile, channels in bands:
            own, kernel = Arguments.from_buffer_copy(sizes), load_kernel(tile, *types)
            own.channels, own.row = channels, sizes.channels
            own.band = WHOLE if len(bands) == 1 else FOLLOWING if start else LEADING
            grid = kernel.grid(kernel.tile.count(sizes.tokens, channels))
            self.bands.append(BandLaunch(kernel, grid, own, start, row_bytes))
            start += channels

    def for_tokens(self, tokens: int) -> GemmLaunch:
        """Return the launch of the same weight for another number of tokens, 1 or more, with the fastest tile for it.

        Raises:
            UnsupportedError: See :func:`load_kernel`.
        """
        sizes = Arguments.from_buffer_copy(self._sizes)
        sizes.tokens, slabs = tokens, (sizes.sparse_slabs, sizes.dense_slabs)
        slab_bytes = SLABS.padded(tokens) * SLAB_BYTES * sum(slabs)
        bands = choose_bands(tokens, sizes.channels, *slabs, multiprocessors(self._types[2])) if sizes.channels else ()
        return GemmLaunch(bands, self._types, sizes, slab_bytes, self._row_bytes)

    def launch(self, x: int, scale_x: int | None, weight: WeightAddresses, y: int) -> None:
        """Multiply on the current stream of the device, which must be the current one; nothing is checked here.

        Args:
            x: Address of the activations, ``slab_bytes`` bytes.
            scale_x: Address of their scales, float32 [M]; None without.
            weight: Addresses of the weight.
            y: Address of memory for the product [M, out], of the variant's output type.
        """
        for band in self.bands:
            own = band.weight(weight) if band.start else weight
            arguments = Arguments.from_buffer_copy(band.sizes)
            arguments.x, arguments.scale_x, arguments.y = x, scale_x, y + band.start * self._types[1].itemsize
            arguments.dense, arguments.sparse, arguments.scale_w, arguments.bias, arguments.bias_type = own
            band.kernel.launch(arguments, band.grid, current_stream(self._types[2]))


def find_launch(
    activations: torch.Size,
    dtype: torch.dtype,
    dense: torch.Size,
    sparse: torch.Size,
    out_features: int,
    out_dtype: torch.dtype,
    device: int,
    tile: Tile | tuple[Band, ...] | None = None,
) -> GemmLaunch:
    """Return the launch of a product, kept from one call to the next.

    Args:
        activations: [M, K'].
        dtype: Their type, and the weight's.
        dense: Shape of the steps of the dense segment (gemm/hopper/weights.py).
        sparse: Shape of the steps of the 2:4 segment.
        out_features: Rows of the weight.
        out_dtype: bfloat16, float16 or float32.
        device: Index of the CUDA device.
        tile: The tile, or those of two bands; None for the fastest by
            :func:`slidesparse.gemm.hopper.tiles.choose_bands`.

    Raises:
        InputError: The sizes do not fit each other, or there is no such output.
        UnsupportedError: See :func:`load_kernel`.
    """
    if tile is None:
        slabs = SparseForm.of(sparse).slabs, dense[1] // 2
        bands = choose_bands(activations[0], out_features, *slabs, multiprocessors(device))
    else:
        bands = (Band(tile, out_features),) if isinstance(tile, Tile) else tile
    return _launch(activations, dtype, dense, sparse, out_features, out_dtype, device, bands)


@lru_cache(maxsize=1 << 13)
def _launch(
    activations: torch.Size,
    dtype: torch.dtype,
    dense: torch.Size,
    sparse: torch.Size,
    out_features: int,
    out_dtype: torch.dtype,
    device: int,
    bands: tuple[Band, ...],
) -> GemmLaunch:
    tokens, form, dense_slabs = activations[0], SparseForm.of(sparse), dense[1] // 2
    if out_dtype not in OUTPUTS:
        raise InputError("output type of the Hopper kernel", got=out_dtype, needed="bfloat16, float16 or float32")
    columns = SLAB_BYTES // dtype.itemsize * (form.slabs + dense_slabs)
    fits = activations[1] == columns and sparse[1:] == form.shape(out_features, dtype.itemsize)[1:]
    fits &= dense[3] == VALUE_BYTES  # of the other segment it has another length, but for values of six bits
    if not fits or out_features > TILE_ROWS * sparse[0]:
        raise InputError(
            f"activations {list(activations)} {dtype} for {out_features} outputs",
            needed=f"{columns} columns, at most {TILE_ROWS * sparse[0]} outputs, as the weight was prepared",
            remedy="quantise and lift with this weight's own columns",
        )
    slab_bytes = math.prod(SLABS.shape(tokens, columns, dtype.itemsize)) * dtype.itemsize
    numbers = {"dense_slabs": dense_slabs, "sparse_slabs": form.slabs, "windows": form.windows}
    sizes = Arguments(tokens=tokens, channels=out_features, group=GROUP, **numbers)
    types = dtype, out_dtype, device, form.field, form.width
    row_bytes = math.prod(dense[1:]), math.prod(sparse[1:])
    return GemmLaunch(bands if tokens and out_features else (), types, sizes, slab_bytes, row_bytes)


@cache
def multiprocessors(device: int) -> int:
    """Return the multiprocessors of a CUDA device, by which tiles are chosen."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def load_kernel(tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype, device: int, field: int, width: int) -> Kernel:
    """Return the variant, loaded on a device for the life of the process.

    Args:
        tile: The geometry.
        dtype: Type of weights and activations.
        out_dtype: Type of the product.
        device: Index of the CUDA device.
        field: Bits of a count, for weights in bundles (:mod:`slidesparse.gemm.hopper.weights`); 0 for all others.
        width: Bits of a kept value in memory.

    Raises:
        UnsupportedError: No compiler, no driver, or a CUDA graph is being captured: loading code may synchronise.
    """
    return _load(tile, dtype, out_dtype, device, field, width, False)


@cache
def load_grouped(tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype, device: int, field: int, width: int) -> Kernel:
    """Return the variant for the weights of many experts; see :func:`load_kernel`."""
    return _load(tile, dtype, out_dtype, device, field, width, True)


def _load(
    tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype, device: int, field: int, width: int, grouped: bool
) -> Kernel:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "the Hopper kernel is not loaded yet and cannot be while a CUDA graph is captured",
            remedy="run the layer once with as many tokens before the capture",
        )
    driver, code = _driver(), cubin(tile, dtype, out_dtype, grouped, field, width)
    with torch.cuda.device(device):
        status, context = driver.cuDevicePrimaryCtxRetain(device)
        _check(status, "cuDevicePrimaryCtxRetain")
        _check(driver.cuCtxSetCurrent(context)[0], "cuCtxSetCurrent")
        status, module = driver.cuModuleLoadData(code)
        _check(status, "cuModuleLoadData")
        status, function = driver.cuModuleGetFunction(module, b"sparse_gemm")
        _check(status, "cuModuleGetFunction")
        shared = tile.shared_bytes(dtype.itemsize, field, width)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(function, attribute, shared)
        _check(status, "cuFuncSetAttribute")
    return Kernel(function, context, tile, shared, multiprocessors(device))


def load_kernels(
    tiles: Iterable[Tile],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    device: int,
    field: int,
    width: int,
    grouped: bool = False,
) -> None:
    """Load the variants of many tiles; those that no cache holds are compiled in parallel. See :func:`load_kernel`.

    Raises:
        UnsupportedError: As :func:`load_kernel`.
    """
    tiles = list(tiles)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda tile: cubin(tile, dtype, out_dtype, grouped, field, width), tiles))
    load = load_grouped if grouped else load_kernel  # called as launches call them, or the caches would not know it
    for tile in tiles:
        load(tile, dtype, out_dtype, device, field, width)


@lru_cache(maxsize=1)
def driver_version() -> int:
    """Return the major version of CUDA that the driver supports.

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
