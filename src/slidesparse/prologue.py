"""What stands between two linears and can be done while the next one's activations are quantised and lifted.

The torch definitions, in float32 throughout and rounded once to the type of the activations. This is what the
definitions of vLLM (vllm/ir/ops/layernorm.py, ``SiluAndMul.forward_native``) become when Inductor compiles them, which
is the default: what lies between stays in float32. The eager kernels of vLLM round it.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``, in the type of the weight.

    Args:
        x: [..., K], bfloat16, float16 or float32.
        weight: [K].
        eps: Added to the mean square.
    """
    wide = x.to(torch.float32)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * weight.to(torch.float32)).to(weight.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add first, then :func:`rms_norm` of the sum: returns it, and the sum in x's type, the residual from here on.

    The residual is contiguous, whatever the strides of the inputs.
    """
    total = x.to(torch.float32) + residual.to(torch.float32)
    return rms_norm(total, weight, eps), total.to(x.dtype).contiguous()


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``: x [..., 2K], gate then up -> [..., K]."""
    gate, up = x.to(torch.float32).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
