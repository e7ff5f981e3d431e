"""Quantisation and lifting of activations in one launch.

For every token (row) of ``x`` [M, K]: the prologue, if any (RMSNorm, with or without adding a residual, or
SiLU(gate) * up); then the scale of the row, its 8-bit values, and these values copied into the packed column order
[M, K']. The numbers are those of :func:`weights.quant.quantize_rows` and :func:`weights.slide.gather`, bit for
bit. :mod:`slidesparse.lifting.resident` and :mod:`slidesparse.lifting.walking` are the kernels.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from slidesparse.base.torch_private import current_stream, empty, is_current
from slidesparse.base.triton_launcher import ALIGNMENT, EARLY_START, Launcher
from slidesparse.errors import InputError
from slidesparse.lifting.addresses import LiftInputs, inputs_of, is_aligned
from slidesparse.lifting.launch import FEW_TOKENS, Launch, configure, make_variant, starts_early
from slidesparse.lifting.layout import Lifted, LiftSpec, LinearTensors
from slidesparse.lifting.prologue import ADDING, NORMS
from slidesparse.lifting.resident import resident_kernel
from slidesparse.lifting.variant import LiftVariant
from slidesparse.lifting.walking import walking_kernel
from slidesparse.weights.quant import QUANTISED
from slidesparse.weights.support import is_vector, with_contiguous_columns

KEPT = (
    *("_read", "config", "device", "index", "k_packed", "launcher", "layout", "order", "prologue"),
    *("quantised", "source", "spec", "target", "variant"),
)
"""Attributes that lifts of all numbers of tokens share."""


class KernelLift:
    """A lift of M tokens by a Triton kernel, made once for all tensors of these sizes and types.

    A row with NaN or Inf gets a NaN or Inf scale, and undefined values.

    Args:
        spec: The lift, for which :func:`slidesparse.lifting.choose.why_no_kernel` returns None.
        tokens: M.
        device: The device of the activations.

    Attributes:
        config: The sizes of its launch.
        index: Index of the device; negative in Triton's interpreter.
        shape: Shape of the activations.
        k_packed: Packed columns K'.
        padded: Rows of memory that the values take.
        quantised: Whether there are scales.

    Raises:
        InputError: A type or a layout that does not fit.
    """

    __slots__ = (*KEPT, "padded", "programs", "shape", "tokens")

    def __init__(self, spec: LiftSpec, tokens: int, device: torch.device) -> None:
        prologue, source, target, _, layout, _ = spec
        self.prologue, self.source, self.target, self.layout = prologue, source, target, layout
        self.spec, self.device, self.order = spec, device, spec.columns
        self.config = configure(tokens, self.order, source.itemsize, prologue, target in QUANTISED)
        self.variant = make_variant(spec, self.config, early=starts_early(device))
        self.launcher = _launcher(self.variant, self.config, source, device)
        self.index = -1 if device.index is None else device.index
        self.quantised = self.variant.quant != "none"
        self.k_packed, self._read = self.order.k_packed, spec.read
        if layout.slabs is not None:
            layout.slabs.shape(tokens, self.k_packed, target.itemsize)  # refuses columns that do not fill slabs
        self._size(tokens)

    def _size(self, tokens: int) -> None:
        slabs = self.layout.slabs
        self.padded = max(tokens, self.layout.rows(tokens)) if slabs is None else slabs.padded(tokens)
        self.programs = tokens if slabs is None else self.padded
        self.tokens, self.shape = tokens, (tokens, self._read)

    def for_tokens(self, tokens: int) -> KernelLift:
        """Return the same lift for another number of tokens, faster than by the constructor."""
        like = self
        if (tokens > FEW_TOKENS) != (self.tokens > FEW_TOKENS):  # which decides the launch
            like = find_kernel_lift(self.spec, FEW_TOKENS + (tokens > FEW_TOKENS), self.device)
        made = KernelLift.__new__(KernelLift)
        for name in KEPT:
            setattr(made, name, getattr(like, name))
        made._size(tokens)
        return made

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, tensors: LinearTensors, eps: float) -> Lifted:
        """See :class:`slidesparse.lifting.choose.TorchLift`."""
        rows = None if residual is None else with_contiguous_columns(residual)
        return self.run(with_contiguous_columns(x), rows, tensors.norm_weight, eps)

    def run(self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float) -> Lifted:
        """Lift tokens as :meth:`__call__`, of any row stride, columns contiguous.

        Raises:
            InputError: Other sizes, types, strides or device than this lift was made for.
        """
        refusal = self.refusal(x, residual) or self.refusal_of_norm_weight(weight)
        if refusal is not None:
            raise refusal
        index = x.get_device()
        if index >= 0 and not is_current(index):
            with torch.cuda.device(index):
                return self.run(x, residual, weight, eps)
        values = empty(self.padded, self.k_packed, self.target, index)
        scale = empty(self.tokens, 1, torch.float32, index) if self.quantised else None
        residual_out = empty(*self.shape, self.source, index) if self.prologue in ADDING else None
        if self.tokens and self.k_packed:
            inputs = inputs_of(x, residual, weight)
            if self.can_launch(inputs):
                residual_out_at = None if residual_out is None else residual_out.data_ptr()
                scale_at = None if scale is None else scale.data_ptr()
                self.launch(inputs, eps, residual_out=residual_out_at, values=values.data_ptr(), scale=scale_at)
            else:
                kind = torch.int16 if self.variant.resident else torch.int8
                written = values.view(kind) if self.quantised else values
                tensors = x, residual, residual_out, weight, written, scale
                arguments = *tensors, self.tokens, inputs.x_stride, inputs.residual_stride, float(eps)
                self.launcher.compile_and_launch(self.programs, arguments, is_aligned(inputs))
        if self.padded != self.tokens:
            values.resize_(self.tokens, self.k_packed)  # keeps the memory after them; a view would be one more tensor
        return Lifted(values, scale, residual_out)

    # A launch passes addresses, which do not tell how much memory follows them, nor its type and device.

    def refusal(self, x: torch.Tensor, residual: torch.Tensor | None) -> InputError | None:
        """Return an error for activations or a residual of wrong size, stride, type or device; None if right."""
        if not self.is_rows(x):
            return InputError("activations to lift", got=_described(x), needed=self._rows())
        if self.prologue in ADDING and not self.is_rows(residual):
            return InputError("residual", got=_described(residual), needed=self._rows())
        return None

    def refusal_of_norm_weight(self, weight: torch.Tensor | None) -> InputError | None:
        """Return an error for a wrong weight of the norm, the same in every call; None if right."""
        if self.prologue not in NORMS:
            return None
        if weight is not None and is_vector(weight, self.order.in_features, self.device, (self.source,)):
            return None
        needed = f"{self.order.in_features} {self.source} numbers on {self.device}, contiguous"
        return InputError("weight of RMSNorm", got=_described(weight), needed=needed)

    def is_rows(self, x: torch.Tensor | None) -> bool:
        """Return whether this lift can read these activations, or this residual."""
        if x is None or x.shape != self.shape or x.dtype != self.source:
            return False
        return x.stride()[1] == 1 and x.device == self.device

    def is_here(self) -> bool:
        """Return whether the lift's device is the current one."""
        return is_current(self.index)

    def _rows(self) -> str:
        return f"{list(self.shape)} {self.source} on {self.device}, columns contiguous"

    def inputs(self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None) -> LiftInputs | None:
        """Return the addresses that :meth:`launch` reads; None where it cannot read them (:meth:`why_not`)."""
        if not is_current(self.index) or self.refusal(x, residual) or self.refusal_of_norm_weight(weight):
            return None
        inputs = inputs_of(x, residual, weight)
        return inputs if self.can_launch(inputs) else None

    def why_not(self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None) -> str | None:
        """Return the reason why :meth:`inputs` returns None; None where only the compilation is missing."""
        refusal = self.refusal(x, residual) or self.refusal_of_norm_weight(weight)
        if refusal is not None:  # without its numbers, which differ with every batch: a reason is logged once
            return f"{refusal.what}: of another size, type, stride or device than the kernel reads"
        if not is_current(self.index):
            return f"{self.device} is not the current device"
        if not is_aligned(inputs_of(x, residual, weight)):
            return f"rows or the norm's weight do not start at multiples of {ALIGNMENT} bytes or numbers"
        return None

    def can_launch(self, inputs: LiftInputs) -> bool:
        """Return whether :meth:`launch` can read these: the kernel is compiled, and they are aligned."""
        return self.launcher.ready and is_aligned(inputs)

    def launch(
        self, inputs: LiftInputs, eps: float, *, residual_out: int | None, values: int, scale: int | None
    ) -> None:
        """Launch by addresses, unchecked, on the current stream of the device, which must be the current one.

        Args:
            inputs: Addresses that the kernel reads; :meth:`can_launch` must hold for them.
            eps: The norm's epsilon.
            residual_out: Address of the new residual [M, K]; None without one. Like those below, a multiple of 16.
            values: Address of the values, ``padded`` rows of ``k_packed``.
            scale: Address of M scales, float32; None where nothing is quantised.
        """
        x, residual, weight, x_stride, residual_stride = inputs
        self.launcher.launch(
            self.programs,
            current_stream(self.index),
            *(x, residual, residual_out, weight, values, scale, self.tokens, x_stride, residual_stride, eps),
        )


def _described(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}"


find_kernel_lift = lru_cache(maxsize=1 << 13)(KernelLift)
"""Return the :class:`KernelLift` of these arguments by one look-up. A server has few linears, many numbers of tokens;
an entry takes about 1 KB."""


@lru_cache(maxsize=4096)
def _launcher(variant: LiftVariant, launch: Launch, source: torch.dtype, device: torch.device) -> Launcher:
    """Return the launcher for all numbers of tokens; a compiled kernel belongs to ``source`` and ``device``."""
    kernel, most = resident_kernel if variant.resident else walking_kernel, launch.registers or None
    early = EARLY_START if variant.early else {}
    return Launcher(kernel, (variant,), num_warps=launch.num_warps, maxnreg=most, **early)
