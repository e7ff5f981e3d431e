"""Every private interface of torch that the package uses.

Without one of those for graphs, norms and activations are not joined with linears. All others are in torch 2.8 to 2.15.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._dynamo.guards import _empty_strided_cuda as _empty_strided  # type: ignore[attr-defined]

from slidesparse.base.log import log_once
from slidesparse.errors import InputError

# -- memory, streams and products: called with every linear --------------------------------------------------------

_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # not in a build without CUDA, nor is the next one
_device: Any = getattr(torch._C, "_cuda_getDevice", None)

int8_mm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch._int_mm
"""(x [M, K], w [K, N]), both int8 -> int32 [M, N], exact. On a GPU cuBLASLt wants more than 16 rows, multiples of 8 for
K and N, and columns of w contiguous."""

fp8_mm: Callable[..., torch.Tensor] = torch._scaled_mm
"""(x [M, K], w [K, N], scale_x [M, 1], scale_w [1, N], bias=None, *, out_dtype, use_fast_accum=False) -> [M, N], for
float8_e4m3fn with contiguous columns of w. Scales are float32, a row or one number each; with a scale a row, cuBLASLt
writes bfloat16 alone. ``use_fast_accum`` sums in the Tensor Core's own accumulator."""

stand_in: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""(kind, shape, *, dtype, device) -> a contiguous tensor of a subclass, without memory: its address is 0."""


def current_stream(device: int) -> int:
    """Return the ``cudaStream_t`` of a device's current stream, as a number, in a tenth of the public call's time."""
    stream: int = _stream(device)
    return stream


def is_current(device: int) -> bool:
    """Return whether a CUDA device, by its index, is the current one, where kernels launch."""
    current: int = _device()
    return current == device


def empty(rows: int, columns: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """Allocate a matrix in half the host time of ``torch.empty``, by the function that Inductor uses.

    ``device`` is the index of the current CUDA device; negative for the CPU, where Triton's interpreter runs.

    Raises:
        InputError: Another device is the current one.
    """
    if device < 0:
        return torch.empty(rows, columns, dtype=dtype)
    if not is_current(device):
        raise InputError("a kernel's device", got=f"cuda:{device}", needed="the current device")
    return empty_here(rows, columns, dtype)


def empty_here(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a matrix on the current CUDA device, as :func:`empty` does."""
    made: torch.Tensor = _empty_strided((rows, columns), (columns, 1), dtype)
    return made


# -- graphs that torch.compile traced ------------------------------------------------------------------------------


def _graph_tools() -> tuple[Any, Any, Any, Any, Any]:
    """Import what changes most often in torch, when it is first needed: that takes seconds."""
    from torch._guards import tracing
    from torch._inductor.pattern_matcher import fwd_only, fx_to_pattern
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    return tracing, unset_fake_temporarily, FakeTensorMode, fwd_only, fx_to_pattern


def can_match_graphs() -> bool:
    """Return whether torch has what :func:`outside_tracing` and :func:`pattern_of` import; else log what is missing."""
    try:
        _graph_tools()
    except ImportError as error:
        log_once(f"slidesparse: norms and activations are not joined with linears: {error}", logging.WARNING)
        return False
    return True


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Compute with real tensors, in a pass that torch.compile runs while it traces."""
    tracing, real, *_ = _graph_tools()
    with tracing(None), real():
        yield


def pattern_of(function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the Inductor pattern that matches a function of one tensor ``x`` of this shape and type."""
    *_, fake, trace, to_pattern = _graph_tools()
    with outside_tracing(), fake():
        graph_module = trace(function, [torch.empty(shape, dtype=dtype)])
        return to_pattern(graph_module, ignore_types=(), argnames=("x",))


def compile_forms(most: int) -> None:
    """Raise torch.compile's limit of variants of one function; past it, others run uncompiled."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, most)
