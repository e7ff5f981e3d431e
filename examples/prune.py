"""Prune a model to 6:8 and quantise it to INT8: python examples/prune.py [MODEL] [--text FILE]."""

import argparse

import slidesparse as ss

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder, or a hub's name")
parser.add_argument("--out", default="6of8", help="folder to make")
parser.add_argument("--text", help="text like the model's use (default: Python's standard library)")
arguments = parser.parse_args()

# What would be done, how large it would be, and how long it takes. Nothing is written.
print(ss.prune(arguments.model, arguments.out, "6:8", calibration=arguments.text, dry_run=True).describe())

# Do it: minutes on a GPU for a model of 7 B. A call that was interrupted goes on where it was.
done = ss.prune(arguments.model, arguments.out, "6:8", calibration=arguments.text)
print(done.describe())

# The outcome is data, too: which linears lost most?
for names, loss in sorted(done.losses.items(), key=lambda item: -item[1])[:3]:
    print(f"{loss:.1e} of the output's energy is lost in {names}")
