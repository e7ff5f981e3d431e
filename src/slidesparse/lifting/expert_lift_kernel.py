"""Quantisation and lifting of the rows of a grouped product in one launch, straight from their tokens.

One program a token quantises it once and writes it to the rows of all its experts: on an H200 3.3 us for 64 tokens with
eight experts each and 153 us for 16384, against 3.8 and 222 us with one program a row. One program a row is used where
the rows themselves are the input, or tokens have too many experts. Programs of padding rows exit at once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from slidesparse.base.torch_private import empty
from slidesparse.base.triton_launcher import EARLY_START, Launcher
from slidesparse.lifting.kernel import find_kernel_lift
from slidesparse.lifting.launch import Launch
from slidesparse.lifting.layout import Lifted, LiftSpec
from slidesparse.lifting.lift_math import begin, offset_of_row
from slidesparse.lifting.resident import quantised, write
from slidesparse.lifting.variant import LiftVariant

MOST_COPIES = 16
"""Most experts of a token for which its stores are unrolled; with more, each row has its own program."""


@triton.jit(do_not_specialize=["rows"])
def routed_kernel(x_ptr, tokens_ptr, out_ptr, scales_ptr, rows, x_stride, GATHER: tl.constexpr, P: tl.constexpr):
    """Quantise and lift one row a program, from its token or itself; padding rows are not written.

    ``tokens_ptr`` is int64 [rows], negative for padding rows. The prologue is none, or ``silu_mul``.
    """
    begin(P)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row, mask=row < rows, other=-1)
    if token >= 0:
        source = token if GATHER else row
        x_ptr += source * x_stride
        out_ptr += offset_of_row(row, 2, P)
        pairs, _ = quantised(x_ptr, None, None, None, scales_ptr + row, 0.0, P)
        write(x_ptr, pairs, out_ptr, row, None, tl.num_programs(0), 0, P)


@triton.jit(do_not_specialize=["rows"])
def spread_kernel(x_ptr, to_ptr, out_ptr, scales_ptr, rows, x_stride, COPIES: tl.constexpr, P: tl.constexpr):
    """Quantise and lift one token a program, and write it to the rows of its experts.

    ``to_ptr`` is int64 [tokens, COPIES], negative for an expert on another GPU; a slab has ``rows`` rows.
    """
    begin(P)
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_stride
    to_ptr += token * COPIES
    pairs, scale = quantised(x_ptr, None, None, None, None, 0.0, P)
    for copy in tl.static_range(0, COPIES):
        row = tl.load(to_ptr + copy)
        tl.store(scales_ptr + row, scale, mask=row >= 0)
    write(x_ptr, pairs, out_ptr, token, to_ptr, rows, COPIES, P)


def lift_routed(
    x: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, spec: LiftSpec, *, gather: bool
) -> Lifted | None:
    """Lift by a kernel; None for rows too long for registers, or an odd ``k_offset``.

    Nothing is checked; see :func:`lifting.expert_lift.lift_routed`. ``rows`` and ``tokens`` are those of a
    :class:`slidesparse.lifting.expert_order.Arrangement`.
    """
    index, count = x.get_device(), len(tokens)
    like = find_kernel_lift(spec, count, x.device)
    if not like.variant.resident:
        return None
    kind = like.variant, like.config, like.source, like.device
    values, scale = empty(like.padded, like.k_packed, spec.target, index), empty(count, 1, torch.float32, index)
    if gather and rows.shape[1] <= MOST_COPIES:
        launcher = _launcher(*kind, None, rows.shape[1])
        launcher.run(len(rows), index, (x, rows, values.view(torch.int16), scale), (like.padded,), (x.stride(0),))
    elif count:
        tensors = x, tokens, values.view(torch.int16), scale
        _launcher(*kind, gather, 0).run(like.programs, index, tensors, (count,), (x.stride(0),))
    return Lifted(values.resize_(count, like.k_packed), scale, None)


@lru_cache(maxsize=1024)
def _launcher(
    variant: LiftVariant, config: Launch, source: torch.dtype, device: torch.device, gather: bool | None, copies: int
) -> Launcher:
    """Return the launcher for all numbers of rows; a compiled kernel belongs to ``source`` and ``device``."""
    early = EARLY_START if variant.early else {}
    kernel, constant = (spread_kernel, copies) if gather is None else (routed_kernel, gather)
    options = {"num_warps": config.num_warps, "maxnreg": config.registers or None, **early}
    return Launcher(kernel, (constant, variant), **options)
