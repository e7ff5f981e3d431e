"""Plans and compressed matrices of cuSPARSELt: objects that every call uses."""

from __future__ import annotations

import ctypes
import weakref
from functools import lru_cache
from typing import NamedTuple

import torch

from slidesparse.base.torch_private import current_stream, empty
from slidesparse.errors import UnsupportedError
from slidesparse.gemm.cusparselt import api

PLANS = 2048
"""Most cached plans, of some kilobytes each. A model has few shapes, a shape 143 buckets to 65536 tokens."""

ALIGNMENT = 16

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
    """A GEMM of a shape, ready to run by the library's default algorithm.

    Attributes:
        workspace: Bytes of device memory of a run.

    Raises:
        UnsupportedError: The library has no such kernel, or a CUDA graph is being captured: making a plan may allocate
            and load code.
    """

    def __init__(self, shape: Shape) -> None:
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
            self._make(shape)

    def _make(self, shape: Shape) -> None:
        handle, call = self._handle.address, self._library.call
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
        compute = api.COMPUTE_TYPES[shape.dtype]
        operations = (api.TRANSPOSE, api.NON_TRANSPOSE)
        call("cusparseLtMatmulDescriptorInit", handle, matmul, *operations, weight, x, y, y, compute)
        selection = self._new("cusparseLtMatmulAlgSelectionDestroy")
        call("cusparseLtMatmulAlgSelectionInit", handle, selection, matmul, api.ALG_DEFAULT)

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
        stream = ctypes.c_void_p(current_stream(y.get_device()))
        pointer = y.data_ptr()
        beta = _ONE_POINTER if accumulate else _ZERO_POINTER
        status = self._matmul(
            self._handle.address,
            self._plan,
            _ONE_POINTER,
            weight.data_ptr(),
            x_pointer,
            beta,
            pointer,
            pointer,
            None if workspace is None else workspace.data_ptr(),
            ctypes.byref(stream),
            1,
        )
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
def plan_for(shape: Shape) -> MatmulPlan:
    """Return the plan of a shape."""
    return MatmulPlan(shape)


def compress_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """Compress a matrix into the library's form, for all numbers of rows.

    [out, K'], both multiples of 32, with at most 2 non-zeros in every 4 columns, contiguous, on a GPU -> uint8 [bytes],
    with room for a tile of metadata at the end.
    """
    library, (out, columns) = api.load_library(), matrix.shape
    device = matrix.get_device()
    with torch.cuda.device(device):
        handle, descriptor = handle_of(device), api.Structure()
        _describe_weight(descriptor.address, handle, out, columns, matrix.dtype)
        try:
            size, scratch = ctypes.c_size_t(), ctypes.c_size_t()
            sizes = ctypes.byref(size), ctypes.byref(scratch)
            library.call("cusparseLtSpMMACompressedSize2", handle.address, descriptor.address, *sizes)
            compressed = torch.zeros(size.value + METADATA_TILE, dtype=torch.uint8, device=matrix.device)
            buffer = torch.empty(scratch.value, dtype=torch.uint8, device=matrix.device)
            stream = torch.cuda.current_stream().cuda_stream
            pointers = matrix.data_ptr(), compressed.data_ptr(), buffer.data_ptr() if scratch.value else None, stream
            which = (1, api.TRANSPOSE)
            library.call("cusparseLtSpMMACompress2", handle.address, descriptor.address, *which, *pointers)
        finally:
            library.functions.cusparseLtMatDescriptorDestroy(descriptor.address)
    return compressed
