"""Measure what rounding to six bits costs a trained sentence encoder, beside pruning and INT8.

    python benchmarks/six_bits_fidelity.py OUT.json

Needs the extra ``demo``, and no GPU. The encoder is that of ``examples/encoder.py``, and the measure Spearman's
correlation of the similarities of 120 sentences with those of the dense float32 model. Pruning is by magnitude.
"""

from __future__ import annotations

import argparse
import copy
import json
import runpy
from datetime import date
from pathlib import Path

import torch

from slidesparse.models.sparsify import sparsify_
from slidesparse.models.targets import find_targets
from slidesparse.pruning import prune_mask
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import Rounding
from slidesparse_bench import environment

ENCODER = runpy.run_path(str(Path(__file__).parents[1] / "examples/encoder.py"))
PATTERNS = ("dense", "6:8", "4:6", "2:4")
IGNORE = ("pooler.dense",)
RECIPES: tuple[Rounding, ...] = ("absmax", "6bit")


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Spearman's rank correlation of two vectors [n] without equal values: Pearson's correlation of their ranks."""
    return float(torch.corrcoef(torch.stack([one.argsort().argsort().double() for one in (a, b)]))[0, 1])


def pair_similarities(embeddings: torch.Tensor) -> torch.Tensor:
    """The cosines of all pairs of unit vectors: [n, d] -> [n (n-1) / 2]."""
    i, j = torch.triu_indices(len(embeddings), len(embeddings), offset=1)
    return (embeddings @ embeddings.T)[i, j]


def prune_(model: torch.nn.Module, pattern: Pattern) -> None:
    """Prune the linears of the encoder by magnitude, in place."""
    for linear in find_targets(model, IGNORE).linears.values():
        linear.weight.data *= prune_mask(linear.weight.data, pattern)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    model, batches = ENCODER["load"]()
    embed = ENCODER["embed"]
    exact = pair_similarities(embed(model, batches))
    rows = []
    for pattern in map(Pattern.parse, PATTERNS):
        pruned = copy.deepcopy(model)
        if pattern != DENSE:
            prune_(pruned, pattern)
        row = {"pattern": str(pattern), "float": spearman(exact, pair_similarities(embed(pruned, batches)))}
        for recipe in RECIPES:
            given = copy.deepcopy(pruned)
            treated = sparsify_(given, pattern, ignore=IGNORE, method=None, backend="dense", rounding=recipe)
            row[recipe] = spearman(exact, pair_similarities(embed(treated, batches)))
        rows.append({name: value if isinstance(value, str) else round(value, 4) for name, value in row.items()})
        print(rows[-1], flush=True)
    head = {"what": __doc__.splitlines()[0], "commit": environment.commit(), "date": str(date.today())}
    options.file.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
