"""Plans and compressed matrices of cuSPARSELt: objects that every call uses."""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch

from slidesparse.base.torch_private import current_stream, empty
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.cusparselt import api

PLANS = 2048
"""Most cached plans, of some kilobytes each. A model has few shapes, a shape 143 buckets to 65536 tokens."""

ALIGNMENT = 16
DEFAULT, SEARCHED_ROWS = -1, 2048
"""The library's own choice of an algorithm; most rows of a search, which bound its memory and time."""

ACCUMULATORS = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.float32}
"""Type of operands -> type of the GEMM's output. 16-bit operands have an output of their own type, rounded once."""

METADATA_TILE = 2048
"""Bytes added to compressed matrices. Where K' is no multiple of 128, an INT8 kernel of 0.8.0 reads the metadata of a
whole 128x128 tile, past the size that cusparseLtSpMMACompressedSize2 asks for (512 bytes past it at out = 128,
K' = 448: compute-sanitizer)."""


def device_index(device: torch.device) -> int:
    """Return the index of a CUDA device; of the current one for ``cuda``."""
    return torch.cuda.current_device() if device.index is None else device.index


@lru_cache(maxsize=64)
def handle_of(device: int) -> api.Structure:
    """Return the library's context on a device, for the life of the process."""
    handle = api.Structure()
    with torch.cuda.device(device):
        torch.cuda.init()
        api.load_library().call("cusparseLtInit", handle.address)
    return handle


class Shape(NamedTuple):
    """The shape of a GEMM and its plan.

    Attributes:
        device: CUDA device index.
        out: Rows of the weight, padded.
        columns: Columns K', padded.
        rows: Rows of the activations, padded.
        dtype: Type of the operands.
    """

    device: int
    out: int
    columns: int
    rows: int
    dtype: torch.dtype

    @property
    def accumulator(self) -> torch.dtype:
        """Type of the product."""
        return ACCUMULATORS.get(self.dtype, self.dtype)


class MatmulPlan:
    """A GEMM of a shape, ready to run by an algorithm of the library.

    Attributes:
        workspace: Bytes of device memory of a run.

    Raises:
        UnsupportedError: The library has no such kernel, or a CUDA graph is being captured: making a plan may allocate
            and load code.
    """

    def __init__(self, shape: Shape, algorithm: int = DEFAULT) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"cuSPARSELt has no plan for {shape.rows} rows yet and cannot make one while a CUDA graph is captured",
                remedy="run the layer once with as many tokens before the capture",
            )
        self._library, self._handle = api.load_library(), handle_of(shape.device)
        self._structures: list[tuple[str | None, api.Structure]] = []
        # The structures are destroyed with the plan, even if making one of them fails.
        self._end = weakref.finalize(self, _destroy, self._library, self._structures)
        self._end.atexit = False
        with torch.cuda.device(shape.device):
            self._make(shape, algorithm)

    def _make(self, shape: Shape, algorithm: int) -> None:
        handle, call, kind = self._handle.address, self._library.call, api.COMPUTE_TYPES[shape.dtype]
        operand, product = api.CUDA_TYPES[shape.dtype], api.CUDA_TYPES[shape.accumulator]

        weight = self._new("cusparseLtMatDescriptorDestroy")
        _describe_weight(weight, self._handle, shape.out, shape.columns, shape.dtype)
        x = self._new("cusparseLtMatDescriptorDestroy")
        where = (shape.columns, shape.rows, shape.columns, ALIGNMENT, operand, api.ORDER_COLUMN)
        call("cusparseLtDenseDescriptorInit", handle, x, *where)
        y = self._new("cusparseLtMatDescriptorDestroy")
        where = (shape.out, shape.rows, shape.out, ALIGNMENT, product, api.ORDER_COLUMN)
        call("cusparseLtDenseDescriptorInit", handle, y, *where)

        matmul = self._new(None)
        call("cusparseLtMatmulDescriptorInit", handle, matmul, api.TRANSPOSE, api.NON_TRANSPOSE, weight, x, y, y, kind)
        selection, number = self._new("cusparseLtMatmulAlgSelectionDestroy"), ctypes.c_int(algorithm)
        call("cusparseLtMatmulAlgSelectionInit", handle, selection, matmul, api.ALG_DEFAULT)
        if algorithm != DEFAULT:
            call("cusparseLtMatmulAlgSetAttribute", handle, selection, api.ALG_CONFIG_ID, ctypes.byref(number), 4)
        call("cusparseLtMatmulAlgGetAttribute", handle, selection, api.ALG_CONFIG_MAX_ID, ctypes.byref(number), 4)
        self.algorithm, self.algorithms = algorithm, number.value

        self._plan = self._new("cusparseLtMatmulPlanDestroy")
        call("cusparseLtMatmulPlanInit", handle, self._plan, matmul, selection)
        workspace = ctypes.c_size_t()
        call("cusparseLtMatmulGetWorkspace", handle, self._plan, ctypes.byref(workspace))
        self.workspace = workspace.value
        self._matmul = self._library.functions.cusparseLtMatmul

    def _new(self, destroy: str | None) -> int:
        structure = api.Structure()
        self._structures.append((destroy, structure))
        return structure.address

    def run(self, weight: torch.Tensor, x_pointer: int, y: torch.Tensor, *, accumulate: bool = False) -> None:
        """Compute ``y = x @ W^T`` on the current device and stream, or ``y += x @ W^T`` in float32 with ``accumulate``.

        ``weight`` is from :func:`compress_matrix`; ``x_pointer`` is a multiple of 16; ``y`` [rows, out] is contiguous.
        """
        # Alive until the GEMM is queued: another thread may allocate for this stream. From then on torch's allocator
        # reuses this memory on this stream only after the GEMM, and keeps it for a captured graph.
        workspace = empty(1, self.workspace, torch.uint8, y.get_device()) if self.workspace else None
        stream, pointer = ctypes.c_void_p(current_stream(y.get_device())), y.data_ptr()
        beta = _ONE_POINTER if accumulate else _ZERO_POINTER
        operands = _ONE_POINTER, weight.data_ptr(), x_pointer, beta, pointer, pointer
        memory = None if workspace is None else workspace.data_ptr()
        status = self._matmul(self._handle.address, self._plan, *operands, memory, ctypes.byref(stream), 1)
        if status:
            self._library.check(status, "cusparseLtMatmul")


_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)
_ONE_POINTER, _ZERO_POINTER = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)


def _destroy(library: api.Library, structures: list[tuple[str | None, api.Structure]]) -> None:
    for destroy, structure in reversed(structures):
        if destroy is not None:
            getattr(library.functions, destroy)(structure.address)


def _describe_weight(descriptor: int, handle: api.Structure, out: int, columns: int, dtype: torch.dtype) -> None:
    where = (columns, out, columns, ALIGNMENT, api.CUDA_TYPES[dtype], api.ORDER_COLUMN, api.SPARSITY_50_PERCENT)
    api.load_library().call("cusparseLtStructuredDescriptorInit", handle.address, descriptor, *where)


@lru_cache(maxsize=PLANS)
def plan_for(shape: Shape, algorithm: int = DEFAULT) -> MatmulPlan:
    """Return the plan of a shape."""
    return MatmulPlan(shape, algorithm)


_ALGORITHMS: dict[Shape, int] = {}
_SEARCHING = threading.RLock()


def algorithm_of(shape: Shape, weight: torch.Tensor) -> int:
    """Return the fastest algorithm of a shape, found with the first compressed weight; the default in a capture."""
    with _SEARCHING:
        if shape not in _ALGORITHMS and not torch.cuda.is_current_stream_capturing():
            _ALGORITHMS[shape] = DEFAULT
            with suppress(UnsupportedError, torch.OutOfMemoryError):
                _ALGORITHMS[shape] = _fastest(shape, weight)
        return _ALGORITHMS.get(shape, DEFAULT)


def _fastest(shape: Shape, weight: torch.Tensor) -> int:
    # A search takes tens of milliseconds, and a weight has 143 buckets. So only powers of two up to SEARCHED_ROWS try
    # every algorithm. Other buckets try that of the next power; larger ones take it, since their outputs are large.
    default, searched = MatmulPlan(shape), shape._replace(rows=min(1 << (shape.rows - 1).bit_length(), SEARCHED_ROWS))
    tried = range(default.algorithms) if searched == shape else [algorithm_of(searched, weight)]
    if shape.rows > SEARCHED_ROWS:
        return MatmulPlan(shape, tried[0]).algorithm
    # Not the caller's activations: they may be zeros, or end in memory that holds NaN.
    x = empty(shape.rows, shape.columns, torch.bfloat16, shape.device)
    x = x.random_(-127, 128, generator=torch.Generator(weight.device)).to(shape.dtype)
    y, expected = (empty(shape.rows, shape.out, shape.accumulator, shape.device) for _ in range(2))
    best, least = DEFAULT, 0.97 * _least_ms(default, weight, x, expected)
    allowed = 0 if y.dtype == torch.int32 else 2.0**-8 * float(expected.abs().max())  # sums differ in their order
    for number in tried:
        with suppress(UnsupportedError):  # the library has no such kernel
            time = _least_ms(MatmulPlan(shape, number), weight, x, y.fill_(1))
            if time < least and y.sub_(expected).abs_().max() <= allowed:  # outputs have hundreds of megabytes
                best, least = number, time
    return best


def _least_ms(plan: MatmulPlan, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> float:
    # Between layers the weight has left the L2. Writing 64 MiB does that too, and lets the host run ahead of the GPU.
    other = empty(1 << 10, 1 << 16, torch.uint8, y.get_device())
    runs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(4)]
    for start, end in runs:
        for _ in range(4):
            other.zero_()
        start.record()
        plan.run(weight, x.data_ptr(), y)
        end.record()
    runs[-1][1].synchronize()
    return float(min(start.elapsed_time(end) for start, end in runs[1:]))


def compress_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """Compress a matrix into the library's form, for all numbers of rows.

    [out, K'], both multiples of 32, with at most 2 non-zeros in every 4 columns, contiguous, on a GPU -> uint8 [bytes],
    with room for a tile of metadata at the end.
    """
    library, (out, columns), device = api.load_library(), matrix.shape, matrix.get_device()
    with torch.cuda.device(device):
        handle, descriptor = handle_of(device), api.Structure()
        _describe_weight(descriptor.address, handle, out, columns, matrix.dtype)
        try:
            size, scratch = ctypes.c_size_t(), ctypes.c_size_t()
            sizes = ctypes.byref(size), ctypes.byref(scratch)
            library.call("cusparseLtSpMMACompressedSize2", handle.address, descriptor.address, *sizes)
            compressed = torch.zeros(size.value + METADATA_TILE, dtype=torch.uint8, device=matrix.device)
            buffer = torch.empty(scratch.value, dtype=torch.uint8, device=matrix.device)
            pointers = matrix.data_ptr(), compressed.data_ptr(), buffer.data_ptr() or None, current_stream(device)
            library.call("cusparseLtSpMMACompress2", handle.address, descriptor.address, 1, api.TRANSPOSE, *pointers)
        finally:
            library.functions.cusparseLtMatDescriptorDestroy(descriptor.address)
    return compressed
