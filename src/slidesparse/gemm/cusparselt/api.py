"""Bindings of libcusparseLt: the part of ``cusparseLt.h`` for the backend, with checks of every status.

Written against the headers of 0.8.0, 0.8.1, 0.9.1 and 0.10.0, which agree on every name, enumerator and signature here
(0.10 changes the encoding of ``cusparseLtGetVersion``, hence ``cusparseLtGetProperty``). The wheel installs the library
under ``nvidia/cusparselt/lib`` up to 0.8 and under ``nvidia/cu13/lib`` from 0.9 on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

from slidesparse.errors import UnsupportedError

SONAME = "libcusparseLt.so.0"
WHEELS = ("nvidia-cusparselt-cu13", "nvidia-cusparselt-cu12", "nvidia-cusparselt")
OLDEST = (0, 8, 0)
"""First release with the backend's functions and FP8 kernels."""

STRUCTURE_BYTES = 4096
"""Bytes of an opaque structure; 0.8.0 to 0.10.0 use 512."""
STRUCTURE_ALIGNMENT = 16

# cusparseOrder_t, cusparseOperation_t, cusparseLtSparsity_t, cusparseLtMatmulAlg_t and ...AlgAttribute_t
ORDER_COLUMN = 1
NON_TRANSPOSE, TRANSPOSE = 0, 1
SPARSITY_50_PERCENT = 0
ALG_DEFAULT = 0
ALG_CONFIG_ID, ALG_CONFIG_MAX_ID = 0, 1

CUDA_TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.int8: 3,
    torch.int32: 10,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
}
"""cudaDataType of ``library_types.h``."""

COMPUTE_TYPES = {torch.int8: 0, torch.float16: 2, torch.bfloat16: 2, torch.float8_e4m3fn: 2}
"""cusparseComputeType by operand: 32I or 32F."""

_STRUCTURE = c_void_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cusparseLtInit": (_STRUCTURE,),
    "cusparseLtGetProperty": (c_int, POINTER(c_int)),
    "cusparseLtDenseDescriptorInit": (_STRUCTURE, _STRUCTURE, c_int64, c_int64, c_int64, c_uint32, c_int, c_int),
    "cusparseLtStructuredDescriptorInit": (
        *(_STRUCTURE, _STRUCTURE, c_int64, c_int64, c_int64, c_uint32, c_int, c_int, c_int),
    ),
    "cusparseLtMatDescriptorDestroy": (_STRUCTURE,),
    "cusparseLtMatmulDescriptorInit": (
        *(_STRUCTURE, _STRUCTURE, c_int, c_int, _STRUCTURE, _STRUCTURE, _STRUCTURE, _STRUCTURE, c_int),
    ),
    "cusparseLtMatmulAlgSelectionInit": (_STRUCTURE, _STRUCTURE, _STRUCTURE, c_int),
    "cusparseLtMatmulAlgSelectionDestroy": (_STRUCTURE,),
    "cusparseLtMatmulAlgSetAttribute": (_STRUCTURE, _STRUCTURE, c_int, c_void_p, c_size_t),
    "cusparseLtMatmulAlgGetAttribute": (_STRUCTURE, _STRUCTURE, c_int, c_void_p, c_size_t),
    "cusparseLtMatmulGetWorkspace": (_STRUCTURE, _STRUCTURE, POINTER(c_size_t)),
    "cusparseLtMatmulPlanInit": (_STRUCTURE, _STRUCTURE, _STRUCTURE, _STRUCTURE),
    "cusparseLtMatmulPlanDestroy": (_STRUCTURE,),
    # handle, plan, alpha, A, B, beta, C, D, workspace, streams, numStreams
    "cusparseLtMatmul": (*[c_void_p] * 10, c_int32),
    "cusparseLtSpMMACompressedSize2": (_STRUCTURE, _STRUCTURE, POINTER(c_size_t), POINTER(c_size_t)),
    # handle, descriptor, isSparseA, op, dense, compressed, buffer, stream
    "cusparseLtSpMMACompress2": (_STRUCTURE, _STRUCTURE, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p),
}


class Structure:
    """Memory of one opaque structure at a fixed address: the library keeps pointers between structures."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(STRUCTURE_BYTES + STRUCTURE_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % STRUCTURE_ALIGNMENT


class Library:
    """The loaded library: its functions, typed, each returning a status, and its version (major, minor, patch)."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, c_int
        functions.cusparseLtGetErrorString.argtypes = (c_int,)
        functions.cusparseLtGetErrorString.restype = c_char_p
        self.functions = functions
        self.version = (self._property(0), self._property(1), self._property(2))

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the header.

        Raises:
            UnsupportedError: The status is not success; with the library's message.
        """
        self.check(getattr(self.functions, name)(*arguments), name)

    def check(self, status: int, name: str) -> None:
        """Raise as :meth:`call` for the status of a function."""
        if status != 0:
            text = self.functions.cusparseLtGetErrorString(status)
            raise UnsupportedError(
                f"{name} of cuSPARSELt {self.version_text} failed", got=f"{text.decode()} ({status})"
            )

    @property
    def version_text(self) -> str:
        """``0.8.0``."""
        return ".".join(map(str, self.version))

    def _property(self, which: int) -> int:
        value = c_int()
        self.functions.cusparseLtGetProperty(which, ctypes.byref(value))
        return value.value


@lru_cache(maxsize=1)
def load_library() -> Library:
    """Return the library that torch has loaded, else an installed wheel's, else the system's.

    Raises:
        UnsupportedError: There is none, or it is too old.
    """
    functions = _open()
    if functions is None:
        raise UnsupportedError(f"{SONAME} is missing", remedy="pip install nvidia-cusparselt-cu13")
    try:
        library = Library(functions)
    except AttributeError as error:  # older releases lack functions
        raise _too_old(str(error)) from error
    if library.version < OLDEST:
        raise _too_old(library.version_text)
    return library


def _too_old(got: str) -> UnsupportedError:
    needed = ".".join(map(str, OLDEST))
    return UnsupportedError("cuSPARSELt is too old", got=got, needed=f"{needed} or newer", remedy="upgrade its wheel")


def _open() -> ctypes.CDLL | None:
    attempts = [(SONAME, os.RTLD_NOW | os.RTLD_NOLOAD), *((str(path), os.RTLD_NOW) for path in _in_wheels())]
    for name, mode in [*attempts, (SONAME, os.RTLD_NOW)]:
        try:
            return ctypes.CDLL(name, mode=mode)
        except OSError:
            continue
    return None


def _in_wheels() -> Iterator[Path]:
    for wheel in WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        yield from (Path(str(file.locate())) for file in files if file.name == SONAME)
