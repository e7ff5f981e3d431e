"""Linears whose inputs depend on each other, for tests of calibrated pruning."""

from __future__ import annotations

import torch

from slidesparse.pruning import Linears
from slidesparse.weights.pattern import Pattern


def correlated_inputs(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Activations as models have them: columns of very different size, and dependent on each other."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns // 4 + 1, columns, generator=generator)
    x = torch.randn(tokens, len(mixing), generator=generator) @ mixing
    x += 0.5 * torch.randn(tokens, columns, generator=generator)
    return x * torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]


def linears_with(columns: int, pattern: str, *rows: int) -> tuple[Linears, torch.Tensor]:
    """Linears of random weights that share such inputs, one for each number of rows, and the inputs [512, columns]."""
    x = correlated_inputs(512, columns)
    weights = {f"w{i}": torch.randn(out, columns) for i, out in enumerate(rows)}
    return Linears(weights, Pattern.parse(pattern), x.T @ x), x
