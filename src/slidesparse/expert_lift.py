"""Quantise and lift the rows of a mixture: the tokens in the order of their experts."""

from __future__ import annotations

import torch

from slidesparse.base.device import runs_triton
from slidesparse.errors import InputError
from slidesparse.layout import ColumnOrder, Layout, Lifted, LinearTensors
from slidesparse.lifting import find_lift, why_no_kernel
from slidesparse.prologue import Prologue


def lift_routed(
    x: torch.Tensor,
    tokens: torch.Tensor,
    column_map: torch.Tensor,
    order: tuple[int, ...],
    target: torch.dtype,
    prologue: Prologue,
    layout: Layout,
    *,
    gather: bool,
) -> Lifted:
    """Lift the token of every row, or the row itself; rows of nobody hold anything.

    Args:
        x: [M, K], the tokens, to gather from them; else [P, K], the rows. Twice as many columns for ``silu_mul``.
        tokens: int64 [P], contiguous: the token of every row, negative for rows of nobody.
        column_map: See :attr:`slidesparse.layout.LinearTensors.column_map`.
        order: :attr:`slidesparse.layout.ColumnOrder.numbers`; empty where the kernel cannot write the order.
        target: torch.int8 or torch.float8_e4m3fn.
        prologue: ``none`` or ``silu_mul``.
        layout: In which the product reads.
        gather: Whether x is the tokens.

    Returns:
        P rows, with their scales.

    Raises:
        InputError: Rows that are not those of ``tokens``, or types that do not fit.
    """
    if x.dim() != 2 or tokens.dtype != torch.int64 or not tokens.is_contiguous() or x.device != tokens.device:
        raise InputError(
            "rows of a mixture to lift",
            got=f"{list(x.shape)}, {tokens.dtype} {list(tokens.shape)} on {tokens.device}",
            needed=f"two dimensions, and contiguous int64 numbers of tokens on {x.device}",
        )
    if not gather and len(x) != len(tokens):
        raise InputError("rows of a mixture to lift", got=len(x), needed=f"{len(tokens)}, one a row of the product")
    on_gpu = runs_triton(x.device) and why_no_kernel(x.dtype, target, x.device, order) is None
    if on_gpu and layout.slabs is not None and x.stride(1) == 1:
        from slidesparse.kernels import lift_routed as kernel

        columns = ColumnOrder(*order)  # type: ignore[arg-type] # mypy does not count them
        lifted = kernel.lift_routed(x, tokens, columns, target, prologue, layout.slabs, gather=gather)
        if lifted is not None:
            return lifted
    rows = x[tokens.clamp(min=0)] if gather else x
    found = find_lift(layout, prologue, len(tokens), x.dtype, target, x.device, order)
    return found(rows, None, LinearTensors(column_map, None, (), None, None, None), 0.0)
