"""The Hopper backend: our own 2:4 GEMM for sm_90a (``gemm/hopper/csrc``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slidesparse.gemm.backend import Problem
from slidesparse.gemm.hopper.choose_tiles import choose_for
from slidesparse.gemm.hopper.tiles import DENSE_TILES, TILES, Tile
from slidesparse.gemm.step_backend import StepBackend

CAPABILITY = (9, 0)
"""Compute capability of the kernel."""


class Hopper(StepBackend):
    """The backend that multiplies 2:4 weights on sm_90a."""

    name, revision = "hopper", "hopper-7"
    choose = staticmethod(choose_for)

    def why_not_on(self, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
        """See :class:`slidesparse.gemm.step_backend.StepBackend`."""
        if capability == CAPABILITY:
            return None
        return "it is written for compute capability 9.0 (H100, H200), this GPU has {}.{}".format(*capability)

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`; for six bits the other one reads 0.8 of the bytes."""
        return ("hopper-6bit", "hopper-6bit reads fewer bytes") if problem.bits == 6 else None

    def tiles(self, dtype: torch.dtype, device: int, dense: bool) -> Iterable[Tile]:
        """See :class:`slidesparse.gemm.step_backend.StepBackend`."""
        return DENSE_TILES if dense else TILES


class HopperSixBits(Hopper):
    """The Hopper backend for INT8 weights of multiples of 4, stored in six bits.

    ``slidesparse prune --rounding 6bit`` makes such weights.
    """

    name = "hopper-6bit"
    value_bits = bits = 6
    dense = True

    def yields_to(self, problem: Problem) -> tuple[str, str] | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return None
