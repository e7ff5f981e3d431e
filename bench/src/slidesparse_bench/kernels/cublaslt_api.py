"""Call cuBLASLt by ctypes: a problem, its descriptors, the algorithms that its heuristics name, and their neighbours.

The library stores matrices by columns: y row-major is its column-major [N, M], which is w, transposed, times x. This
file follows ``cublasLt.h`` of CUDA 12.9 and 13; scales along rows and columns ("outer vectors") need Hopper.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import NamedTuple

import torch

from slidesparse.errors import UnsupportedError
from slidesparse.gemm.cusparselt.api import CUDA_TYPES
from slidesparse.weights.quant import parse_dtype

REQUESTED = 64
"""Algorithms that are asked for, and tried at most, for each accumulator; cuSPARSELt's searches try 50."""

WORKSPACE = 64 << 20
"""Bytes that every algorithm may use."""

# cublasOperation_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulMatrixScale_t, cublasLtMatmulPreferenceAttributes_t
TRANSPOSE = 1
TRANSPOSE_A, SCALE_OF_A, SCALE_OF_B, FAST_ACCUMULATION, SCALE_MODE_A, SCALE_MODE_B = 3, 17, 18, 25, 31, 32
OUTER_VECTOR = 3
MAX_WORKSPACE = 1

# cublasLtMatmulAlgoCapAttributes_t, cublasLtMatmulAlgoConfigAttributes_t
TILES_OF = 6
TILE, CLUSTER = 1, 8
CLUSTERS = range(2, 15)
"""cublasLtClusterShape_t: 1x1, 2x1, 4x1, 1x2, ... 2x8."""
MOST_TILES = 1024

COMPUTE_32F, COMPUTE_32I = 68, 72


class DenseProblem(NamedTuple):
    """The sizes and types of a dense product.

    Attributes:
        tokens: M.
        out: N.
        columns: K.
        dtype: ``int8`` (int32 comes out), ``fp8`` (bf16), ``bf16`` or ``fp16`` (their own type).
        scaled: FP8 only: apply scales along rows and columns; else a product alone.
        device: CUDA device index.
    """

    tokens: int
    out: int
    columns: int
    dtype: str
    scaled: bool
    device: int

    @property
    def out_dtype(self) -> torch.dtype:
        """Type of the product."""
        return {"int8": torch.int32, "fp8": torch.bfloat16}.get(self.dtype) or parse_dtype(self.dtype)


class CublasLtAlgorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [  # what ctypes asks for
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    # handle, operation, A, B, C, D, preference, requested, results, returned
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, POINTER(CublasLtAlgorithm), POINTER(c_int)),
    # handle, operation, A, B, C, D, algorithm, result
    "cublasLtMatmulAlgoCheck": (*[c_void_p] * 7, POINTER(CublasLtAlgorithm)),
    "cublasLtMatmulAlgoCapGetAttribute": (c_void_p, c_int, c_void_p, c_size_t, POINTER(c_size_t)),
    "cublasLtMatmulAlgoConfigSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    # handle, operation, alpha, A, A's layout, B, its, beta, C, its, D, its, algorithm, workspace, its size, stream
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """Return the cuBLASLt that torch has loaded."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError as error:
        raise UnsupportedError(f"{name} is not loaded", got=str(error), needed="a torch built for CUDA") from error
    for function, arguments in _SIGNATURES.items():
        getattr(library, function).argtypes, getattr(library, function).restype = arguments, c_int
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise UnsupportedError(f"{name} failed", got=f"status {status}")


def _made(name: str, *arguments: object) -> c_void_p:
    """Create an object of the library, and keep it as long as the process runs: a benchmark makes a few hundred."""
    pointer = c_void_p()
    _call(name, byref(pointer), *arguments)
    return pointer


@lru_cache(maxsize=8)
def _handle(device: int) -> c_void_p:
    with torch.cuda.device(device):
        return _made("cublasLtCreate")


@lru_cache(maxsize=8)
def _workspace(device: int) -> torch.Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=f"cuda:{device}")


class Product:
    """A problem with its descriptors, ready to be run by any of its algorithms.

    Args:
        problem: Sizes and types.
        fast: FP8 only: sum in the Tensor Core's own accumulator.
    """

    def __init__(self, problem: DenseProblem, fast: bool) -> None:
        operand, product = CUDA_TYPES[parse_dtype(problem.dtype)], CUDA_TYPES[problem.out_dtype]
        integer = problem.dtype == "int8"
        scalar = CUDA_TYPES[torch.int32 if integer else torch.float32]
        self.problem = problem
        self._one = (c_int32 if integer else c_float)(1)
        self._zero = (c_int32 if integer else c_float)(0)
        self._operation = _made("cublasLtMatmulDescCreate", COMPUTE_32I if integer else COMPUTE_32F, scalar)
        self._set(TRANSPOSE_A, c_int32(TRANSPOSE))
        if problem.dtype == "fp8":
            self._set(FAST_ACCUMULATION, ctypes.c_int8(fast))
        if problem.scaled:
            self._set(SCALE_MODE_A, c_int32(OUTER_VECTOR))
            self._set(SCALE_MODE_B, c_int32(OUTER_VECTOR))
        size = problem.columns
        self._w = _made("cublasLtMatrixLayoutCreate", operand, size, problem.out, size)
        self._x = _made("cublasLtMatrixLayoutCreate", operand, size, problem.tokens, size)
        self._y = _made("cublasLtMatrixLayoutCreate", product, problem.out, problem.tokens, problem.out)

    def _set(self, attribute: int, value: ctypes._SimpleCData[int] | c_void_p) -> None:
        _call("cublasLtMatmulDescSetAttribute", self._operation, attribute, byref(value), ctypes.sizeof(value))

    def set_scales(self, scale_x: torch.Tensor, scale_w: torch.Tensor) -> None:
        """Set the scales of the runs that follow: float32 [M] and [N]."""
        self._set(SCALE_OF_A, c_void_p(scale_w.data_ptr()))
        self._set(SCALE_OF_B, c_void_p(scale_x.data_ptr()))

    def algorithms(self) -> dict[str, CublasLtAlgorithm]:
        """Return name -> algorithm: the heuristics', best first, then their neighbours; empty without a kernel."""
        preference = _made("cublasLtMatmulPreferenceCreate")
        size = c_size_t(WORKSPACE)
        _call("cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE, byref(size), ctypes.sizeof(size))
        results, count = (CublasLtAlgorithm * REQUESTED)(), c_int()
        # The returned status only repeats that there is no kernel.
        _library().cublasLtMatmulAlgoGetHeuristic(*self._what, preference, REQUESTED, results, byref(count))
        named = [result for result in results[: count.value] if result.state == 0]
        found = {bytes(result.algorithm): (f"heuristic {rank}", result) for rank, result in enumerate(named)}
        for rank, result in enumerate(named):
            clusters = ((CLUSTER, "cluster", c_uint16(shape)) for shape in CLUSTERS)
            tiles = ((TILE, "tile", c_uint32(tile)) for tile in _tiles(result))
            for attribute, word, value in (*clusters, *tiles):
                if len(found) < REQUESTED and (neighbour := self._neighbour(result, attribute, value)) is not None:
                    found.setdefault(bytes(neighbour.algorithm), (f"heuristic {rank}, {word} {value.value}", neighbour))
        return dict(found.values())

    @property
    def _what(self) -> tuple[c_void_p, ...]:
        return _handle(self.problem.device), self._operation, self._w, self._x, self._y, self._y

    def _neighbour(
        self, result: CublasLtAlgorithm, attribute: int, value: ctypes._SimpleCData[int]
    ) -> CublasLtAlgorithm | None:
        """Return the algorithm with one attribute changed, or None where the library cannot run that."""
        algorithm, checked = type(result.algorithm)(*result.algorithm), CublasLtAlgorithm()
        library, size = _library(), ctypes.sizeof(value)
        if library.cublasLtMatmulAlgoConfigSetAttribute(byref(algorithm), attribute, byref(value), size):
            return None
        if library.cublasLtMatmulAlgoCheck(*self._what, byref(algorithm), byref(checked)) or checked.state:
            return None
        checked.algorithm = algorithm
        return checked if checked.workspace <= WORKSPACE else None

    def run(self, algorithm: CublasLtAlgorithm, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        """Compute ``y = x @ w^T`` on the current stream."""
        workspace, one, zero = _workspace(self.problem.device), byref(self._one), byref(self._zero)
        operands = (one, w.data_ptr(), self._w, x.data_ptr(), self._x, zero, y.data_ptr(), self._y)
        rest = (y.data_ptr(), self._y, byref(algorithm.algorithm), workspace.data_ptr(), WORKSPACE)
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        _call("cublasLtMatmul", _handle(self.problem.device), self._operation, *operands, *rest, stream)


def _tiles(result: CublasLtAlgorithm) -> list[int]:
    """Return the tiles that an algorithm can have."""
    tiles, written = (c_uint32 * MOST_TILES)(), c_size_t()
    where = (byref(result.algorithm), TILES_OF, tiles, ctypes.sizeof(tiles), byref(written))
    failed = _library().cublasLtMatmulAlgoCapGetAttribute(*where)
    return [] if failed else list(tiles[: written.value // ctypes.sizeof(c_uint32)])
