"""Quantise and lift activations in one launch.

For every token (row) of ``x`` [M, K]: optionally RMSNorm (with or without adding a residual) or SiLU(gate) * up first,
then the scale of the row, its 8-bit values, and those values copied into the packed column order [M, K']. The numbers
are those of :func:`slidesparse.quant.quantize_rows` and :func:`slidesparse.slide.gather`, bit for bit.
:mod:`slidesparse.kernels.held_kernel` and :mod:`slidesparse.kernels.walking_kernel` are the kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.kernels.columns import SLAB_BYTES, Columns, Slabs
from slidesparse.kernels.held_kernel import held_kernel
from slidesparse.kernels.launch import EARLY_ARCH, FP8_ARCH, Launch, configure, device_arch
from slidesparse.kernels.launcher import ALIGNMENT, LARGEST, Launcher, current_stream, early_start, empty, is_current
from slidesparse.kernels.plan import First, Plan
from slidesparse.kernels.walking_kernel import walking_kernel
from slidesparse.quant import QUANTISED

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

NORMS = ("rms_norm", "add_rms_norm")


class Lifted(NamedTuple):
    """What a call gives.

    Attributes:
        values: [M, K'], 8-bit or in the type of the activations, in the layout asked for.
        scale: float32 [M, 1]; None when nothing was quantised.
        residual: [M, K], ``x + residual`` behind ``add_rms_norm``; else None.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    residual: torch.Tensor | None


def quantize_lift(
    x: torch.Tensor,
    columns: Columns,
    target: torch.dtype,
    first: First = "none",
    *,
    pairs: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 0.0,
    slabs: Slabs | None = None,
    rows: int | None = None,
) -> Lifted:
    """Quantise every token with its own scale and lift it, behind what comes ``first``.

    A row that holds NaN or Inf gets a scale that is NaN or Inf; its values mean nothing.

    Args:
        x: [M, K], bfloat16, float16 or float32, any row stride, columns contiguous. [M, 2K] for ``silu_mul``.
        columns: The packed column order.
        target: torch.int8, torch.float8_e4m3fn, or x's type: lift alone, bit for bit.
        first: A function of :mod:`slidesparse.elementwise`.
        pairs: Stands for ``columns.pairs`` where ``columns`` is without them.
        weight: [K] in x's type, the gain of the norm.
        residual: [M, K] in x's type, columns contiguous, for ``add_rms_norm``.
        eps: Of the norm.
        slabs: Slab after slab; row-major when None.
        rows: Allocate at least so many rows, for a GEMM that reads whole tiles. What lies past M is not written.

    Raises:
        InputError: When shapes, types or strides do not fit.
        UnsupportedError: FP8 on a GPU without FP8 conversions.
    """
    if x.dim() != 2:
        raise InputError("activations to lift", got=list(x.shape), needed="[M, K]")
    call = call_for(columns.without_pairs, x.dtype, target, first, x.shape[0], x.device, slabs, rows)
    return call(x, columns.pairs if pairs is None else pairs, weight, residual, eps)


# -- one call ------------------------------------------------------------------------------------------------------


class Call:
    """Everything of a call that does not depend on its tensors' contents: made once, called often.

    Args:
        columns: The packed column order.
        source: Type of the activations.
        target: torch.int8, torch.float8_e4m3fn, or ``source`` to lift only.
        first: What comes first.
        tokens: M.
        device: Where.
        slabs: Slab after slab; row-major when None.
        rows: Allocate at least so many rows.

    Raises:
        InputError: A layout that does not fit.
        UnsupportedError: FP8 on a GPU without FP8 conversions.
    """

    __slots__ = (
        *("columns", "device", "first", "gathered", "launcher", "padded", "plan", "programs", "quantised", "shape"),
        *("source", "target", "tokens", "width"),
    )

    def __init__(
        self,
        columns: Columns,
        source: torch.dtype,
        target: torch.dtype,
        first: First,
        tokens: int,
        device: torch.device,
        slabs: Slabs | None,
        rows: int | None,
    ) -> None:
        if source not in FLOATS:
            raise InputError("activations to lift", got=source, needed="bf16, fp16 or fp32")
        if rows is not None and slabs is not None:
            raise InputError("rows and slabs", got=rows, needed="one of them: slabs are padded by themselves")
        arch = device_arch(device)
        if target == torch.float8_e4m3fn and arch < FP8_ARCH:
            raise UnsupportedError(
                "FP8 on this GPU", got=f"sm_{arch}", needed=f"sm_{FP8_ARCH} or newer", remedy="use int8"
            )
        launch = configure(arch, tokens, columns, source.itemsize, first, target in QUANTISED)
        early = device.type == "cuda" and arch >= EARLY_ARCH
        self.plan = make_plan(columns, source, target, first, slabs, launch, early)
        self.launcher = _launcher(self.plan, launch, source, device)
        self.columns, self.source, self.target, self.first, self.device = columns, source, target, first, device
        self.quantised, self.gathered, self.width = self.plan.quant != "none", columns.gathered, columns.width
        if slabs is None:
            self.programs, self.padded = tokens, max(tokens, rows or 0)
        else:
            self.programs = self.padded = slabs.shape(tokens, columns.width, target.itemsize)[1]
        self.tokens, self.shape = tokens, (tokens, columns.columns * (2 if first == "silu_mul" else 1))

    def __call__(
        self,
        x: torch.Tensor,
        pairs: torch.Tensor | None,
        weight: torch.Tensor | None,
        residual: torch.Tensor | None,
        eps: float,
    ) -> Lifted:
        """Run on tensors of the types, the rows and the device that this call was made for; the rest is checked.

        Raises:
            InputError: As :func:`quantize_lift`.
        """
        self._check(x, pairs, weight, residual)
        index = x.get_device()
        if index < 0 or is_current(index):
            return self._run(index, x, pairs, weight, residual, eps)
        with torch.cuda.device(index):
            return self._run(index, x, pairs, weight, residual, eps)

    # A launch passes addresses, which say neither how much lies behind them nor where and of what type it is.

    def _check(
        self,
        x: torch.Tensor,
        pairs: torch.Tensor | None,
        weight: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> None:
        if x.shape != self.shape or x.stride(1) != 1:
            raise InputError(
                "activations to lift",
                got=f"{list(x.shape)} {x.dtype}, strides {x.stride()}",
                needed=f"{list(self.shape)} {self.source}, columns contiguous",
            )
        if self.gathered:
            self._check_pairs(pairs)
        if self.first in NORMS:
            self._check_norm(weight, residual)

    def _check_pairs(self, pairs: torch.Tensor | None) -> None:
        count, dtype = self.columns.width // 2, torch.int16 if self.columns.columns < 2**15 else torch.int32
        right = pairs is not None and pairs.shape == (count,) and pairs.dtype == dtype and pairs.is_contiguous()
        if pairs is None or not right:
            got = "none" if pairs is None else f"{list(pairs.shape)} {pairs.dtype}, strides {pairs.stride()}"
            raise InputError("index of pairs", got=got, needed=f"[{count}] {dtype}, contiguous")
        self._check_device(pairs)

    def _check_norm(self, weight: torch.Tensor | None, residual: torch.Tensor | None) -> None:
        (_, columns), dtype = self.shape, self.source
        if weight is None or weight.shape != (columns,) or weight.dtype != dtype or not weight.is_contiguous():
            got = "none" if weight is None else f"{list(weight.shape)} {weight.dtype}"
            raise InputError("weight of RMSNorm", got=got, needed=f"[{columns}] {dtype}, contiguous")
        self._check_device(weight)
        if self.first != "add_rms_norm":
            return
        right = residual is not None and residual.shape == self.shape and residual.dtype == dtype
        if residual is None or not right or residual.stride(1) != 1:
            got = "none" if residual is None else f"{list(residual.shape)} {residual.dtype}, {residual.stride()}"
            raise InputError("residual", got=got, needed=f"{list(self.shape)} {dtype}, columns contiguous")
        self._check_device(residual)

    def _check_device(self, other: torch.Tensor) -> None:
        if other.device != self.device:
            raise InputError("tensors to quantise and lift", got=f"{self.device}, {other.device}", needed="one device")

    def _run(
        self,
        index: int,
        x: torch.Tensor,
        pairs: torch.Tensor | None,
        weight: torch.Tensor | None,
        residual: torch.Tensor | None,
        eps: float,
    ) -> Lifted:
        tokens, width = self.tokens, self.width
        values = empty(self.padded, width, self.target, index)
        scale = empty(tokens, 1, torch.float32, index) if self.quantised else None
        total = empty(*self.shape, self.source, index) if self.first == "add_rms_norm" else None
        if tokens and width:
            self._launch(index, x, pairs if self.gathered else None, weight, residual, total, values, scale, eps)
        if self.padded != tokens:
            values.resize_(tokens, width)  # the memory behind them stays; a view would be another tensor to make
        return Lifted(values, scale, total)

    def _launch(
        self,
        index: int,
        x: torch.Tensor,
        pairs: torch.Tensor | None,
        weight: torch.Tensor | None,
        residual: torch.Tensor | None,
        total: torch.Tensor | None,
        values: torch.Tensor,
        scale: torch.Tensor | None,
        eps: float,
    ) -> None:
        residual_at, residual_stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
        total_at = None if total is None else total.data_ptr()
        weight_at = None if weight is None else weight.data_ptr()
        pairs_at = None if pairs is None else pairs.data_ptr()
        scale_at = None if scale is None else scale.data_ptr()
        read, strides = (x.data_ptr(), residual_at, total_at, weight_at, pairs_at), (x.stride(0), residual_stride)
        if self.launch(index, *read, values.data_ptr(), scale_at, *strides, eps):
            return
        if self.quantised:
            values = values.view(torch.int16 if self.plan.held else torch.int8)
        tensors = (x, residual, total, weight, pairs, values, scale)
        aligned = _aligned(x.data_ptr(), residual_at, weight_at, pairs_at, *strides)
        self.launcher.compile_and_launch(self.programs, (*tensors, self.tokens, *strides, float(eps)), aligned)

    def launch(
        self,
        index: int,
        x_at: int,
        residual_at: int | None,
        total_at: int | None,
        weight_at: int | None,
        pairs_at: int | None,
        values_at: int,
        scale_at: int | None,
        x_stride: int,
        residual_stride: int,
        eps: float,
    ) -> bool:
        """Launch by addresses alone, if a kernel is compiled and they are as aligned as it takes them.

        Nothing else is checked here.

        Args:
            index: Of the device, which is the current one.
            x_at: Address of the activations.
            residual_at: Of the residual; None where the kernel reads none, as below.
            total_at: Of the new residual [M, K], contiguous.
            weight_at: Of the weight of the norm.
            pairs_at: Of the pairs.
            values_at: Of memory for the values, ``padded`` rows of ``width``; a multiple of 16.
            scale_at: Of memory for M scales, likewise.
            x_stride: Elements between two rows of the activations.
            residual_stride: Of the residual; 0 without.
            eps: Of the norm.

        Returns:
            Whether it was launched.
        """
        launcher = self.launcher
        aligned = _aligned(x_at, residual_at, weight_at, pairs_at, x_stride, residual_stride)
        if not (aligned and launcher.ready):
            return False
        addresses = (x_at, residual_at, total_at, weight_at, pairs_at, values_at, scale_at)
        launcher.launch(self.programs, current_stream(index), *addresses, self.tokens, x_stride, residual_stride, eps)
        return True


def _aligned(
    x_at: int, residual_at: int | None, weight_at: int | None, pairs_at: int | None, x_stride: int, residual_stride: int
) -> bool:
    """What Triton compiled for multiples of 16 can take these; what torch has just allocated is aligned."""
    bits = x_at | x_stride | residual_stride | (residual_at or 0) | (weight_at or 0) | (pairs_at or 0)
    return bits % ALIGNMENT == 0 and x_stride <= LARGEST and residual_stride <= LARGEST


call_for = lru_cache(maxsize=1 << 16)(Call)
"""One look-up a call: a model has few linears, and a server many numbers of tokens."""


@lru_cache(maxsize=4096)
def _launcher(plan: Plan, launch: Launch, source: torch.dtype, device: torch.device) -> Launcher:
    """One for all numbers of tokens; ``source`` and ``device`` because a compiled kernel belongs to them."""
    kernel, most = held_kernel if plan.held else walking_kernel, launch.registers or None
    early = early_start() if plan.early else {}
    return Launcher(kernel, (plan,), num_warps=launch.num_warps, maxnreg=most, **early)


def make_plan(
    columns: Columns,
    source: torch.dtype,
    target: torch.dtype,
    first: First,
    slabs: Slabs | None,
    launch: Launch,
    early: bool = False,
) -> Plan:
    """The plan of a launch.

    Args:
        columns: The packed column order.
        source: Type of the input.
        target: Type of the output; the input's own type to lift only.
        first: See :class:`Plan`.
        slabs: Layout of the output.
        launch: Columns of a step.
        early: See :class:`Plan`.
    """
    if target not in QUANTISED and target != source:
        raise InputError("type to lift to", got=target, needed="torch.int8, torch.float8_e4m3fn or the input's type")
    if slabs is not None and columns.dense_columns * target.itemsize % SLAB_BYTES:
        raise InputError("a segment in slabs", got=columns.dense_columns, needed=f"a multiple of {SLAB_BYTES} bytes")
    steps = launch.read, launch.write
    if slabs is not None and any(step * target.itemsize % SLAB_BYTES for step in steps):
        raise InputError("steps of a launch that writes slabs", got=steps, needed=f"multiples of {SLAB_BYTES} bytes")
    return Plan(
        columns=columns.columns,
        half=columns.group // 2,
        k_offset=columns.k_offset,
        dense_groups=columns.dense_groups,
        slid_groups=columns.slid_groups,
        dense_columns=columns.dense_columns,
        slid_columns=columns.slid_columns,
        gathered=columns.gathered,
        first=first,
        quant={torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(target, "none"),
        itemsize=target.itemsize,
        slab_rows=0 if slabs is None else slabs.rows,
        swizzle=slabs is not None and slabs.swizzle,
        read=launch.read,
        write=launch.write,
        early=early,
    )
