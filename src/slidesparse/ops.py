"""The operators that torch.compile and CUDA graphs see, in the namespace ``torch.ops.slidesparse``.

Each is functional, has a fake implementation (shapes only, the number of tokens symbolic) and never waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.gemm.select import get_backend
from slidesparse.quant import quantize_rows
from slidesparse.slide import gather

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


def _quantize_lift(x: torch.Tensor, column_map: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    _check_finite(x)
    values, scale = quantize_rows(x, dtype)
    return gather(values, column_map), scale


def _quantize_lift_fake(
    x: torch.Tensor, column_map: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = x.shape[0]
    return x.new_empty(tokens, column_map.shape[0], dtype=dtype), x.new_empty(tokens, 1, dtype=torch.float32)


def _lift(x: torch.Tensor, column_map: torch.Tensor) -> torch.Tensor:
    _check_finite(x)
    return gather(x, column_map)


def _lift_fake(x: torch.Tensor, column_map: torch.Tensor) -> torch.Tensor:
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
    return get_backend(backend).matmul(x, scale_x, tuple(operand), scale_w, bias, out_dtype)


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


_define(
    "quantize_lift",
    "(Tensor x, Tensor column_map, ScalarType dtype) -> (Tensor, Tensor)",
    _quantize_lift,
    _quantize_lift_fake,
)
_define("lift", "(Tensor x, Tensor column_map) -> Tensor", _lift, _lift_fake)
_define(
    "gemm",
    "(Tensor x, Tensor? scale_x, Tensor[] operand, Tensor? scale_w, Tensor? bias, SymInt out_features,"
    " ScalarType out_dtype, str backend) -> Tensor",
    _gemm,
    _gemm_fake,
)

quantize_lift = torch.ops.slidesparse.quantize_lift
"""(x [M, K], column_map int64 [K'], dtype) -> quantised and lifted activations [M, K'], scale float32 [M, 1]."""

lift = torch.ops.slidesparse.lift
"""(x [M, K], column_map int64 [K']) -> lifted activations [M, K']."""

gemm = torch.ops.slidesparse.gemm
"""See :meth:`slidesparse.gemm.base.Backend.matmul`; ``backend`` is a backend's name."""
