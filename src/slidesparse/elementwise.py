"""What stands between two linears and can be done while the next one's activations are quantised and lifted.

The torch definitions, with the roundings of vLLM's CUDA kernels (layernorm_kernels.cu and activation_kernels.cu in
csrc/): each intermediate that vLLM keeps in the model's type is rounded to it here, everything else is float32.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, rounded before the weight and after it.

    Args:
        x: [..., K], bfloat16, float16 or float32.
        weight: [K], in x's type.
        eps: Added to the mean square.
    """
    wide = x.to(torch.float32)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add first, then :func:`rms_norm`: returns it, and the sum, which is the residual from here on."""
    total = (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype)
    return rms_norm(total, weight, eps), total


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``: x [..., 2K], gate then up -> [..., K]; silu is rounded before the product."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate.to(torch.float32)).to(x.dtype) * up
