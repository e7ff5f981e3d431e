"""Compilation of CUDA sources by NVRTC, with a cache on disk.

The cache key is a hash of all sources, the options and NVRTC's version, so the cache never needs to be cleared. A file
starts with the digest of its contents, so that a damaged one is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.cache_folder import cache_folder
from slidesparse.base.other_libraries import need
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import UnsupportedError, first_line

SHARED = Path(__file__).with_name("csrc")
"""Headers of all backends."""

TYPES = {torch.int8: "S8", torch.float8_e4m3fn: "E4M3", torch.bfloat16: "BF16", torch.float16: "F16"}
OUTPUTS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def read_sources(compiled: Path) -> dict[str, str]:
    """Return name in ``#include`` -> source: a file, the headers in its folder, and those of all backends."""
    paths = compiled, *sorted(compiled.parent.glob("*.cuh")), *sorted(SHARED.glob("*.cuh"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def machine_code(files: Mapping[str, str], opts: list[str]) -> bytes:
    """Return the machine code of sources, from the cache or the compiler; see :func:`compile_sources`."""
    major, minor = nvrtc_version()
    key = hashlib.sha256("\0".join([*chain(*files.items()), *opts, f"{major}.{minor}"]).encode())
    path = cache_folder() / "kernels" / f"{key.hexdigest()[:32]}.cubin"
    known = _read(path)
    if known is None:
        known, _ = compile_sources(files, opts)
        _write(path, known)
    return known


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Write machine code into the cache; a failure only slows the next start."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)  # whatever the umask is: cache_folder() looks at it
        replace_file(path, hashlib.sha256(code).digest() + code)


# -- NVRTC -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    return need("cuda.bindings.nvrtc", "pip install cuda-bindings", what="cuda-bindings is not installed")


@lru_cache(maxsize=1)
def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version.

    Raises:
        UnsupportedError: It cannot be loaded, or is older than CUDA 12.0, the first with ``sm_90a``.
    """
    nvrtc = _nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        remedy = "pip install nvidia-cuda-nvrtc"
        raise UnsupportedError("NVRTC cannot be loaded", got=first_line(error), remedy=remedy) from error
    _check(int(status), "nvrtcVersion")
    if major < 12:
        raise UnsupportedError("NVRTC is too old", got=f"{major}.{minor}", needed="12.0 or newer")
    return major, minor


def compile_sources(files: Mapping[str, str], opts: list[str]) -> tuple[bytes, str]:
    """Return the machine code of sources compiled with options, and the compiler's log.

    Raises:
        UnsupportedError: The compiler refuses; with the first line of its log.
    """
    nvrtc = _nvrtc()
    (name, source), *headers = [(name.encode(), text.encode()) for name, text in files.items()]
    includes, contents = [name for name, _ in headers], [text for _, text in headers]
    status, program = nvrtc.nvrtcCreateProgram(source, name, len(headers), contents, includes)
    _check(int(status), "nvrtcCreateProgram")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(opts), [option.encode() for option in opts])
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        _check(int(status), "nvrtcCompileProgram", log)
        return _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(status: int, call: str, log: str = "") -> None:
    if status:
        lines = [line for line in log.splitlines() if "error" in line] or log.splitlines() or [""]
        raise UnsupportedError(f"{call} failed with status {status}", got=lines[0] or None)


def _bytes(size: Any, get: Any, program: Any) -> bytes:
    status, length = size(program)
    _check(int(status), size.__name__)
    data = bytes(length)
    (status,) = get(program, data)
    _check(int(status), get.__name__)
    return data


def _text(size: Any, get: Any, program: Any) -> str:
    return _bytes(size, get, program).rstrip(b"\0").decode(errors="replace")
