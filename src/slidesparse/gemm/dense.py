"""The dense backend: the unpacked weight times the activations as they are.

What runs where sparsity does not pay. Same numbers as the reference: exactly for INT8, to float32 summation order for
the others.
"""

from __future__ import annotations

from slidesparse.gemm.base import Layout, Operand
from slidesparse.gemm.reference import Reference
from slidesparse.packed import PackedWeight


class Dense(Reference):
    """The pruned weight in dense form."""

    name = "dense"
    layout = Layout(lifted=False)

    def prepare(self, packed: PackedWeight) -> Operand:
        """The weight again, zeros in place: [out, K]."""
        return (packed.unpack(),)
