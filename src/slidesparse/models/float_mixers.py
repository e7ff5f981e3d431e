"""Find the mixers of Mamba's first version, whose linears vLLM holds in floats: it has no place for their scales.

They are found by what they consist of. Mixers of the second version have neither ``x_proj`` nor ``dt_proj``.
"""

from __future__ import annotations

from torch import nn

LINEARS = ("in_proj", "x_proj", "dt_proj", "out_proj")
"""The linears of such a mixer (vLLM's model_executor/layers/mamba/mamba_mixer.py makes all without a quant_config)."""

IN_FLOATS = "a part of a first Mamba mixer, which vLLM holds in floats"


def linears_of_float_mixers(model: nn.Module) -> dict[str, str]:
    """Return the linears that vLLM does not read in 8 bits, and why.

    >>> mixer = nn.ModuleDict({leaf: nn.Linear(64, 64) for leaf in LINEARS})
    >>> list(linears_of_float_mixers(nn.ModuleDict({"mixer": mixer})))
    ['mixer.in_proj', 'mixer.x_proj', 'mixer.dt_proj', 'mixer.out_proj']
    """
    return {
        f"{name}.{leaf}".removeprefix("."): IN_FLOATS
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, leaf, None), nn.Linear) for leaf in LINEARS)
        for leaf in LINEARS
    }
