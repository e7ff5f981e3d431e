"""A whole linear on the Hopper kernel: quantise and lift, then multiply, with only addresses between the two launches.

Run one by one, the two cost the host more than their launches do: each makes tensors of its own and checks, in general
terms, everything that its kernel reads by address. In a model of small layers that is more than the GPU needs. Here
all that does not depend on the tensors is worked out once, and one piece of memory holds lifted values and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from slidesparse.base.torch_private import empty_here
from slidesparse.gemm.hopper.launch import BIAS_TYPES
from slidesparse.gemm.hopper.run import find_run
from slidesparse.gemm.hopper.weights import step_shapes
from slidesparse.support import is_vector

if TYPE_CHECKING:
    from slidesparse.kernels.lift import Call, Read  # needs Triton

FLOAT32 = (torch.float32,)

Weight: TypeAlias = tuple[int, int, int | None, int | None, int]
"""What :meth:`slidesparse.gemm.hopper.run.Run.launch` reads of a weight: its arguments from the third on."""


class HopperLinear:
    """One number of tokens times weights of one size and type; see :class:`slidesparse.gemm.backend.LinearCall`.

    Args:
        lift: Quantises and lifts them.
        out_features: Rows of the weights.

    Raises:
        UnsupportedError: See :func:`slidesparse.gemm.hopper.launch.load`.

    Attributes:
        lift: As given.
        out: Rows of the weights.
        workspace: Bytes of lifted values and scales.
        reads: All that decides which weights it takes, and their gains and pairs.
    """

    __slots__ = ("_dense", "_run", "_scales_start", "_sparse", "lift", "out", "reads", "workspace")

    def __init__(self, lift: Call, out_features: int) -> None:
        activations = torch.Size((lift.tokens, lift.width))
        self.lift, self.out = lift, out_features
        self._sparse, self._dense = step_shapes(lift.columns, lift.target.itemsize, out_features)
        sizes = activations, lift.target, self._sparse, self._dense, out_features
        self._run = find_run(*sizes, lift.source, lift.index)
        self._scales_start = self._run.slab_bytes  # a multiple of a slab's row
        self.workspace = self._scales_start + 4 * lift.tokens * lift.quantised
        self.reads = lift.columns, lift.source, lift.target, lift.first, lift.device, out_features

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
        """See :class:`slidesparse.gemm.backend.LinearCall`."""
        lift, weight = self.lift, self.find(form, scale_w, bias)
        read = lift.read(x, form[1], gain, residual)
        if read is None or weight is None:
            return None
        total = None if residual is None else empty_here(*lift.shape, lift.source)
        total_at = None if total is None else total.data_ptr()
        workspace, y = empty_here(1, self.workspace, torch.uint8), empty_here(lift.tokens, self.out, lift.source)
        self.launch(read, total_at, workspace.data_ptr(), weight, y.data_ptr(), eps)
        return y, total

    def find(
        self, form: Sequence[torch.Tensor], scale_w: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Weight | None:
        """Where a weight stands, if the kernel can read it: sizes, types and device are those this was made for."""
        device, (_, _, sparse, dense) = self.lift.device, form
        if sparse.shape != self._sparse or dense.shape != self._dense:
            return None
        if sparse.device != device or dense.device != device:
            return None
        scale_w_at = bias_at = None
        bias_type = 0
        if scale_w is not None:
            if not is_vector(scale_w, self.out, device, FLOAT32):
                return None
            scale_w_at = scale_w.data_ptr()
        if bias is not None:
            if not is_vector(bias, self.out, device, BIAS_TYPES):
                return None
            bias_at, bias_type = bias.data_ptr(), BIAS_TYPES[bias.dtype]
        return sparse.data_ptr(), dense.data_ptr(), scale_w_at, bias_at, bias_type

    def launch(
        self, read: Read, total_at: int | None, workspace_at: int, weight: Weight, y_at: int, eps: float
    ) -> None:
        """Both launches by addresses, of which nothing is checked.

        Args:
            read: What the lifting call reads.
            total_at: Address of memory for the new residual, where it gives one.
            workspace_at: Of ``workspace`` bytes.
            weight: From :meth:`find`.
            y_at: Of memory for the product [M, out] in the type of the activations.
            eps: Of the norm.
        """
        lift = self.lift
        scale_at = workspace_at + self._scales_start if lift.quantised else None
        lift.launch(lift.index, *read, total_at, workspace_at, scale_at, eps)
        self._run.launch(workspace_at, scale_at, *weight, y_at)
