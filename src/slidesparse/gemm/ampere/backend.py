"""The backend for cards with ``mma.sync``: our own 2:4 and dense GEMM from Ampere on (``gemm/ampere/csrc``).

A Hopper card runs it, too, and slower than its own kernel, so there it must be asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slidesparse.gemm.ampere.tiles import Card, MmaTile, choose, fitting
from slidesparse.gemm.backend import Problem
from slidesparse.gemm.step_backend import StepBackend
from slidesparse.gemm.steps import StepForm

OLDEST, OLDEST_FP8 = (8, 0), (8, 9)
"""First compute capabilities: with Sparse Tensor Cores, and with FP8."""


def why_no_kernels(dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return the reason why a compute capability has no kernels of a type; None if it has."""
    needed = OLDEST_FP8 if dtype == torch.float8_e4m3fn else OLDEST
    if capability >= needed:
        return None
    return f"it needs compute capability {needed[0]}.{needed[1]}, this GPU has {capability[0]}.{capability[1]}"


class Ampere(StepBackend):
    """The backend that multiplies 2:4 or dense weights by ``mma.sync``."""

    name, revision = "ampere", "ampere-3"
    dense, oldest_compiler = True, (12, 5)  # PTX 8.5, for mma.sp::ordered_metadata
    choose = staticmethod(choose)

    def why_not_on(self, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
        """See :class:`slidesparse.gemm.step_backend.StepBackend`."""
        return why_no_kernels(dtype, capability)

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        if problem.bits == 6:
            return "ampere-6bit", "ampere-6bit reads fewer bytes"
        return "hopper", "Hopper's own kernel has faster instructions"

    def tiles(self, dtype: torch.dtype, device: int, dense: bool) -> Iterable[MmaTile]:
        """See :class:`slidesparse.gemm.step_backend.StepBackend`."""
        return fitting(StepForm(0, 0, self.value_bits, dense), dtype.itemsize, Card.of(device))


class AmpereSixBits(Ampere):
    """The same for INT8 weights of multiples of 4 (``slidesparse prune --rounding 6bit``), stored in six bits."""

    name = "ampere-6bit"
    value_bits = bits = 6

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return "hopper-6bit", "Hopper's own kernel has faster instructions"
