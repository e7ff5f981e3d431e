"""The contract of a GEMM backend.

A backend computes, for activations ``X`` that :func:`slidesparse.ops.quantize_lift` has put into its layout::

    Y[M, out] = scale_x[M] * (scale_w[out] * (X @ W^T)) + bias[out]

with the product accumulated in int32 (INT8) or float32 (all others), the rest in float32 and one rounding to the output
type at the end. This is vLLM's order of operations (csrc/cutlass_extensions/epilogue, ``ScaledEpilogueBias``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from slidesparse.errors import InputError
from slidesparse.layout import SLAB_BYTES, Columns, Slabs
from slidesparse.packed import PackedWeight
from slidesparse.pattern import Pattern

if TYPE_CHECKING:
    from slidesparse.gemm.chain import Placed
    from slidesparse.kernels.lift import Call  # needs Triton

Operand: TypeAlias = tuple[torch.Tensor, ...]
"""What a backend's kernel reads of a weight, in the backend's own layout: plain tensors, which can be buffers."""


@dataclass(frozen=True)
class Problem:
    """What is to be multiplied, as far as a backend must know to say whether it can.

    Attributes:
        pattern: The weight's pattern.
        dtype: Type of weight and quantised activations.
        out_features: Rows of the weight.
        in_features: Columns of the weight, before lifting.
        device: Where.
        slid: Some group is slid. Of a partial pattern a shard may have none: then the packed weight is a dense one.
    """

    pattern: Pattern
    dtype: torch.dtype
    out_features: int
    in_features: int
    device: torch.device
    slid: bool = True


def exact_rows(tokens: int) -> int:
    """As many rows as tokens."""
    return tokens


@dataclass(frozen=True)
class Layout:
    """How a backend wants the activations.

    They are always a contiguous tensor [M, K'], whatever the order of the bytes in it and however much memory lies
    behind it: shapes, and all that reasons about them, stay those of the product.

    Attributes:
        lifted: False for a backend that multiplies the unpacked weight.
        multiple: Columns of each segment are padded with zeros to a multiple of this.
        rows: Tokens M -> rows that its GEMM reads. Whoever makes the activations gives the memory behind them so many
            rows, with anything in those past M, and saves :func:`with_rows` a copy. Without meaning under ``slabs``.
        slabs: The bytes stand slab after slab, each segment padded to whole slabs: :func:`slab_view` shows them.
            None: they are row-major.
    """

    lifted: bool = True
    multiple: int = 1
    rows: Callable[[int], int] = exact_rows
    slabs: Slabs | None = None

    def multiple_of(self, dtype: torch.dtype) -> int:
        """To what segments of this type are padded: ``multiple``, and whole slabs where there are slabs."""
        return self.multiple if self.slabs is None else math.lcm(self.multiple, SLAB_BYTES // dtype.itemsize)

    def columns(self, packed: PackedWeight) -> Columns | None:
        """The same order in the few numbers that the Triton kernels take; None where they cannot write it."""
        multiple = self.multiple_of(packed.dtype)
        if self.lifted:
            return Columns.of(packed, multiple)
        even = multiple % 2 == 0 or (multiple == 1 and packed.shape[1] % 2 == 0)
        return Columns.identity(packed.shape[1], multiple) if even else None

    def column_map(self, packed: PackedWeight) -> torch.Tensor:
        """The input column behind every column that the kernel reads, -1 for padding: int64 [K']."""
        multiple = self.multiple_of(packed.dtype)
        if self.lifted:
            return packed.column_map(multiple)
        columns = torch.arange(packed.shape[1], device=packed.device)
        return torch.nn.functional.pad(columns, (0, -len(columns) % multiple), value=-1)


def check_slabs(x: torch.Tensor, needed: int) -> None:
    """Make sure that so many bytes lie behind activations [M, K'], which were made for a layout in slabs.

    Raises:
        InputError: When the memory behind them ends early: they were made for another layout, or copied since. Bytes of
            another layout cannot be told apart where there are enough of them.
    """
    held = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    if not x.is_contiguous() or held < needed:
        raise InputError(
            "activations in slabs",
            got=f"{held} bytes, strides {x.stride()}",
            needed=f"{needed} bytes, contiguous",
            remedy="pass on what ops.quantize_lift gave for this backend, uncopied",
        )


def slab_view(x: torch.Tensor, slabs: Slabs) -> torch.Tensor:
    """The slabs behind activations [M, K'] that were made for this layout: a view of :meth:`Slabs.shape`.

    Raises:
        InputError: See :func:`check_slabs`.
    """
    tokens, width = x.shape
    shape = slabs.shape(tokens, width, x.element_size())
    check_slabs(x, math.prod(shape) * x.element_size())
    return x.as_strided(shape, (shape[1] * shape[2], shape[2], 1))


def gpu_of(x: torch.Tensor, backend: str) -> int:
    """The GPU on which activations are.

    Raises:
        InputError: They are on none; the layer was moved since it was built.
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


def with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Activations [M, K'] as [rows, K'], rows >= M; those past M hold anything.

    The row count of a library's plan is fixed, and that of a batch is not. Reading on in the memory behind ``x`` costs
    nothing; where that is too short, the activations are copied. Every row of a product depends on its own token
    alone, so what stands in the extra rows never reaches a user.
    """
    tokens, columns = x.shape
    if rows == tokens and x.is_contiguous():
        return x
    end = (x.storage_offset() + rows * columns) * x.element_size()
    if x.is_contiguous() and end <= x.untyped_storage().nbytes():
        return x.as_strided((rows, columns), (columns, 1))
    padded = x.new_empty(rows, columns)
    padded[:tokens] = x
    return padded


def release(name: str, version: str) -> str:
    """A library and its version without the patch.

    >>> release("torch", "2.11.0+cu130")
    'torch 2.11'
    """
    return f"{name} {'.'.join(version.split('.')[:2])}"


class LinearCall(Protocol):
    """Lifting and multiplying as one, for one number of tokens and weights of one size and type."""

    def __call__(
        self,
        x: torch.Tensor,
        form: Sequence[torch.Tensor],
        scale_w: torch.Tensor | None,
        bias: torch.Tensor | None,
        gain: torch.Tensor | None,
        residual: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Quantise, lift and multiply.

        Args:
            x: [M, K], or [M, 2K], as :class:`slidesparse.kernels.lift.Call` takes it.
            form: Of the weight: column map, pairs (empty where the lifting call takes none), and the operand, from
                :meth:`Backend.prepare`.
            scale_w: As of :meth:`Backend.matmul`.
            bias: As of :meth:`Backend.matmul`.
            gain: [K], the weight of a norm.
            residual: As of the lifting call.
            eps: Of the norm.

        Returns:
            The product and the new residual. None where it does not take these tensors: nothing was launched, and the
            lifting call, then :meth:`Backend.matmul`, run them or say what is wrong.
        """
        ...


class ChainCall(Protocol):
    """Several linears, each of which takes what the one before it gives, for one number of tokens."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Run them.

        Args:
            x: [M, K], what the first one takes.
            residual: What the first one behind ``add_rms_norm`` adds.
            tensors: Those of the chain, of which :class:`slidesparse.gemm.chain.Placed` says whose is which.

        Returns:
            The last product, and the last new residual, or ``residual`` where none is added. None where it does not
            take these tensors: nothing was launched, and one linear after the other runs.
        """
        ...


class Backend(Protocol):
    """A way to multiply. Stateless; whatever belongs to one weight is in its operand."""

    name: str
    accelerated: bool
    layout: Layout

    @property
    def linear_call(self) -> Callable[[Call, int], LinearCall | None] | None:
        """Makes a :class:`LinearCall` of a lifting call, for at least one token, and of a weight's rows, at least one.

        None, or where it makes None: there is no such thing, and a linear is the lifting call, then :meth:`matmul`.
        """
        ...

    @property
    def chain_call(self) -> Callable[[Sequence[tuple[Any, Placed]]], ChainCall] | None:
        """Makes a :class:`ChainCall` of two or more of its own linear calls; None: there is no such thing."""
        ...

    def __hash__(self) -> int:
        """Of the object: what belongs to a backend is looked up by it."""
        ...

    def why_not(self, problem: Problem) -> str | None:
        """Why this backend cannot run ``problem``, in one sentence, or None when it can."""
        ...

    def library(self) -> str:
        """Whose kernels run here, with the version by which their speed may change, patches left out: ``vLLM 0.22``.

        Measured times hold for one of these (gemm/speed.py). Asked only where :meth:`why_not` answers None.
        """
        ...

    def prepare(self, packed: PackedWeight) -> Operand:
        """Reorder a packed weight, once, into what the kernel reads."""
        ...

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
        """Multiply.

        Args:
            x: [M, K'] in the layout asked for, in the weight's type.
            scale_x: float32 [M, 1], or None for unquantised types.
            operand: From :meth:`prepare`. What wrote it has ended, or another kernel stands between: the first weights
                may be fetched while the kernel before the product still runs.
            scale_w: float32 [out], or None for unquantised types.
            bias: [out], or None.
            out_features: ``out``: operands may be padded.
            out_dtype: bfloat16, float16 or float32.

        Returns:
            [M, out] in ``out_dtype``.
        """
        ...
