"""Prologue, quantisation and lifting of M tokens before a product, into a backend's layout.

On a GPU one Triton kernel does all of it (:mod:`slidesparse.lifting.kernel`). Elsewhere, and where Triton cannot, the
torch definition in this file computes the same numbers.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import torch

from slidesparse.base.log import log_once
from slidesparse.errors import InputError
from slidesparse.lifting.layout import Lifted, LiftSpec, LinearTensors, with_rows
from slidesparse.lifting.prologue import ADDING, GEMMA, add_rms_norm, rms_norm, silu_mul
from slidesparse.weights.quant import FLOATS, quantize_rows
from slidesparse.weights.slide import gather

if TYPE_CHECKING:
    from slidesparse.lifting.kernel import KernelLift  # needs Triton

Lift: TypeAlias = "TorchLift | KernelLift"
"""A lift of M tokens."""


def find_lift(spec: LiftSpec, tokens: int, device: torch.device) -> Lift:
    """Return the kernel that lifts M ``tokens`` on a device, or the torch definition."""
    if (reason := why_no_kernel(spec, device)) is not None:
        if device.type == "cuda":
            log_once(f"slidesparse: activations are lifted by torch, which is slow: {reason}", logging.WARNING)
        return TorchLift(spec)
    from slidesparse.lifting.kernel import find_kernel_lift

    return find_kernel_lift(spec, tokens, device)


def why_no_kernel(spec: LiftSpec, device: torch.device) -> str | None:
    """Return the reason why no kernel can lift here; None if one can."""
    if device.type != "cuda":
        return "they are not on a GPU"
    if not spec.order:
        return "the kernel cannot write this column order"
    if spec.source not in FLOATS:
        return f"the kernel reads no {spec.source}"
    if find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    needed = (8, 9) if spec.target == torch.float8_e4m3fn else (8, 0)
    if torch.cuda.get_device_capability(device) < needed:
        return f"the kernel needs compute capability {needed[0]}.{needed[1]}"
    return None


class TorchLift:
    """The definition of a lift, in torch, for any device."""

    def __init__(self, spec: LiftSpec) -> None:
        self.spec = spec

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, tensors: LinearTensors, eps: float) -> Lifted:
        """Apply the prologue, quantise and lift.

        Args:
            x: [M, K] of any strides; [M, 2K] for the prologue ``silu_mul``.
            residual: [M, K] in x's type, of any strides, for a norm that adds it.
            tensors: The linear's tensors, of which column map and the norm's weight are read.
            eps: The norm's epsilon.

        Raises:
            InputError: Shapes, types or devices do not fit.
        """
        self._check_rows(x)
        x, residual_out = self._apply_prologue(x, residual, tensors.norm_weight, eps)
        _check_finite(x)
        if self.spec.target == x.dtype:
            return Lifted(self._arranged(gather(x, tensors.column_map)), None, residual_out)
        values, scale = quantize_rows(x, self.spec.target, self.spec.activation_rounding)
        return Lifted(self._arranged(gather(values, tensors.column_map)), scale, residual_out)

    def _apply_prologue(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        prologue = self.spec.prologue
        if prologue == "none":
            return x, None
        if prologue == "silu_mul":
            return silu_mul(x), None
        if weight is None or weight.shape != x.shape[-1:]:  # torch would broadcast another one, and no kernel does
            raise InputError("weight of RMSNorm", got=_form(weight), needed=f"[{x.shape[-1]}]")
        offset = 1.0 if prologue in GEMMA else 0.0
        if prologue not in ADDING:
            return rms_norm(x, weight, eps, offset=offset), None
        if residual is None or residual.shape != x.shape:
            raise InputError("residual", got=_form(residual), needed=f"{list(x.shape)}, as the activations")
        return add_rms_norm(x, residual, weight, eps, offset=offset)

    def _check_rows(self, x: torch.Tensor) -> None:
        if x.dim() != 2 or not x.is_floating_point():
            raise InputError("activations to lift", got=f"{list(x.shape)} {x.dtype}", needed="floats [M, K]")
        # A gather would read some of the columns, or past the last one, which ends a process on a GPU.
        if self.spec.order and x.shape[-1] != self.spec.read:
            raise InputError("activations to lift", got=list(x.shape), needed=f"[M, {self.spec.read}]")

    def _arranged(self, lifted: torch.Tensor) -> torch.Tensor:
        (tokens, k_packed), layout = lifted.shape, self.spec.layout
        if layout.slabs is not None:
            return layout.slabs.arrange(lifted).view(-1, k_packed)[:tokens]
        return with_rows(lifted, layout.rows(tokens))[:tokens]


def _form(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))


def _check_finite(x: torch.Tensor) -> None:
    # On a GPU this would wait for the device; there NaN and Inf show as a NaN scale and NaN outputs of that token.
    if x.device.type == "cpu" and not bool(torch.isfinite(x).all()):
        raise InputError("activations hold NaN or Inf", needed="finite activations")
