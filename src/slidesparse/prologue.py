"""Prologues: the norm or activation between two linears that a lift kernel computes before it quantises.

These are the torch definitions, in float32 throughout and rounded once to the type of the activations. This is what the
definitions of vLLM (vllm/ir/ops/layernorm.py, ``SiluAndMul.forward_native``) become when Inductor compiles them, which
is the default: what lies between stays in float32. The eager kernels of vLLM round it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Prologue: TypeAlias = Literal["none", "rms_norm", "add_rms_norm", "silu_mul"]
"""The function below that is applied to a row before it is quantised."""

NORMS = ("rms_norm", "add_rms_norm")
"""Those that have a gain."""


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * gain``, in the type of the gain.

    Args:
        x: [..., K], bfloat16, float16 or float32.
        gain: [K].
        eps: Added to the mean square.
    """
    wide = x.to(torch.float32)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * gain.to(torch.float32)).to(gain.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add first, then :func:`rms_norm` of the sum: returns it, and the sum in x's type, the residual from here on.

    The residual is contiguous, whatever the strides of the inputs.
    """
    total = x.to(torch.float32) + residual.to(torch.float32)
    return rms_norm(total, gain, eps), total.to(x.dtype).contiguous()


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``: x [..., 2K], gate then up -> [..., K]."""
    gate, up = x.to(torch.float32).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
