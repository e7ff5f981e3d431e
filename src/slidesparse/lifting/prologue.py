"""Prologues: the norm or activation between two linears, which a lift kernel computes before it quantises.

These torch definitions compute in float32 and round once, to the type of the activations. So do vLLM's definitions
(vllm/ir/ops/layernorm.py, ``SiluAndMul.forward_native``) as compiled by Inductor, the default; vLLM's eager kernels
round intermediate values.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Prologue: TypeAlias = Literal["none", "rms_norm", "add_rms_norm", "gemma_norm", "add_gemma_norm", "silu_mul"]
"""Name of the function of a row before it is quantised. Gemma's norms store their weight less 1."""

NORMS: tuple[Prologue, ...] = ("rms_norm", "add_rms_norm", "gemma_norm", "add_gemma_norm")
"""The prologues with a weight."""

ADDING: tuple[Prologue, ...] = ("add_rms_norm", "add_gemma_norm")
"""The norms that add a residual first."""

GEMMA = ("gemma_norm", "add_gemma_norm")
"""The norms that add 1 to their weight."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * (weight + offset)``, in the type of the weight.

    Args:
        x: [..., K], bfloat16, float16 or float32.
        weight: [K].
        eps: Added to the mean square.
        offset: 1 for Gemma's norms, in float32.
    """
    wide = x.to(torch.float32)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * (weight.to(torch.float32) + offset)).to(weight.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`rms_norm` of ``x + residual``, and the sum in x's type, which is the new residual.

    The new residual is contiguous, whatever the strides of the inputs.
    """
    total = x.to(torch.float32) + residual.to(torch.float32)
    return rms_norm(total, weight, eps, offset=offset), total.to(x.dtype).contiguous()


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up``: x [..., 2K], gate then up -> [..., K]."""
    gate, up = x.to(torch.float32).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
