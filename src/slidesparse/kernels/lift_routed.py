"""Quantise and lift the rows of a mixture in one launch, each from its token: nothing is gathered before.

Bytes a row: K inputs read, many of them from L2, since several experts have the same token, and K' written. Rows of
nobody cost a program that ends at once.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from slidesparse.base.torch_private import empty, is_current
from slidesparse.kernels.lift import KernelLift, find_kernel_lift
from slidesparse.kernels.lift_held import routed_kernel
from slidesparse.kernels.lift_launch import configure
from slidesparse.kernels.lift_variant import LiftVariant
from slidesparse.kernels.triton_launcher import Launcher, early_start
from slidesparse.layout import ColumnOrder, Lifted, Slabs
from slidesparse.prologue import Prologue


def lift_routed(
    x: torch.Tensor,
    tokens: torch.Tensor,
    order: ColumnOrder,
    target: torch.dtype,
    prologue: Prologue,
    slabs: Slabs,
    *,
    gather: bool,
) -> Lifted | None:
    """Lift by the kernel; None where it cannot, because the rows are too long to be held, or not of pairs.

    Arguments are checked; see :func:`slidesparse.expert_lift.lift_routed`.
    """
    index, rows = x.get_device(), len(tokens)
    if index >= 0 and not is_current(index):
        with torch.cuda.device(index):
            return lift_routed(x, tokens, order, target, prologue, slabs, gather=gather)
    like = find_kernel_lift(order, x.dtype, target, prologue, rows, x.device, slabs, None)
    if not like.variant.held or like.gathered:
        return None
    values = empty(like.padded, like.width, target, index)
    scale = empty(rows, 1, torch.float32, index)
    if rows:
        tensors = x, tokens, values.view(torch.int16), scale
        _launcher_like(like, gather).run(like.programs, index, tensors, (rows,), (x.stride(0),))
    return Lifted(values.resize_(rows, like.width), scale, None)


def _launcher_like(lift: KernelLift, gather: bool) -> Launcher:
    launch = configure(lift.tokens, lift.order, lift.source.itemsize, lift.prologue)
    return _launcher(lift.variant, launch.num_warps, launch.registers, gather, lift.source, lift.device)


@lru_cache(maxsize=1024)
def _launcher(
    variant: LiftVariant, warps: int, registers: int, gather: bool, source: torch.dtype, device: torch.device
) -> Launcher:
    """Return the launcher for all numbers of rows; a compiled kernel belongs to ``source`` and ``device``."""
    early = early_start() if variant.early else {}
    return Launcher(routed_kernel, (gather, variant), num_warps=warps, maxnreg=registers or None, **early)
