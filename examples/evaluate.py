"""Compare the perplexity of a pruned model with the dense one's: python examples/evaluate.py [DENSE] [PRUNED ...]."""

import argparse
from pathlib import Path

import slidesparse as ss

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("dense", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder, or a hub's name")
parser.add_argument("pruned", nargs="*", default=["6of8"], help="what examples/prune.py wrote, and others")
parser.add_argument(
    "--text", default=Path(__file__).parents[1] / "docs/pruning.md", help="a text other than that of pruning"
)
arguments = parser.parse_args()

# Windows of one length: with more context every model predicts better.
before = ss.evaluate(arguments.dense, arguments.text, window=512).perplexity
print(f"{arguments.dense}: {before.perplexity:.3f} over {before.tokens} tokens")
for model in arguments.pruned:
    after = ss.evaluate(model, arguments.text, window=512).perplexity
    print(f"{model}: {after.perplexity:.3f}, {100 * (after.perplexity / before.perplexity - 1):+.1f} %")

# Perplexity hides what pruning does to answers of many steps. With the extra [eval], tasks tell more:
# ss.evaluate(model, tasks=["gsm8k"], limit=200).tasks
