"""A linear on weights in steps: quantise and lift, then multiply, with only addresses between the launches.

As separate calls, the two steps cost the host more than their launches: each allocates its own tensors and checks
everything that its kernel reads by address. In a model of small layers the host is then slower than the GPU. Here
everything that does not depend on the tensors is computed once, and lifted values and scales share a workspace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from slidesparse.base.torch_private import empty_here
from slidesparse.gemm.backend import LiftThenMultiply, Products, log_by_parts
from slidesparse.gemm.kernel import AnyTile
from slidesparse.gemm.launch import BIAS_TYPES, Choose, GemmLaunch, WeightAddresses, find_launch
from slidesparse.gemm.steps import StepForm
from slidesparse.lifting.addresses import LiftInputs
from slidesparse.lifting.layout import LinearTensors
from slidesparse.weights.support import is_vector

if TYPE_CHECKING:
    from slidesparse.lifting.kernel import KernelLift  # needs Triton

FLOAT32 = (torch.float32,)


class StepLinear:
    """Runs a linear for one number of tokens and weights of one size; see :data:`slidesparse.gemm.backend.Runner`.

    Args:
        lift: Quantises and lifts the tokens.
        by_parts: The runner for cases that this one cannot handle.
        choose: Chooses the tiles of the product.
        value_bits: Bits of a kept value in memory.
        tile: The tile, in place of a choice.

    Raises:
        UnsupportedError: See :func:`slidesparse.gemm.kernel.load_kernel`.

    Attributes:
        lift: The lift.
        out: Rows of the weights.
        workspace_bytes: Bytes of lifted values and scales.
        kind: Key of the weights and norms that it can read.
    """

    __slots__ = ("_by_parts", "_gemm", "_scales_start", "_steps", "kind", "lift", "out", "workspace_bytes")

    def __init__(
        self, lift: KernelLift, by_parts: LiftThenMultiply, choose: Choose, value_bits: int, tile: AnyTile | None = None
    ) -> None:
        self.out = by_parts.out_features
        item_bytes = lift.target.itemsize
        form = StepForm.of_order(lift.order, item_bytes, value_bits)
        self._steps = form.shape(self.out, item_bytes)
        self.kind = lift.spec, lift.device, self.out
        activations = torch.Size((lift.tokens, lift.k_packed))
        sizes = activations, lift.target, form, self._steps, self.out
        self._size(lift, by_parts, find_launch(*sizes, lift.source, lift.index, choose, tile))

    def _size(self, lift: KernelLift, by_parts: LiftThenMultiply, gemm: GemmLaunch) -> None:
        self.lift, self._by_parts, self._gemm = lift, by_parts, gemm
        self._scales_start = gemm.slab_bytes  # a multiple of a slab's row
        self.workspace_bytes = self._scales_start + 4 * lift.tokens * lift.quantised

    def for_tokens(self, tokens: int) -> StepLinear:
        """Return the same linear for another number of tokens, with its fastest tile.

        This is much faster than the constructor; a server has most numbers of tokens once.
        """
        lift, made = self.lift.for_tokens(tokens), StepLinear.__new__(StepLinear)
        made.out, made.kind, made._steps = self.out, self.kind, self._steps
        by_parts = LiftThenMultiply(self._by_parts.backend, lift, self.out)
        made._size(lift, by_parts, self._gemm.for_tokens(tokens))
        return made

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, tensors: LinearTensors, eps: float) -> Products:
        """See :data:`slidesparse.gemm.backend.Runner`."""
        lift, weight = self.lift, self.weight_addresses(tensors)
        inputs = lift.inputs(x, residual, tensors.norm_weight)
        if inputs is None or weight is None:
            log_by_parts(self, lift, x, residual, tensors)
            return self._by_parts(x, residual, tensors, eps)
        residual_out = None if residual is None else empty_here(*lift.shape, lift.source)
        workspace, y = empty_here(1, self.workspace_bytes, torch.uint8), empty_here(lift.tokens, self.out, lift.source)
        residual_out_at = None if residual_out is None else residual_out.data_ptr()
        self.launch(inputs, residual_out_at, workspace.data_ptr(), weight, y.data_ptr(), eps)
        return y, residual_out

    def weight_addresses(self, tensors: LinearTensors) -> WeightAddresses | None:
        """Return a weight's addresses; None where the kernel cannot read its sizes, types, strides or device."""
        device, (steps,) = self.lift.device, tensors.operand
        if steps.shape != self._steps or steps.dtype != torch.uint8:
            return None
        if steps.device != device or not steps.is_contiguous():
            return None
        scale_at = bias_at = None
        bias_type = 0
        if tensors.scale is not None:
            if not is_vector(tensors.scale, self.out, device, FLOAT32):
                return None
            scale_at = tensors.scale.data_ptr()
        if tensors.bias is not None:
            if not is_vector(tensors.bias, self.out, device, BIAS_TYPES):
                return None
            bias_at, bias_type = tensors.bias.data_ptr(), BIAS_TYPES[tensors.bias.dtype]
        return WeightAddresses(steps.data_ptr(), scale_at, bias_at, bias_type)

    def launch(
        self, inputs: LiftInputs, residual_out: int | None, workspace: int, weight: WeightAddresses, y: int, eps: float
    ) -> None:
        """Launch both kernels by addresses; nothing is checked.

        Args:
            inputs: Addresses that the lift reads.
            residual_out: Address of the new residual; None without one.
            workspace: Address of ``workspace_bytes`` bytes.
            weight: From :meth:`weight_addresses`.
            y: Address of the product [M, out] in the type of the activations.
            eps: The norm's epsilon.
        """
        scale = workspace + self._scales_start if self.lift.quantised else None
        self.lift.launch(inputs, eps, residual_out=residual_out, values=workspace, scale=scale)
        self._gemm.launch(workspace, scale, weight, y)

    def __repr__(self) -> str:
        tiles = [str(band.kernel.tile) for band in self._gemm.bands]
        return f"{self._by_parts.backend.name} {' + '.join(tiles) or 'nothing'}"
