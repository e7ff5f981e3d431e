"""The operators that torch.compile and CUDA graphs see, in the namespace ``torch.ops.slidesparse``.

Each is functional, has a fake implementation (shapes only, the number of tokens symbolic) and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.base import with_rows
from slidesparse.gemm.select import get_backend
from slidesparse.gemm.switch import parse_switch
from slidesparse.kernels.columns import Columns
from slidesparse.quant import QUANTISED, quantize_rows
from slidesparse.slide import gather

KERNEL_INPUTS = (torch.bfloat16, torch.float16, torch.float32)

_LIBRARY = torch.library.Library("slidesparse", "FRAGMENT")


def _no_backward(*_: Any) -> None:
    raise UnsupportedError("slidesparse layers are for inference", remedy="train the dense model, with its zeros held")


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"slidesparse::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(f"slidesparse::{name}", _no_backward, lib=_LIBRARY)


def _check_finite(x: torch.Tensor) -> None:
    # On a GPU this would wait for the device; there NaN and Inf show as a NaN scale and NaN outputs of that token.
    if x.device.type == "cpu" and not bool(torch.isfinite(x).all()):
        raise InputError("activations hold NaN or Inf", needed="finite activations")


def _for_backend(lifted: torch.Tensor, backend: str) -> torch.Tensor:
    tokens = lifted.shape[0]
    return with_rows(lifted, get_backend(backend).layout.rows(tokens))[:tokens]


@lru_cache(maxsize=4096)
def _columns(order: tuple[int, ...]) -> Columns:
    return Columns(*order)  # type: ignore[arg-type] # mypy does not count them


def _kernel_columns(
    x: torch.Tensor, groups: torch.Tensor | None, order: Sequence[int], dtype: torch.dtype
) -> Columns | None:
    """What the Triton kernels need to write ``dtype``, or None where the torch definition must do."""
    if not x.is_cuda or not order or x.dtype not in KERNEL_INPUTS or not _kernels_run(x.device, dtype):
        return None
    columns = _columns(tuple(order))
    return columns if groups is None else replace(columns, groups=groups)


@lru_cache(maxsize=64)
def _kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    needed = (8, 9) if dtype == torch.float8_e4m3fn else (8, 0)
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= needed


def _quantize_lift(
    x: torch.Tensor,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    backend: str = "reference",
    groups: torch.Tensor | None = None,
    order: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_finite(x)
    columns = _kernel_columns(x, groups, order, dtype)
    if columns is not None:
        from slidesparse.kernels import quantize_lift

        rows = get_backend(backend).layout.rows(x.shape[0])
        values, scale = quantize_lift.quantize_lift(x, columns, dtype, rows=rows)
        return values, scale
    values, scale = quantize_rows(x, dtype)
    return _for_backend(gather(values, column_map), backend), scale


def _quantize_lift_fake(
    x: torch.Tensor,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    backend: str = "reference",
    groups: torch.Tensor | None = None,
    order: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = x.shape[0]
    return x.new_empty(tokens, column_map.shape[0], dtype=dtype), x.new_empty(tokens, 1, dtype=torch.float32)


def _lift(
    x: torch.Tensor,
    column_map: torch.Tensor,
    backend: str = "reference",
    groups: torch.Tensor | None = None,
    order: Sequence[int] = (),
) -> torch.Tensor:
    _check_finite(x)
    columns = _kernel_columns(x, groups, order, x.dtype)
    if columns is not None:
        from slidesparse.kernels import quantize_lift

        return quantize_lift.lift(x, columns, rows=get_backend(backend).layout.rows(x.shape[0]))
    return _for_backend(gather(x, column_map), backend)


def _lift_fake(
    x: torch.Tensor,
    column_map: torch.Tensor,
    backend: str = "reference",
    groups: torch.Tensor | None = None,
    order: Sequence[int] = (),
) -> torch.Tensor:
    return x.new_empty(x.shape[0], column_map.shape[0])


def _gemm(
    x: torch.Tensor,
    scale_x: torch.Tensor | None,
    operand: list[torch.Tensor],
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return get_backend(backend).matmul(x, scale_x, tuple(operand), scale_w, bias, out_features, out_dtype)


def _gemm_fake(
    x: torch.Tensor,
    scale_x: torch.Tensor | None,
    operand: list[torch.Tensor],
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], out_features, dtype=out_dtype)


def _linear(
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
    switch: str,
) -> torch.Tensor:
    form, start = parse_switch(switch).pick(x.shape[0])
    column_map, groups, *operand = tensors[start : start + form.tensors]
    where = (form.backend, groups if len(groups) else None, form.order)
    scale_x: torch.Tensor | None = None
    if dtype in QUANTISED:
        lifted, scale_x = _quantize_lift(x, column_map, dtype, *where)
    else:
        lifted = _lift(x, column_map, *where)
    return _gemm(lifted, scale_x, operand, scale_w, bias, out_features, x.dtype, form.backend)


def _linear_fake(
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
    switch: str,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], out_features)


_define(
    "quantize_lift",
    "(Tensor x, Tensor column_map, ScalarType dtype, str backend='reference', Tensor? groups=None, int[] order=[])"
    " -> (Tensor, Tensor)",
    _quantize_lift,
    _quantize_lift_fake,
)
_define(
    "lift",
    "(Tensor x, Tensor column_map, str backend='reference', Tensor? groups=None, int[] order=[]) -> Tensor",
    _lift,
    _lift_fake,
)
_define(
    "gemm",
    "(Tensor x, Tensor? scale_x, Tensor[] operand, Tensor? scale_w, Tensor? bias, SymInt out_features,"
    " ScalarType out_dtype, str backend) -> Tensor",
    _gemm,
    _gemm_fake,
)

_define(
    "linear",
    "(Tensor x, Tensor[] tensors, Tensor? scale_w, Tensor? bias, SymInt out_features, ScalarType dtype, str switch)"
    " -> Tensor",
    _linear,
    _linear_fake,
)

quantize_lift = torch.ops.slidesparse.quantize_lift
"""(x [M, K], column_map int64 [K'], dtype, backend, groups, order) -> lifted values [M, K'], scale float32 [M, 1].

The memory behind the values has the rows that the layout of ``backend`` asks for. ``order`` and ``groups`` are the
fields of :class:`slidesparse.kernels.columns.Columns`; with them a GPU runs one kernel, else torch its definition."""

lift = torch.ops.slidesparse.lift
"""(x [M, K], column_map int64 [K'], backend, groups, order) -> lifted activations [M, K'], as ``quantize_lift``."""

gemm = torch.ops.slidesparse.gemm
"""See :meth:`slidesparse.gemm.base.Backend.matmul`; ``backend`` is a backend's name."""

linear = torch.ops.slidesparse.linear
"""(x [M, K], tensors, scale_w [out], bias [out], out, dtype of the weight, switch) -> [M, out] in the type of x.

The three above in one, by the form of the weight that ``switch`` (:class:`slidesparse.gemm.switch.Switch`, as text)
says for M tokens; ``tensors`` are those of all forms, one after another."""
