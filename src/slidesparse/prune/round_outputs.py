"""Round weights to integers so that outputs stay near, not each weight.

Rounding to nearest makes an error in each weight that has nothing to do with the others'. So columns are rounded one
after the other, and what each loses moves the columns that are still to come, by the factor that SparseGPT uses:
Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023). Columns with
the largest inputs come first, while all others can still make up for them.

Scales do not change: a row's largest weight stays where it is. So do zeros, whatever pattern they follow.
"""

from __future__ import annotations

import torch

from slidesparse.prune.base import Linears
from slidesparse.prune.gram import checked_gram
from slidesparse.prune.sparsegpt import BLOCK, inverse_factor
from slidesparse.weights.quant import SIX_BIT_MAX


class RoundForOutputs:
    """Rounds pruned weights so that quantising them to six bits takes less from the outputs."""

    name = "rounding"
    needs_calibration = True

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """See :class:`slidesparse.prune.base.Pruner`. Existing zeros stay."""
        gram, weights = checked_gram(linears), linears.weights
        order = gram.diagonal().argsort(descending=True, stable=True)
        factor, _ = inverse_factor(gram[order[:, None], order], ", ".join(weights))
        back = order.argsort()
        return {name: round_for_outputs(one[:, order], factor)[:, back] for name, one in weights.items()}


def round_for_outputs(weight: torch.Tensor, factor: torch.Tensor, most: float = SIX_BIT_MAX) -> torch.Tensor:
    """Return a weight that is a multiple of each row's scale, ``absmax / most``, but for the rounding of its type.

    Quantising it to nearest gives these multiples: 8 bits of significand tell 127 steps apart.

    Args:
        weight: [out, in], bfloat16, float16 or float32.
        factor: From :func:`slidesparse.prune.sparsegpt.inverse_factor`, of the same order of columns.
        most: The largest integer, that of six bits. INT8 gains nothing.
    """
    wide, columns, diagonal = weight.to(torch.float32), weight.shape[1], factor.diagonal()
    absmax = wide.abs().amax(1, keepdim=True)
    scale = torch.where(absmax == 0, 1.0, absmax / most)
    current = wide / scale
    nearest = current.round()
    stays = (wide == 0) | (wide.abs() == absmax)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.zeros_like(current[:, start:end])
        for column in range(start, end):
            wanted = current[:, column].round().clamp(-most, most)
            wanted = torch.where(stays[:, column], nearest[:, column], wanted)
            error = (current[:, column] - wanted) / diagonal[column]
            current[:, column:end] -= torch.outer(error, factor[column, column:end])
            current[:, column] = wanted
            errors[:, column - start] = error
        current[:, end:] -= errors @ factor[start:end, end:]
    return (current * scale).to(weight.dtype)
