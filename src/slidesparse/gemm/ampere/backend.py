"""The backend for cards with ``mma.sync``: our own 2:4 and dense GEMM from Ampere on (``gemm/ampere/csrc``).

Everything but kernel and tiles is as for Hopper: forms of a weight, slabs, runners and chains. A Hopper card runs it,
too, and slower than its own kernel, so there it must be asked for.
"""

from __future__ import annotations

import torch

from slidesparse.gemm.ampere.tiles import Card, choose, fitting
from slidesparse.gemm.backend import Problem
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.kernel import load_kernels
from slidesparse.gemm.hopper.weights import StepForm

REVISION = "ampere-2"
"""Revision of the kernel, to increment when its speed changes: measured times belong to one revision."""

OLDEST, OLDEST_FP8 = (8, 0), (8, 9)
"""First compute capabilities: with Sparse Tensor Cores, and with FP8."""


def why_no_kernels(dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return the reason why a compute capability has no kernels of a type; None if it has."""
    needed = OLDEST_FP8 if dtype == torch.float8_e4m3fn else OLDEST
    if capability >= needed:
        return None
    return f"it needs compute capability {needed[0]}.{needed[1]}, this GPU has {capability[0]}.{capability[1]}"


class Ampere(Hopper):
    """The backend that multiplies 2:4 or dense weights by ``mma.sync``, in one launch."""

    name = "ampere"
    dense, oldest_compiler = True, (12, 5)  # PTX 8.5, for mma.sp::ordered_metadata
    choose = staticmethod(choose)

    def why_not_on(self, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
        """See :meth:`Hopper.why_not_on`."""
        return why_no_kernels(dtype, capability)

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        if problem.bits == 6:
            return "ampere-6bit", "ampere-6bit reads fewer bytes"
        return "hopper", "Hopper's own kernel has faster instructions"

    def library(self) -> str:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return f"slidesparse {REVISION}"

    def warm_up(self, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device, dense: bool = False) -> None:
        """See :class:`slidesparse.gemm.backend.Backend`; it loads every tile."""
        index = torch.cuda.current_device() if device.index is None else device.index
        tiles = fitting(StepForm(0, 0, self.value_bits, dense), dtype.itemsize, Card.of(index))
        load_kernels(tiles, dtype, out_dtype, index, 0, self.value_bits)


class AmpereSixBits(Ampere):
    """The same for INT8 weights of multiples of 4 (``slidesparse prune --rounding 6bit``), stored in six bits."""

    name = "ampere-6bit"
    value_bits = bits = 6

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return "hopper-6bit", "Hopper's own kernel has faster instructions"
