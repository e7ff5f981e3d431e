"""Checked input statistics of calibrated methods, and their loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slidesparse.errors import InputError
from slidesparse.pruning.base import Linears
from slidesparse.weights.support import check_weight


def checked_gram(linears: Linears) -> torch.Tensor:
    """Return the gram matrix of the common input, float32 [in, in], after checking it and the weights.

    Raises:
        InputError: It is missing, has the wrong shape, holds NaN or Inf, or every input was zero.
    """
    names = ", ".join(linears.weights)
    for name, weight in linears.weights.items():
        check_weight(weight, name)
        if not weight.is_floating_point():
            raise InputError(f"{name} has an unsupported type", got=weight.dtype, needed="float weights to calibrate")
    gram = linears.input_gram
    columns = {weight.shape[1] for weight in linears.weights.values()}
    if len(columns) != 1:
        raise InputError("linears that read one input differ in columns", got=sorted(columns), needed="one number")
    if gram is None:
        raise InputError(f"{names}: no calibration inputs", remedy="pass input_gram, or prune by magnitude")
    (in_features,) = columns
    if tuple(gram.shape) != (in_features, in_features):
        raise InputError(f"input_gram of {names}", got=list(gram.shape), needed=f"[{in_features}, {in_features}]")
    if not bool(torch.isfinite(gram).all()):
        raise InputError(
            f"the calibration inputs of {names} hold NaN or Inf",
            remedy="check that the model runs in its type: FP16 overflows where BF16 does not",
        )
    if not bool((gram.diagonal() > 0).any()):
        raise InputError(f"the calibration inputs of {names} are all zero", needed="text that reaches this layer")
    return gram.to(torch.float32)


def output_error(original: Mapping[str, torch.Tensor], pruned: Mapping[str, torch.Tensor], gram: torch.Tensor) -> float:
    """Return the squared error of the outputs over their energy, for all linears of a set together.

    With ``G = sum x x^T`` and ``D = W - W'`` it is ``tr(D G D^T) / tr(W G W^T)``: 0 if nothing changed, 1 if all
    weights are zero. Wanda bounds this loss, and SparseGPT minimises it.

    Args:
        original: Name -> weight [out_i, in].
        pruned: The same names and shapes.
        gram: float32 [in, in].
    """
    error = 0.0
    for name, weight in original.items():
        difference = weight.to(torch.float32) - pruned[name].to(torch.float32)
        error += float(((difference @ gram) * difference).sum(dtype=torch.float64))
    energy = _energy(original, gram)
    return max(error, 0.0) / energy if energy > 0 else 0.0


def rounding_error(weights: Mapping[str, torch.Tensor], gram: torch.Tensor, squared_error: float) -> float:
    """Return the squared error of the outputs from rounded inputs, over their energy, for a set of linears.

    Errors of columns are uncorrelated, so it is ``e ||W||^2 / in``, where ``e`` is the sum of the inputs' squared
    errors and ``||W||^2`` that of the weights' squares.

    Args:
        weights: Name -> weight [out_i, in].
        gram: float32 [in, in], of the inputs before they are rounded.
        squared_error: ``e``, over the same inputs.
    """
    squares = sum(float(weight.to(torch.float32).square().sum(dtype=torch.float64)) for weight in weights.values())
    energy = _energy(weights, gram)
    return squared_error * squares / len(gram) / energy if energy > 0 else 0.0


def _energy(weights: Mapping[str, torch.Tensor], gram: torch.Tensor) -> float:
    """Return ``tr(W G W^T)``, summed over the weights."""
    wide = (weight.to(torch.float32) for weight in weights.values())
    return sum(float(((weight @ gram) * weight).sum(dtype=torch.float64)) for weight in wide)
