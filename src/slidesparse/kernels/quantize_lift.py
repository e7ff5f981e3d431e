"""Quantise and lift activations in one launch.

For every token (row) of ``x`` [M, K]: optionally RMSNorm (with or without adding a residual) or SiLU(gate) * up first,
then the scale of the row, its 8-bit values, and those values copied into the packed column order [M, K']. The numbers
are those of :func:`slidesparse.quant.quantize_rows` and :func:`slidesparse.slide.gather`, bit for bit.
:mod:`slidesparse.kernels.held_kernel` and :mod:`slidesparse.kernels.walking_kernel` are the kernels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.kernels.columns import SLAB_BYTES, Columns, Slabs
from slidesparse.kernels.held_kernel import held_kernel
from slidesparse.kernels.launch import FP8_ARCH, Launch, configure, device_arch
from slidesparse.kernels.plan import Plan
from slidesparse.kernels.walking_kernel import walking_kernel
from slidesparse.quant import QUANTISED, Quantised

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def quantize_lift(
    x: torch.Tensor,
    columns: Columns,
    dtype: torch.dtype,
    *,
    slabs: Slabs | None = None,
    rows: int | None = None,
) -> Quantised:
    """Quantise every token with its own scale and lift it.

    Args:
        x: [M, K], bfloat16, float16 or float32, any row stride, columns contiguous.
        columns: The packed column order.
        dtype: torch.int8 or torch.float8_e4m3fn.
        slabs: A tile-contiguous layout; row-major when None.
        rows: Allocate at least so many rows, for a GEMM that reads whole tiles. What lies past M is not written.

    Returns:
        Values [M, K'] in ``dtype`` (or ``slabs.shape``), and scale float32 [M, 1]. A row that holds NaN or Inf gets a
        scale that is NaN or Inf; its values mean nothing.

    Raises:
        InputError: When shapes, types or strides do not fit.
        UnsupportedError: FP8 on a GPU without FP8 conversions.
    """
    return _run(x, columns, dtype, "none", slabs=slabs, rows=rows)


def lift(x: torch.Tensor, columns: Columns, *, slabs: Slabs | None = None, rows: int | None = None) -> torch.Tensor:
    """Lift without quantising: x [M, K] -> [M, K'] of the same float type, bit for bit."""
    return _run(x, columns, x.dtype, "none", slabs=slabs, rows=rows).values


def rms_norm_quantize_lift(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    columns: Columns,
    dtype: torch.dtype,
    *,
    slabs: Slabs | None = None,
    rows: int | None = None,
) -> Quantised:
    """:func:`slidesparse.elementwise.rms_norm`, then :func:`quantize_lift`.

    Args:
        x: [M, K].
        weight: [K], gain of the norm, in x's type.
        eps: Added to the mean square.
        columns: The packed column order.
        dtype: torch.int8 or torch.float8_e4m3fn.
        slabs: A tile-contiguous layout; row-major when None.
        rows: See :func:`quantize_lift`.
    """
    _check_norm(weight, x, columns)
    return _run(x, columns, dtype, "rms_norm", weight=weight, eps=eps, slabs=slabs, rows=rows)


def add_rms_norm_quantize_lift(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    columns: Columns,
    dtype: torch.dtype,
    *,
    slabs: Slabs | None = None,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`slidesparse.elementwise.add_rms_norm`, then :func:`quantize_lift`.

    Args:
        x: [M, K].
        residual: [M, K] in x's type, any row stride.
        weight: [K], gain of the norm, in x's type.
        eps: Added to the mean square.
        columns: The packed column order.
        dtype: torch.int8 or torch.float8_e4m3fn.
        slabs: A tile-contiguous layout; row-major when None.
        rows: See :func:`quantize_lift`.

    Returns:
        Values, scale, and ``x + residual`` [M, K], the new residual.
    """
    _check_norm(weight, x, columns)
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(-1) != 1:
        raise InputError(
            "residual", got=f"{list(residual.shape)} {residual.dtype}", needed=f"{list(x.shape)} {x.dtype}, rows dense"
        )
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = {"residual": residual, "total": total}
    values, scale = _run(x, columns, dtype, "add_rms_norm", weight=weight, eps=eps, slabs=slabs, rows=rows, **sums)
    return values, scale, total


def _check_norm(weight: torch.Tensor, x: torch.Tensor, columns: Columns) -> None:
    if weight.shape != (columns.columns,) or weight.dtype != x.dtype or not weight.is_contiguous():
        raise InputError(
            "weight of RMSNorm", got=f"{list(weight.shape)} {weight.dtype}", needed=f"[{columns.columns}] {x.dtype}"
        )


def silu_mul_quantize_lift(
    x: torch.Tensor,
    columns: Columns,
    dtype: torch.dtype,
    *,
    slabs: Slabs | None = None,
    rows: int | None = None,
) -> Quantised:
    """:func:`slidesparse.elementwise.silu_mul`, then :func:`quantize_lift`.

    Args:
        x: [M, 2K], gate then up.
        columns: The packed column order of K columns.
        dtype: torch.int8 or torch.float8_e4m3fn.
        slabs: A tile-contiguous layout; row-major when None.
        rows: See :func:`quantize_lift`.
    """
    return _run(x, columns, dtype, "silu_mul", slabs=slabs, rows=rows)


class _Variant:
    """A plan with its launch, and the kernel that Triton compiled for it, once it has.

    Launching a compiled kernel spares Triton's binding and hashing of every argument, which takes longer than a small
    launch. It is kept for arguments that are all aligned, which is what Triton compiled it for.
    """

    def __init__(self, plan: Plan, launch: Launch) -> None:
        self.plan = plan
        self.kernel = held_kernel if plan.held else walking_kernel
        self.num_warps = launch.num_warps
        self.compiled: triton.compiler.CompiledKernel | None = None

    def __call__(self, rows: int, arguments: tuple[object, ...], aligned: bool) -> None:
        if aligned and self.compiled is not None:
            self.compiled[(rows, 1, 1)](*arguments, self.plan)
            return
        compiled = self.kernel[(rows,)](*arguments, self.plan, num_warps=self.num_warps)
        if aligned:
            self.compiled = compiled


def _run(
    x: torch.Tensor,
    columns: Columns,
    dtype: torch.dtype,
    first: str,
    *,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    eps: float = 0.0,
    slabs: Slabs | None = None,
    rows: int | None = None,
) -> Quantised:
    needed = columns.columns * (2 if first == "silu_mul" else 1)
    if x.dim() != 2 or x.shape[1] != needed or x.dtype not in FLOATS or x.stride(1) != 1:
        raise InputError(
            "activations to lift",
            got=f"{list(x.shape)} {x.dtype}, strides {x.stride()}",
            needed=f"[M, {needed}] bf16, fp16 or fp32, columns contiguous",
        )
    if rows is not None and slabs is not None:
        raise InputError("rows and slabs", got=rows, needed="one of them: slabs come in whole tiles")
    tokens, device = x.shape[0], x.device
    variant = _variant(columns, x.dtype, dtype, first, slabs, tokens, device)
    plan = variant.plan
    if slabs is None:
        launched, room = tokens, max(tokens, rows or 0)
        values = torch.empty(room, columns.width, dtype=dtype, device=device)
    else:
        shape = slabs.shape(tokens, columns.width, dtype.itemsize)
        launched, room = shape[0] * slabs.rows, tokens
        values = torch.empty(shape, dtype=dtype, device=device)
    scale = torch.empty(room if plan.quant != "none" else 0, 1, dtype=torch.float32, device=device)
    if launched and columns.width:
        given = [tensor for tensor in (x, residual, total, weight, columns.groups) if tensor is not None]
        strides = (x.stride(0), 0 if residual is None else residual.stride(0))
        aligned = not any(tensor.data_ptr() % 16 for tensor in given) and not any(s % 16 or s >= 2**31 for s in strides)
        out = values if plan.quant == "none" else values.view(torch.int16 if plan.held else torch.int8)
        variant(
            launched, (x, residual, total, weight, columns.groups, out, scale, tokens, *strides, float(eps)), aligned
        )
    return Quantised(values, scale) if room == tokens else Quantised(values[:tokens], scale[:tokens])


@lru_cache(maxsize=1 << 16)
def _variant(
    columns: Columns,
    source: torch.dtype,
    target: torch.dtype,
    first: str,
    slabs: Slabs | None,
    tokens: int,
    device: torch.device,
) -> _Variant:
    """What a call needs that does not depend on its tensors; one look-up a call."""
    arch = device_arch(device)
    if target == torch.float8_e4m3fn and arch < FP8_ARCH:
        raise UnsupportedError("FP8 on this GPU", got=f"sm_{arch}", needed=f"sm_{FP8_ARCH} or newer", remedy="use int8")
    launch = configure(arch, tokens, columns, source.itemsize, first, target in QUANTISED)
    return _shared_variant(make_plan(columns, source, target, first, slabs, launch), launch, source, device)


@lru_cache(maxsize=4096)
def _shared_variant(plan: Plan, launch: Launch, source: torch.dtype, device: torch.device) -> _Variant:
    """One for all numbers of tokens; ``source`` and ``device`` because a compiled kernel belongs to them."""
    return _Variant(plan, launch)


def make_plan(
    columns: Columns, source: torch.dtype, target: torch.dtype, first: str, slabs: Slabs | None, launch: Launch
) -> Plan:
    """The plan of a launch.

    Args:
        columns: The packed column order.
        source: Type of the input.
        target: Type of the output; the input's own type to lift only.
        first: See :class:`Plan`.
        slabs: Layout of the output.
        launch: Columns of a step.
    """
    if target not in QUANTISED and target != source:
        raise InputError("type to lift to", got=target, needed="torch.int8, torch.float8_e4m3fn or the input's type")
    if slabs is not None and columns.dense_columns * target.itemsize % SLAB_BYTES:
        raise InputError("a segment in slabs", got=columns.dense_columns, needed=f"a multiple of {SLAB_BYTES} bytes")
    return Plan(
        columns=columns.columns,
        half=columns.group // 2,
        k_offset=columns.k_offset,
        dense_groups=columns.dense_groups,
        slid_groups=columns.slid_groups,
        dense_columns=columns.dense_columns,
        slid_columns=columns.slid_columns,
        gathered=columns.groups is not None,
        first=first,
        quant={torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(target, "none"),
        itemsize=target.itemsize,
        slab_rows=0 if slabs is None else slabs.rows,
        swizzle=slabs is not None and slabs.swizzle,
        read=launch.read,
        write=launch.write,
    )
