"""Quantise and lift activations in one launch.

For every token (row) of ``x`` [M, K]: optionally RMSNorm (with or without adding a residual) or SiLU(gate) * up first,
then the scale of the row, its 8-bit values, and those values copied into the packed column order [M, K']. The numbers
are those of :func:`slidesparse.quant.quantize_rows` and :func:`slidesparse.slide.gather`, bit for bit.
:mod:`slidesparse.kernels.lift_held` and :mod:`slidesparse.kernels.lift_walking` are the kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from slidesparse.base.torch_private import current_stream, empty, is_current
from slidesparse.errors import InputError, UnsupportedError
from slidesparse.kernels.lift_held import held_kernel
from slidesparse.kernels.lift_launch import EARLY_ARCH, FP8_ARCH, Launch, configure, device_arch
from slidesparse.kernels.lift_variant import NORMS, First, Plan
from slidesparse.kernels.lift_walking import walking_kernel
from slidesparse.kernels.triton_launcher import ALIGNMENT, LARGEST, Launcher, early_start
from slidesparse.layout import SLAB_BYTES, Columns, Slabs
from slidesparse.quant import QUANTISED
from slidesparse.support import is_vector

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

Read: TypeAlias = tuple[int, int | None, int | None, int | None, int, int]
"""Addresses of the activations, the residual, the weight of the norm and the pairs; strides of the first two."""


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
        first: A function of :mod:`slidesparse.prologue`.
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
        *("columns", "device", "first", "gathered", "index", "launcher", "padded", "plan", "programs", "quantised"),
        *("shape", "source", "target", "tokens", "width"),
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
        launch = configure(tokens, columns, source.itemsize, first, target in QUANTISED)
        early = device.type == "cuda" and arch >= EARLY_ARCH
        self.plan = make_plan(columns, source, target, first, slabs, launch, early)
        self.launcher = _launcher(self.plan, launch, source, device)
        self.columns, self.source, self.target, self.first, self.device = columns, source, target, first, device
        self.index = -1 if device.index is None else device.index
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
        refusal = self._refusal(x, pairs, weight, residual)
        if refusal is not None:
            raise refusal
        index = x.get_device()
        if index < 0 or is_current(index):
            return self._run(index, x, pairs, weight, residual, eps)
        with torch.cuda.device(index):
            return self._run(index, x, pairs, weight, residual, eps)

    # A launch passes addresses, which say neither how much lies behind them nor where and of what type it is.

    def _is_rows(self, x: torch.Tensor | None) -> bool:
        if x is None or x.shape != self.shape or x.dtype != self.source:
            return False
        return x.stride()[1] == 1 and x.device == self.device

    def _is_index(self, pairs: torch.Tensor | None) -> bool:
        return pairs is not None and is_vector(pairs, self.width // 2, self.device, (self.columns.index_dtype,))

    def _is_gain(self, weight: torch.Tensor | None) -> bool:
        return weight is not None and is_vector(weight, self.columns.columns, self.device, (self.source,))

    def _refusal(
        self,
        x: torch.Tensor,
        pairs: torch.Tensor | None,
        weight: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> InputError | None:
        """What is wrong with these, if they are not what this call was made for: sizes, strides, types and device."""
        if not self._is_rows(x):
            return InputError("activations to lift", got=_described(x), needed=self._rows())
        refusal = self.refusal_of_weights(pairs, weight)
        if refusal is None and self.first == "add_rms_norm" and not self._is_rows(residual):
            return InputError("residual", got=_described(residual), needed=self._rows())
        return refusal

    def refusal_of_weights(self, pairs: torch.Tensor | None, weight: torch.Tensor | None) -> InputError | None:
        """The same of what stays from call to call: the index of pairs, and the weight of the norm."""
        if self.gathered and not self._is_index(pairs):
            needed = f"{self.width // 2} {self.columns.index_dtype} numbers on {self.device}, contiguous"
            return InputError("index of pairs", got=_described(pairs), needed=needed)
        if self.first in NORMS and not self._is_gain(weight):
            needed = f"{self.columns.columns} {self.source} numbers on {self.device}, contiguous"
            return InputError("weight of RMSNorm", got=_described(weight), needed=needed)
        return None

    def _rows(self) -> str:
        return f"{list(self.shape)} {self.source} on {self.device}, columns contiguous"

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
        total_at = None if total is None else total.data_ptr()
        scale_at = None if scale is None else scale.data_ptr()
        read = _read(x, pairs, weight, residual)
        if self.can_launch(*read):
            self.launch(index, *read, total_at, values.data_ptr(), scale_at, eps)
            return
        if self.quantised:
            values = values.view(torch.int16 if self.plan.held else torch.int8)
        arguments = (x, residual, total, weight, pairs, values, scale, self.tokens, *read[-2:], float(eps))
        self.launcher.compile_and_launch(self.programs, arguments, _aligned(*read))

    def can_launch(
        self,
        x_at: int,
        residual_at: int | None,
        weight_at: int | None,
        pairs_at: int | None,
        x_stride: int,
        residual_stride: int,
    ) -> bool:
        """Whether a kernel is compiled, and takes these: see :meth:`launch`."""
        return self.launcher.ready and _aligned(x_at, residual_at, weight_at, pairs_at, x_stride, residual_stride)

    def read(
        self, x: torch.Tensor, pairs: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None
    ) -> Read | None:
        """What :meth:`launch` is told of the tensors it reads, if it takes them; ``pairs`` may be empty."""
        if not is_current(self.index) or self._refusal(x, pairs, weight, residual) is not None:
            return None
        read = _read(x, pairs, weight, residual)
        return read if self.can_launch(*read) else None

    def takes(self, x: torch.Tensor) -> bool:
        """These are activations, or a residual, as this call was made for, and their device is the current one."""
        return is_current(self.index) and self._is_rows(x)

    def launch(
        self,
        index: int,
        x_at: int,
        residual_at: int | None,
        weight_at: int | None,
        pairs_at: int | None,
        x_stride: int,
        residual_stride: int,
        total_at: int | None,
        values_at: int,
        scale_at: int | None,
        eps: float,
    ) -> None:
        """Launch by addresses, of which nothing is checked; :meth:`can_launch` must hold.

        Args:
            index: Of the device, which is the current one.
            x_at: Address of the activations.
            residual_at: Of the residual; None where the kernel reads none, as below.
            weight_at: Of the weight of the norm.
            pairs_at: Of the pairs.
            x_stride: Elements between two rows of the activations.
            residual_stride: Of the residual; 0 without.
            total_at: Of memory for the new residual [M, K]; a multiple of 16, as below.
            values_at: Of memory for the values, ``padded`` rows of ``width``.
            scale_at: Of memory for M scales; None where nothing is quantised.
            eps: Of the norm.
        """
        addresses = x_at, residual_at, total_at, weight_at, pairs_at, values_at, scale_at
        stream = current_stream(index)
        self.launcher.launch(self.programs, stream, *addresses, self.tokens, x_stride, residual_stride, eps)


def _read(
    x: torch.Tensor, pairs: torch.Tensor | None, weight: torch.Tensor | None, residual: torch.Tensor | None
) -> Read:
    residual_at, residual_stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride()[0])
    weight_at = None if weight is None else weight.data_ptr()
    pairs_at = None if pairs is None else pairs.data_ptr() or None  # an empty tensor is at no address
    return x.data_ptr(), residual_at, weight_at, pairs_at, x.stride()[0], residual_stride


def _aligned(
    x_at: int, residual_at: int | None, weight_at: int | None, pairs_at: int | None, x_stride: int, residual_stride: int
) -> bool:
    """What Triton compiled for multiples of 16 can take these; what torch has just allocated is aligned."""
    bits = x_at | x_stride | residual_stride | (residual_at or 0) | (weight_at or 0) | (pairs_at or 0)
    return bits % ALIGNMENT == 0 and x_stride <= LARGEST and residual_stride <= LARGEST


def _described(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"


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
