"""Every private interface of torch that the package uses, with a public fallback where there is one.

The names are listed in :data:`PRIVATE` and looked up when first needed, never when a module is imported. Where torch
lacks one, a public and slower function runs instead and the log says so; without such a function an error is raised.
Functions that run on every call look names up only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch

from slidesparse.base.log import LOG
from slidesparse.errors import InputError, UnsupportedError

_GRAPHS = "norms and activations are not joined with linears"

PRIVATE = {
    "torch._C._dynamo.guards._empty_strided_cuda": "torch.empty allocates, which takes 1 us longer",
    "torch._C._cuda_getCurrentRawStream": "torch.cuda.current_stream is called, which takes 1 us longer",
    "torch._C._cuda_getDevice": "torch.cuda.current_device is called",
    "torch._int_mm": "dense INT8 products run in float64",
    "torch._scaled_mm": "dense FP8 products run in float32",
    "torch.Tensor._make_wrapper_subclass": "results that nothing reads take memory in SGLang",
    "torch._guards.tracing": _GRAPHS,
    "torch._subclasses.fake_tensor.FakeTensorMode": _GRAPHS,
    "torch._subclasses.fake_tensor.unset_fake_temporarily": _GRAPHS,
    "torch._dynamo.config": "models of more than a few kinds of layers train partly uncompiled",
    "torch._inductor.pattern_matcher.fwd_only": _GRAPHS,
    "torch._inductor.pattern_matcher.fx_to_pattern": _GRAPHS,
}
"""Private name of torch -> the consequence where torch lacks it."""


@cache
def find(name: str) -> Any:
    """Return torch's object of a name in :data:`PRIVATE`; None, and a line in the log, where torch lacks it."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError):
        LOG.warning("slidesparse: torch %s has no %s: %s", torch.__version__, name, PRIVATE[name])
        return None


def require(name: str) -> Any:
    """Return torch's object of a name in :data:`PRIVATE` that has no fallback, or raise an UnsupportedError."""
    private = find(name)
    if private is None:
        raise UnsupportedError(f"torch {torch.__version__}", needed=f"one that has {name}")
    return private


# -- memory, streams and products: called with every linear --------------------------------------------------------


def _at_first_call(here: str, private: str, public: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that replaces itself, in the global ``here``, by torch's private one when it is first called.

    A cache would cost each call as much as the private function saves. Without one ``public`` takes its place, with
    the same arguments and result.
    """

    def first(*args: Any, **options: Any) -> Any:
        chosen = globals()[here] = find(private) or public
        return chosen(*args, **options)

    return first


def _public_empty(size: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")  # contiguous, and no caller asks for other strides


def _public_stream(device: int) -> int:
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream


def _public_int8_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.to(torch.float64) @ w.to(torch.float64)).to(torch.int32)  # exact: sums stay far below 2^53


def _public_fp8_mm(
    x: torch.Tensor, w: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor,
    bias: torch.Tensor | None = None, *, out_dtype: torch.dtype, use_fast_accum: bool = False,
) -> torch.Tensor:  # fmt: skip
    y = (x.to(torch.float32) @ w.to(torch.float32)) * scale_x * scale_w
    return (y if bias is None else y + bias).to(out_dtype)


_empty_strided = _at_first_call("_empty_strided", "torch._C._dynamo.guards._empty_strided_cuda", _public_empty)
_stream = _at_first_call("_stream", "torch._C._cuda_getCurrentRawStream", _public_stream)
_device = _at_first_call("_device", "torch._C._cuda_getDevice", torch.cuda.current_device)

int8_mm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _at_first_call(
    "int8_mm", "torch._int_mm", _public_int8_mm
)
"""(x [M, K], w [K, N]), both int8 -> int32 [M, N], exact. On a GPU cuBLASLt wants more than 16 rows, multiples of 8 for
K and N, and columns of w contiguous. Call it as an attribute of this module, which has torch's own after one call."""

fp8_mm: Callable[..., torch.Tensor] = _at_first_call("fp8_mm", "torch._scaled_mm", _public_fp8_mm)
"""(x [M, K], w [K, N], scale_x [M, 1], scale_w [1, N], bias=None, *, out_dtype, use_fast_accum=False) -> [M, N], for
float8_e4m3fn with contiguous columns of w. Scales are float32, a row or one number each; with a scale a row, cuBLASLt
writes bfloat16 alone. ``use_fast_accum`` sums in the Tensor Core's own accumulator. Call it as :data:`int8_mm`."""

stand_in: Callable[..., Any] = _at_first_call(
    "stand_in", "torch.Tensor._make_wrapper_subclass", lambda kind, *of, **to: torch.empty(*of, **to).as_subclass(kind)
)
"""(kind, shape, *, dtype, device) -> a contiguous tensor of a subclass, without memory: its address is 0."""


def current_stream(device: int) -> int:
    """Return the ``cudaStream_t`` of a device's current stream, as a number."""
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


def can_match_graphs() -> bool:
    """Return whether torch has everything that :func:`outside_tracing` and :func:`pattern_of` use."""
    return all(find(name) is not None for name, instead in PRIVATE.items() if instead == _GRAPHS)


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Compute with real tensors, in a pass that torch.compile runs while it traces; see :func:`require`."""
    tracing, real = require("torch._guards.tracing"), require("torch._subclasses.fake_tensor.unset_fake_temporarily")
    with tracing(None), real():
        yield


def pattern_of(function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the Inductor pattern that matches a function of one tensor ``x`` of this shape and type.

    Names that torch lacks are errors: see :func:`require`.
    """
    fake = require("torch._subclasses.fake_tensor.FakeTensorMode")
    trace = require("torch._inductor.pattern_matcher.fwd_only")
    to_pattern = require("torch._inductor.pattern_matcher.fx_to_pattern")
    with outside_tracing(), fake():
        graph_module = trace(function, [torch.empty(shape, dtype=dtype)])
        return to_pattern(graph_module, ignore_types=(), argnames=("x",))


def compile_forms(most: int) -> None:
    """Raise torch.compile's limit of variants of one function; past it, others run uncompiled."""
    config = find("torch._dynamo.config")
    if config is not None:
        config.recompile_limit = max(config.recompile_limit, most)
