"""Lifts with a prologue, as the fused forms of the operator ``linear`` run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slidesparse.gemm import get_backend
from slidesparse.lifting.layout import ColumnOrder, Layout, Lifted, LiftSpec, LinearTensors, Slabs
from slidesparse.lifting.prologue import Prologue
from slidesparse.ops.resolve import resolve_lift
from slidesparse.weights.quant import ActivationRounding


def quantize_lift(
    x: torch.Tensor,
    order: ColumnOrder,
    target: torch.dtype,
    prologue: Prologue = "none",
    *,
    norm_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 0.0,
    slabs: Slabs | None = None,
    activation_rounding: ActivationRounding = "vllm",
) -> Lifted:
    """Lift by a kernel; see :class:`slidesparse.lifting.kernel.KernelLift`."""
    from slidesparse.lifting.kernel import find_kernel_lift  # needs Triton

    spec = LiftSpec(prologue, x.dtype, target, tuple(order.numbers), Layout(slabs=slabs), activation_rounding)
    lift = find_kernel_lift(spec, len(x), x.device)
    return lift.run(x, residual, norm_weight, eps)


def fused_lift(
    prologue: Prologue,
    given: Sequence[Any],
    column_map: torch.Tensor,
    dtype: torch.dtype,
    backend: str = "reference",
    order: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Return lifted values, their scale, and the new residual with ``add_rms_norm``.

    Args:
        prologue: Applied first.
        given: Its arguments: (x, norm_weight, eps), (x, residual, norm_weight, eps) or (x,).
        column_map: See :class:`slidesparse.lifting.layout.LinearTensors`.
        dtype: Type of the values.
        backend: The backend whose layout they have.
        order: :attr:`slidesparse.lifting.layout.ColumnOrder.numbers`.
    """
    x, *residual, norm_weight, eps = given if len(given) > 1 else (*given, None, 0.0)
    spec = LiftSpec(prologue, x.dtype, dtype, tuple(order), get_backend(backend).layout)
    lift = resolve_lift(spec, x.shape[0], x.device)
    tensors = LinearTensors(column_map, (), None, None, norm_weight)
    return tuple(made for made in lift(x, residual[0] if residual else None, tensors, eps) if made is not None)
