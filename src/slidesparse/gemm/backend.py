"""The interface of a GEMM backend.

A backend computes, for activations ``X`` of :func:`slidesparse.ops.quantize_lift` in its layout::

    Y[M, out] = scale_x[M] * (scale_w[out] * (X @ W^T)) + bias[out]

with the product accumulated in int32 (INT8) or float32 (all others), the rest in float32 and one rounding to the output
type at the end. This is vLLM's order of operations (csrc/cutlass_extensions/epilogue, ``ScaledEpilogueBias``).

A *runner* runs a linear, or several in a row, for one number of tokens. It is made once, when that number first occurs
(:mod:`slidesparse.ops.resolve`), and called often. By default it lifts, then multiplies. A backend with a faster path
returns its own runner, which falls back to the default where that path cannot run, and logs the reason once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from slidesparse.base.log import log_once
from slidesparse.errors import InputError
from slidesparse.gemm.spec import Slots
from slidesparse.gemm.speed import Experts
from slidesparse.lifting.choose import Lift
from slidesparse.lifting.layout import Layout, LinearTensors
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import Pattern

if TYPE_CHECKING:
    from slidesparse.lifting.kernel import KernelLift  # needs Triton

Operand: TypeAlias = tuple[torch.Tensor, ...]
"""A weight's tensors in a backend's own layout; they can be buffers."""


@dataclass(frozen=True)
class Problem:
    """A multiplication, as far as it decides which backends can run it.

    Attributes:
        pattern: The weight's pattern.
        dtype: Type of weight and quantised activations.
        out_features: Rows of the weight.
        in_features: Columns of the weight, before lifting.
        device: Its device.
        slid: Whether the weight is slid. A weight that runs dense is packed dense, whatever its pattern.
        bits: Bits that every value needs (:func:`slidesparse.weights.support.value_bits`).
        experts: The experts of a mixture, whose sizes are those of gate and up; None of a linear.
    """

    pattern: Pattern
    dtype: torch.dtype
    out_features: int
    in_features: int
    device: torch.device
    slid: bool = True
    bits: int = 8
    experts: Experts | None = None

    @classmethod
    def of(cls, packed: PackedWeight) -> Problem:
        """Return the problem of a packed weight."""
        return cls(packed.pattern, packed.dtype, *packed.shape, packed.device, packed.slid, packed.bits)

    @property
    def has_forms(self) -> bool:
        """Whether its form is a choice: it is slid, has six bits, or is dense where servers have no kernel for that."""
        return self.slid or self.bits == 6 or servers_lack(self.dtype, self.device)


WITHOUT_INT8 = (10, 0)
"""First compute capability (Blackwell) at which the INT8 kernels of vLLM and SGLang raise (vLLM issue 54311)."""


def servers_lack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether vLLM and SGLang have no kernel of their own for dense weights of a type on a device."""
    return dtype == torch.int8 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= WITHOUT_INT8


def gpu_of(x: torch.Tensor, backend: str) -> int:
    """Return the index of the activations' GPU.

    Raises:
        InputError: They are not on a GPU; the layer was moved after it was built.
    """
    device = x.get_device()
    if device < 0:
        raise InputError(
            f"activations of the {backend} backend",
            got=x.device,
            needed="a CUDA device",
            remedy="build the layer on the device on which it runs",
        )
    return device


def release(name: str, version: str) -> str:
    """Return a library's name and version, without the patch number.

    >>> release("torch", "2.11.0+cu130")
    'torch 2.11'
    """
    return f"{name} {'.'.join(version.split('.')[:2])}"


Products = tuple[torch.Tensor, "torch.Tensor | None"]
"""The product [M, out] in the type of the activations, and the new residual [M, K] or None."""

Runner: TypeAlias = Callable[[torch.Tensor, "torch.Tensor | None", LinearTensors, float], Products]
"""Runs one linear for one number of tokens, and weights of one size and type: prologue, quantisation, lift, product.

It takes x [M, K], or [M, 2K] for the prologue ``silu_mul``; the residual [M, K] for a norm that adds it, else None; the
linear's tensors; and the norm's epsilon. Other sizes, types or devices are an InputError."""

ChainRunner: TypeAlias = Callable[[torch.Tensor, "torch.Tensor | None", Sequence[torch.Tensor]], Products]
"""Runs several linears, each on the product of the one before it, for one number of tokens.

It takes x [M, K] of the first linear; the residual [M, K] for the first norm that adds one; and the tensors of all
linears, by :class:`slidesparse.gemm.spec.Slots`. It returns the last product, and the last residual, new or given."""


class LiftThenMultiply:
    """The default runner: a lift into the backend's layout, then a product."""

    def __init__(self, backend: Backend, lift: Lift, out_features: int) -> None:
        self.backend, self.lift, self.out_features = backend, lift, out_features

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, tensors: LinearTensors, eps: float) -> Products:
        """See :data:`Runner`."""
        if tensors.column_map.device != x.device:
            raise InputError(
                "activations and weight on two devices",
                got=f"{x.device}, {tensors.column_map.device}",
                needed="one device",
                remedy="move the activations; build the layer on the device on which it runs",
            )
        values, scale_x, residual_out = self.lift(x, residual, tensors, eps)
        operand = tuple(tensors.operand)
        rest = tensors.scale, tensors.bias, self.out_features, x.dtype
        return self.backend.matmul(values, scale_x, operand, *rest), residual_out

    def __repr__(self) -> str:
        return f"{self.backend.name}, lift then multiply"


def log_by_parts(
    runner: Runner, lift: KernelLift, x: torch.Tensor, residual: torch.Tensor | None, tensors: LinearTensors
) -> None:
    """Log once the reason why a runner falls back to the default; nothing if its kernel is not compiled yet."""
    reason = lift.why_not(x, residual, tensors.norm_weight)
    if reason is None and lift.launcher.ready:
        reason = "weight, scale or bias has not the shape, type or place that the kernel reads"
    if reason is not None:
        log_once(f"slidesparse: {runner!r} runs by its parts: {reason}", logging.WARNING)


class OneByOne:
    """The default runner of a chain: the runners of its linears in turn."""

    def __init__(self, linears: Sequence[tuple[Runner, Slots]]) -> None:
        self.linears = tuple(linears)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> Products:
        """See :data:`ChainRunner`."""
        for runner, slots in self.linears:
            x, residual_out = runner(x, residual if slots.adds else None, slots.pick(tensors), slots.eps)
            residual = residual_out if slots.adds else residual
        return x, residual

    def __repr__(self) -> str:
        return f"{len(self.linears)} one by one"


class Backend(ABC):
    """A GEMM for packed weights, without state: everything of a weight is in its operand.

    Attributes:
        name: The name that users write.
        accelerated: Whether ``auto`` may choose it for its speed.
        layout: The layout in which it reads activations.
        bits: The only supported :attr:`Problem.bits`; None: all.
    """

    name: str
    accelerated: bool
    layout: Layout
    bits: int | None = None

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """Return the backend that ``auto`` prefers to this one wherever it can run, and the reason; None without one.

        It was faster at every measured size, or reads fewer bytes; this one is then not measured.
        """
        return None

    def accumulator_bytes(self, dtype: torch.dtype, out_dtype: torch.dtype, tokens: int, device: torch.device) -> int:
        """Return the bytes that a call allocates for each element of its product [M, out], besides the product.

        ``dtype`` is the type of the weight, ``out_dtype`` that of the product.
        """
        return 0

    @abstractmethod
    def why_not(self, problem: Problem) -> str | None:
        """Return the reason, in one sentence, why this backend cannot run ``problem``; None if it can."""

    @abstractmethod
    def library(self) -> str:
        """Return the library of the kernels and the version that decides their speed: ``vLLM 0.22``.

        It is stored with measured times (gemm/speed.py). Called only where :meth:`why_not` returns None.
        """

    @abstractmethod
    def prepare(self, packed: PackedWeight) -> Operand:
        """Reorder a packed weight, once, into the kernel's tensors."""

    @abstractmethod
    def columns(self, operand: Operand, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix for activations, zeros in place: the exact inverse of :meth:`prepare`.

        Args:
            operand: From :meth:`prepare`, on any device.
            shape: (out, K') of the matrix, without padded rows; K' is the length of the layout's column map.
            dtype: Type of the weight.

        Returns:
            [out, K'] on the operand's device.

        Raises:
            UnsupportedError: Only a kernel can read the operand, and it cannot run on its device.
        """

    @abstractmethod
    def matmul(
        self,
        x: torch.Tensor,
        scale_x: torch.Tensor | None,
        operand: Operand,
        scale_w: torch.Tensor | None,
        bias: torch.Tensor | None,
        out_features: int,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply lifted activations by a weight, and apply scales and bias.

        Args:
            x: [M, K'] in :attr:`layout`, in the weight's type.
            scale_x: float32 [M, 1], or None for unquantised types.
            operand: From :meth:`prepare`. The kernel that wrote it has ended: the first weights may be fetched while
                the kernel before the product still runs.
            scale_w: float32 [out], or None for unquantised types.
            bias: [out], or None.
            out_features: ``out``: operands may be padded.
            out_dtype: bfloat16, float16 or float32.

        Returns:
            [M, out] in ``out_dtype``.
        """

    def runner(self, lift: Lift, out_features: int) -> Runner:
        """Return the runner of a linear for the number of tokens of a lift; the default lifts, then multiplies.

        Raises:
            UnsupportedError: A kernel cannot be loaded.
        """
        return LiftThenMultiply(self, lift, out_features)

    def runner_for_tokens(self, runner: Runner, tokens: int) -> Runner | None:
        """Return a runner of the same linear for another number of tokens; None where :meth:`runner` must make it.

        A server has hundreds of numbers of tokens, most of them once.

        Raises:
            UnsupportedError: A kernel cannot be loaded.
        """
        return None

    def chain_runner(self, linears: Sequence[tuple[Runner, Slots]]) -> ChainRunner:
        """Return the runner of a chain of linears, from their own :meth:`runner` for one number of tokens."""
        return OneByOne(linears)

    def warm_up(  # noqa: B027
        self, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device, dense: bool = False
    ) -> None:
        """Load the kernels for all numbers of tokens; none by default.

        ``dtype`` is the type of the weight, ``out_dtype`` that of activations and products; ``dense``: the weight is
        packed dense.
        """
