"""Quantise and lift the rows of a grouped product: tokens, sorted by expert."""

from __future__ import annotations

from functools import lru_cache

import torch

from slidesparse.base.device import runs_triton
from slidesparse.errors import InputError
from slidesparse.lifting.choose import find_lift, why_no_kernel
from slidesparse.lifting.expert_order import Arrangement
from slidesparse.lifting.layout import ColumnOrder, Layout, Lifted, LinearTensors
from slidesparse.lifting.prologue import Prologue


def lift_routed(
    x: torch.Tensor,
    arrangement: Arrangement,
    column_map: torch.Tensor,
    order: tuple[int, ...],
    target: torch.dtype,
    prologue: Prologue,
    layout: Layout,
    *,
    gather: bool,
) -> Lifted:
    """Lift the token of every row, or the row itself: values and scales of P rows; those of padding rows are undefined.

    Args:
        x: The tokens [M, K] with ``gather``, else the rows [P, K]. Twice as many columns for ``silu_mul``.
        arrangement: The rows of the tokens; its tensors are contiguous.
        column_map: See :attr:`slidesparse.lifting.layout.LinearTensors.column_map`.
        order: :attr:`slidesparse.lifting.layout.ColumnOrder.numbers`; empty where the kernel cannot write the order.
        target: torch.int8 or torch.float8_e4m3fn.
        prologue: ``none`` or ``silu_mul``.
        layout: The layout in which the product reads activations.
        gather: Whether ``x`` holds tokens, which are gathered into rows.

    Raises:
        InputError: ``x`` does not match ``arrangement`` in size or device.
    """
    needed = len(arrangement.rows if gather else arrangement.tokens)
    if x.dim() != 2 or len(x) != needed or x.device != arrangement.tokens.device:
        raise InputError(
            "rows of a mixture to lift",
            got=f"{list(x.shape)} on {x.device}",
            needed=f"{needed} on {arrangement.tokens.device}",
        )
    if layout.slabs is not None and x.stride(1) == 1 and _has_kernel(x.dtype, target, x.device, order):
        from slidesparse.lifting import expert_lift_kernel as kernel

        columns = ColumnOrder(*order)  # type: ignore[arg-type] # mypy does not count them
        rows, tokens = arrangement.rows, arrangement.tokens
        lifted = kernel.lift_routed(x, rows, tokens, columns, target, prologue, layout.slabs, gather=gather)
        if lifted is not None:
            return lifted
    rows = x[arrangement.tokens.clamp(min=0)] if gather else x
    found = find_lift(layout, prologue, len(rows), x.dtype, target, x.device, order)
    return found(rows, None, LinearTensors(column_map, None, (), None, None, None), 0.0)


@lru_cache(maxsize=64)
def _has_kernel(source: torch.dtype, target: torch.dtype, device: torch.device, order: tuple[int, ...]) -> bool:
    """Return whether a kernel lifts on this device; cached, since a layer asks twice for every batch."""
    return runs_triton(device) and why_no_kernel(source, target, device, order) is None
