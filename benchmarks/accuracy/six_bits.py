"""What rounding INT8 weights to six bits costs trained language models, in one shot, beside what pruning costs them.

The models are those of ``run.py``, which trains them where their weights are not kept. Six bits are one more type in
which a model is judged as it is served.

    python benchmarks/accuracy/six_bits.py --corpus corpus.xz --weights FOLDER --out results/accuracy/six-bits
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lm import SIZES, Data, judge, served
from run import CALIBRATION_WINDOWS, MATCH_STEPS, PATTERNS, Experiment, Job

METHODS = ("sparsegpt", "magnitude")
SIX_BITS = "int8 in six bits"


class SixBits(Experiment):
    """One trained model, pruned by every method to every pattern."""

    def run(self) -> None:
        """Judge the dense model and all pruned ones."""
        self.train()
        self.one("dense none 0", self.restored)
        for method in METHODS:
            for pattern in PATTERNS:
                self.one(f"{pattern} {method} 0", lambda pattern=pattern, method=method: self.made(pattern, method))

    def restored(self) -> dict[str, object]:
        """The dense model, in six bits."""
        self.restore()
        return self.in_six_bits()

    def made(self, pattern: str, method: str) -> dict[str, object]:
        """A pruned one."""
        return self.prune(self.patterns(pattern), method) | self.in_six_bits()

    def in_six_bits(self) -> dict[str, object]:
        """Perplexity of packages that are held out, as served."""
        with served(self.model, "int8", "6bit"):
            return {SIX_BITS: judge(self.model, self.data, ("packages",))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="the file that corpus.py wrote")
    parser.add_argument("--weights", type=Path, required=True, help="folder where trained weights are kept")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--size", default="30m", choices=SIZES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=float, default=1.25, help="how often the text is read")
    parser.add_argument("--windows", type=int, default=CALIBRATION_WINDOWS, help="of text to calibrate on")
    parser.add_argument("--limit", type=int, help="tokens of text, to try the script")
    options = parser.parse_args()
    options.match_steps = MATCH_STEPS
    data = Data(options.corpus, torch.device("cuda" if torch.cuda.is_available() else "cpu"), options.limit)
    for seed in options.seeds:
        SixBits(Job(options.size, seed), data, options).run()


if __name__ == "__main__":
    main()
