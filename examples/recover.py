"""Prune, train on toward the dense model, then round: python examples/recover.py [MODEL] [--text FILE ...]."""

import argparse
from pathlib import Path

import slidesparse as ss

PAGES = str(Path(__file__).parents[1] / "docs")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder, or a hub's name")
parser.add_argument("--out", default="recovery", help="folder for the three checkpoints")
parser.add_argument("--text", nargs="+", default=[PAGES], help="texts like the model's use, or FILE:WEIGHT")
parser.add_argument("--tokens", default="200k", help="tokens to train on; docs/recipe.md says how many are worth it")
arguments = parser.parse_args()
pruned, recovered, served = (f"{arguments.out}/{name}" for name in ("pruned", "recovered", "served"))
Path(arguments.out).mkdir(exist_ok=True)

# 1. Zeros in a float type, which training needs; the type is the source's. Calibrated on a set that comes along:
#    calibration="text.txt" is better, with a megabyte of text like the model's use.
ss.prune(arguments.model, pruned, "6:8", dtype="bf16", match_steps=20)

# 2. The pruned model learns to predict what the dense one predicts; the zeros stay. A step has 8 windows here, so that
#    few tokens make some steps: leave batch out for millions.
done = ss.recover(
    pruned, arguments.model, recovered, tokens=arguments.tokens, texts=arguments.text, batch=8192, eval_windows=8
)
print(done.describe())

# 3. Rounding keeps the zeros of its source.
print(ss.prune(recovered, served, "6:8").describe())
