"""The operators for torch.compile and CUDA graphs, in the namespace ``torch.ops.slidesparse``.

Each is functional, has a fake implementation (shapes only, the number of tokens symbolic) and never waits for a device.
They are for inference; :mod:`slidesparse.ops.inference_only` calls them where gradients are recorded.
:mod:`slidesparse.ops.register` makes operators with little host time a call; :mod:`slidesparse.ops.resolve` finds the
runner for a number of tokens. :mod:`slidesparse.ops.matmul` uses two of them, without a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slidesparse.gemm.select import get_backend
from slidesparse.gemm.spec import parse_chain, parse_weight
from slidesparse.lifting.layout import Lifted, LiftSpec, LinearTensors
from slidesparse.lifting.prologue import ADDING, NORMS, Prologue
from slidesparse.ops.register import define
from slidesparse.ops.resolve import resolve_chain, resolve_lift, resolve_linear

# -- quantise and lift -----------------------------------------------------------------------------------------------


def _lifted(
    x: torch.Tensor, column_map: torch.Tensor, dtype: torch.dtype, backend: str, order: Sequence[int]
) -> Lifted:
    spec = LiftSpec("none", x.dtype, dtype, tuple(order), get_backend(backend).layout)
    lift = resolve_lift(spec, x.shape[0], x.device)
    return lift(x, None, LinearTensors(column_map, (), None, None, None), 0.0)


def _quantize_lift(
    x: torch.Tensor,
    column_map: torch.Tensor,
    dtype: torch.dtype,
    backend: str = "reference",
    order: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _lifted(x, column_map, dtype, backend, order)[:2]


def _quantize_lift_fake(
    x: torch.Tensor, column_map: torch.Tensor, dtype: torch.dtype, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = x.shape[0]
    return x.new_empty(tokens, column_map.shape[0], dtype=dtype), x.new_empty(tokens, 1, dtype=torch.float32)


def _lift(
    x: torch.Tensor,
    column_map: torch.Tensor,
    backend: str = "reference",
    order: Sequence[int] = (),
) -> torch.Tensor:
    return _lifted(x, column_map, x.dtype, backend, order)[0]


def _lift_fake(x: torch.Tensor, column_map: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], column_map.shape[0])


# -- multiply ------------------------------------------------------------------------------------------------------


def _gemm(x: torch.Tensor, scale_x: torch.Tensor | None, operand: list[torch.Tensor], *rest: Any) -> torch.Tensor:
    *scaling, backend = rest
    return get_backend(backend).matmul(x, scale_x, tuple(operand), *scaling)


def _gemm_fake(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, out_features, out_dtype, _ = rest
    return x.new_empty(x.shape[0], out_features, dtype=out_dtype)


def _run(
    prologue: Prologue,
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: str,
    *,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the product and the new residual."""
    runner, form, _ = resolve_linear(weight, prologue, x.shape[0], x.dtype, x.device)
    column_map, *operand = tensors[form]
    return runner(x, residual, LinearTensors(column_map, operand, scale_w, bias, norm_weight), eps)


def _linear(x: torch.Tensor, *weight: Any) -> torch.Tensor:
    return _run("none", x, *weight)[0]


def _linear_fake(x: torch.Tensor, *weight: Any) -> torch.Tensor:
    return x.new_empty(x.shape[0], parse_weight(weight[-1]).out_features)


def _norm_linear(norm: Prologue) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, *weight: Any) -> torch.Tensor:
        return _run(norm, x, *weight, norm_weight=norm_weight, eps=eps)[0]

    return run


def _norm_linear_fake(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, *weight: Any) -> torch.Tensor:
    return _linear_fake(x, *weight)


def _add_norm_linear(norm: Prologue) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def run(
        x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, *weight: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _run(norm, x, *weight, norm_weight=norm_weight, residual=residual, eps=eps)

    return run


def _add_norm_linear_fake(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, *weight: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _linear_fake(x, *weight), x.new_empty(x.shape)


def _silu_mul_linear(x: torch.Tensor, *weight: Any) -> torch.Tensor:
    return _run("silu_mul", x, *weight)[0]


def _chain(
    x: torch.Tensor, residual: torch.Tensor, tensors: list[torch.Tensor], linears: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    residual_out: torch.Tensor | None = residual
    for runner in resolve_chain(linears, x.shape[0], x.dtype, x.device):
        x, residual_out = runner(x, residual_out, tensors)
    return x, residual_out


def _chain_fake(
    x: torch.Tensor, residual: torch.Tensor, tensors: list[torch.Tensor], linears: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], parse_chain(linears)[-1].weight.out_features), x.new_empty(residual.shape)


define(
    "quantize_lift",
    "(Tensor x, Tensor column_map, ScalarType dtype, str backend='reference', int[] order=[]) -> (Tensor, Tensor)",
    _quantize_lift,
    _quantize_lift_fake,
)
define(
    "lift",
    "(Tensor x, Tensor column_map, str backend='reference', int[] order=[]) -> Tensor",
    _lift,
    _lift_fake,
)
define(
    "gemm",
    "(Tensor x, Tensor? scale_x, Tensor[] operand, Tensor? scale_w, Tensor? bias, SymInt out_features,"
    " ScalarType out_dtype, str backend) -> Tensor",
    _gemm,
    _gemm_fake,
)

_WEIGHT = "Tensor[] tensors, Tensor? scale_w, Tensor? bias, str weight"

define("linear", f"(Tensor x, {_WEIGHT}) -> Tensor", _linear, _linear_fake)
_NORM = f"Tensor norm_weight, float eps, {_WEIGHT}"

for _name in NORMS:
    if _name in ADDING:
        _schema = f"(Tensor x, Tensor residual, {_NORM}) -> (Tensor, Tensor)"
        define(f"{_name}_linear", _schema, _add_norm_linear(_name), _add_norm_linear_fake)
    else:
        define(f"{_name}_linear", f"(Tensor x, {_NORM}) -> Tensor", _norm_linear(_name), _norm_linear_fake)
define("silu_mul_linear", f"(Tensor x, {_WEIGHT}) -> Tensor", _silu_mul_linear, _linear_fake)
define("chain", "(Tensor x, Tensor residual, Tensor[] tensors, str linears) -> (Tensor, Tensor)", _chain, _chain_fake)

quantize_lift = torch.ops.slidesparse.quantize_lift
"""(x [M, K], column_map int64 [K'], dtype, backend, order) -> lifted values [M, K'], scale float32 [M, 1].

The bytes of the values are in the layout of ``backend`` (:class:`lifting.layout.Layout`). ``order`` is ``numbers`` of
a :class:`lifting.layout.ColumnOrder`, for one kernel on a GPU; without it the torch definition runs."""

lift = torch.ops.slidesparse.lift
"""(x [M, K], column_map int64 [K'], backend, order) -> lifted activations [M, K'], as ``quantize_lift``."""

gemm = torch.ops.slidesparse.gemm
"""See :meth:`slidesparse.gemm.backend.Backend.matmul`; ``backend`` is a backend's name."""

linear = torch.ops.slidesparse.linear
"""(x [M, K], tensors, scale_w [out], bias [out], weight) -> [M, out] in the type of x.

It computes ``quantize_lift`` or ``lift``, then ``gemm``. ``weight`` is the text of a
:class:`slidesparse.gemm.spec.WeightSpec`: size and type of the weight, and the form for M tokens. ``tensors`` are those
of all forms, in order."""

rms_norm_linear = torch.ops.slidesparse.rms_norm_linear
"""(x [M, K], norm_weight [K], eps, then as ``linear`` after x) -> ``linear`` of :func:`lifting.prologue.rms_norm`; for
quantised weights only."""

add_rms_norm_linear = torch.ops.slidesparse.add_rms_norm_linear
"""(x [M, K], residual [M, K], norm_weight [K], eps, then as ``linear``) -> its product and the new residual, by
:func:`slidesparse.lifting.prologue.add_rms_norm`."""

gemma_norm_linear = torch.ops.slidesparse.gemma_norm_linear
"""As ``rms_norm_linear``, with 1 added to the norm's weight in float32."""

add_gemma_norm_linear = torch.ops.slidesparse.add_gemma_norm_linear
"""As ``add_rms_norm_linear``, with 1 added to the norm's weight in float32."""

silu_mul_linear = torch.ops.slidesparse.silu_mul_linear
"""(x [M, 2K], then as ``linear``): the same with :func:`slidesparse.lifting.prologue.silu_mul`."""

chain = torch.ops.slidesparse.chain
"""(x, residual [M, K], tensors, linears) -> the product of the last of several linears, and the last new residual.

Each linear reads the product of the one before it, and norms pass a new residual on. ``linears`` is a
:func:`slidesparse.gemm.spec.chain_text`, which assigns ``tensors`` to linears."""
