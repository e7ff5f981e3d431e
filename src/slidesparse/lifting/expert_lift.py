"""Quantisation and lifting of the rows of a grouped product: tokens, sorted by expert."""

from __future__ import annotations

from functools import lru_cache

import torch

from slidesparse.base.device import runs_triton
from slidesparse.errors import InputError
from slidesparse.lifting.choose import find_lift, why_no_kernel
from slidesparse.lifting.expert_order import Arrangement
from slidesparse.lifting.layout import Lifted, LiftSpec, LinearTensors


def lift_routed(
    x: torch.Tensor, arrangement: Arrangement, column_map: torch.Tensor, spec: LiftSpec, *, gather: bool
) -> Lifted:
    """Lift the token of every row, or the row itself; values and scales of padding rows are undefined.

    Args:
        x: The tokens [M, K] with ``gather``, else the rows [P, K]. Twice as many columns for ``silu_mul``.
        arrangement: The rows of the tokens; its tensors are contiguous.
        column_map: See :attr:`slidesparse.lifting.layout.LinearTensors.column_map`.
        spec: The lift: to 8 bits, with no prologue or ``silu_mul``.
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
    if spec.layout.slabs is not None and x.stride(1) == 1 and _has_kernel(spec, x.device):
        from slidesparse.lifting import expert_lift_kernel as kernel

        lifted = kernel.lift_routed(x, arrangement.rows, arrangement.tokens, spec, gather=gather)
        if lifted is not None:
            return lifted
    rows = x[arrangement.tokens.clamp(min=0)] if gather else x
    return find_lift(spec, len(rows), x.device)(rows, None, LinearTensors(column_map, (), None, None, None), 0.0)


@lru_cache(maxsize=64)
def _has_kernel(spec: LiftSpec, device: torch.device) -> bool:
    """Return whether a kernel lifts on this device; cached, since a layer asks twice for every batch."""
    return runs_triton(device) and why_no_kernel(spec, device) is None
