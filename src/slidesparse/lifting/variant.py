"""The compile-time constants of a quantise-and-lift kernel."""

from __future__ import annotations

from dataclasses import dataclass

from slidesparse.lifting.layout import ColumnOrder
from slidesparse.lifting.prologue import ADDING, GEMMA, NORMS, Prologue
from slidesparse.weights.quant import ActivationRounding

CHUNKS = 8
"""Most chunks of a row in registers: 64 columns a lane, which has 128 registers in a program of 16 warps."""


@dataclass(frozen=True, kw_only=True)
class LiftVariant(ColumnOrder):
    """One compiled variant of a kernel, besides the types and alignments of its arguments.

    Attributes:
        prologue: The prologue.
        quant: ``none``, ``int8`` or ``fp8``.
        activation_rounding: The server whose rounding is reproduced.
        itemsize: Bytes of an output column.
        slabs: Whether the output is in slabs (:class:`slidesparse.lifting.layout.Slabs`); else it is row-major.
        read: Input columns of a step of reading; of a chunk of a row in registers.
        write: Output columns of a step of writing.
        early: Whether the launch is a programmatic dependent one; see :func:`slidesparse.lifting.lift_math.begin`.
    """

    prologue: Prologue
    quant: str
    activation_rounding: ActivationRounding
    itemsize: int
    slabs: bool
    read: int
    write: int
    early: bool

    @property
    def half(self) -> int:
        """N, half the columns of a group."""
        return self.group // 2

    @property
    def norms(self) -> bool:
        """Whether the prologue is a norm."""
        return self.prologue in NORMS

    @property
    def adds(self) -> bool:
        """Whether the prologue adds a residual."""
        return self.prologue in ADDING

    @property
    def offsets(self) -> bool:
        """Whether the prologue adds 1 to the norm's weight."""
        return self.prologue in GEMMA

    @property
    def resident(self) -> bool:
        """Whether rows stay in registers: quantised, short enough, and with pairs of columns that stay pairs."""
        return self.quant != "none" and self.k_offset % 2 == 0 and self.in_features <= CHUNKS * self.read

    @property
    def chunks(self) -> int:
        """Chunks of a row in registers."""
        return -(-self.in_features // self.read)

    @property
    def in_place(self) -> bool:
        """Whether packed column c is input column c: of a dense weight, and at 2:4."""
        return self.k_offset == 0 and self.half == 2

    @property
    def cut(self) -> bool:
        """Whether the last group of the input is incomplete."""
        return (self.k_offset + self.in_features) % (2 * self.half) > 0
