"""A small mixture of experts: what a pattern of its experts' weights costs, and what leaving experts out costs.

Appends to its records as run.py does. It is small enough to be trained on a CPU. Only experts are pruned.

    python benchmarks/accuracy/mixture.py --corpus corpus.xz --weights FOLDER --out results/accuracy
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm import CONTEXT, SIZES, Data, Trainer, build, calibration, save, served
from reap import drop_experts, mean_router_weighted_norms
from run import PATTERNS, Log, commit, machine

from slidesparse.models.expert_weights import calibrated_experts
from slidesparse.models.experts import find_experts
from slidesparse.models.layer_stack import find_layer_list, record_inputs
from slidesparse.models.layerwise import prune_layers
from slidesparse.models.perplexity import measure_perplexity
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import is_nonzero

VOCABULARY = 1024
METHODS = ("sparsegpt", "magnitude")
DROPPED = (3, 4, 6, 1, 2, 5)
"""Experts of a layer. The first three leave as many weights as the patterns; all together span the bytes of these."""

WINDOWS = 64  # to calibrate on
PIECE = 2048  # tokens of held-out text that follow each other
EVERY = 8  # of such pieces is judged


def expert_parameters(model: Any) -> int:
    weights = [(one, leaf) for one in find_experts(model) for leaf in one.weights]
    return sum(model.get_parameter(state).numel() for one, leaf in weights for state in one.states(leaf))


def prune_experts(model: Any, pattern: Pattern, method: str, batches: list[dict[str, Any]]) -> dict[str, float]:
    """Prune the experts with slidesparse's own code, layer by layer; the rest of the model stays as it is.

    Returns:
        The mean loss of a weight, the share of experts' weights that is kept, and the bytes that one takes in 8 bits.
    """
    layers = {one.layer(leaf) for one in find_experts(model) for leaf in one.weights}
    experts = calibrated_experts(model, layers)
    layer_list = find_layer_list(model, experts)
    samples = record_inputs(model, layer_list, batches)
    patterns = dict.fromkeys(experts, pattern)
    sets = [[name] for name in experts]
    found = list(prune_layers(model, layer_list, sets, patterns, get_pruner(method), samples, experts=experts))
    losses = [loss.loss for layer in found for loss in layer]
    kept = sum(int(is_nonzero(one.weight).sum()) for one in experts.values())
    return {
        "set_loss_mean": sum(losses) / len(losses),
        "experts_kept": kept / sum(one.weight.numel() for one in experts.values()),
    }


class Mixture:
    """One trained mixture, and everything that is done to its experts."""

    def __init__(self, seed: int, data: Data, options: argparse.Namespace) -> None:
        self.seed, self.data, self.size, name = seed, data, SIZES["mixture"], f"mixture-{seed}"
        facts = {"model": "mixture", "seed": seed, "commit": commit(), "machine": machine(data.device)}
        self.log = Log(options.out / f"{name}.jsonl", **facts)
        self.weights: Path = options.weights / f"{name}.pt"
        self.model: Any = build(self.size, seed, VOCABULARY).to(data.device)
        self.calibration = calibration(data, options.windows, 9000 + seed)
        text = data.text["packages"]
        self.judged = torch.cat(text.split(PIECE)[::EVERY]).to(torch.int64)

    def run(self, steps: int) -> None:
        """Train, prune every way, and judge each."""
        self.train(steps)
        self.model.config.output_router_logits = False
        self.one("dense none", lambda model: {"experts_kept": 1.0})
        for method in METHODS:
            for pattern in PATTERNS:
                self.one(f"{pattern} {method}", partial(self.pruned, pattern, method))
        for count in DROPPED:
            self.one(f"{count}-experts reap", partial(self.dropped, count))

    def train(self, steps: int) -> None:
        if self.weights.exists():
            self.model.load_state_dict(torch.load(self.weights))
            return
        self.log.refuse_another_model(self.weights)
        trainer = Trainer(self.model, self.size, self.data, compiled=self.data.device.type == "cuda")
        told = trainer.train(steps, self.size.rate, self.seed, warmup=min(100, steps // 10))
        self.log.write(
            "trained",
            parameters=sum(p.numel() for p in self.model.parameters()),
            expert_parameters=expert_parameters(self.model),
            layers=self.size.layers,
            experts=self.size.experts,
            vocabulary=VOCABULARY,
            steps=steps,
            tokens=steps * self.size.batch * CONTEXT,
            judged_tokens=len(self.judged),
            corpus=self.data.facts,
            rate=self.size.rate,
            **told,
        )
        save(self.model.state_dict(), self.weights)

    def pruned(self, pattern: str, method: str, model: Any) -> dict[str, float]:
        return prune_experts(model, Pattern.parse(pattern), method, self.calibration)

    def dropped(self, count: int, model: Any) -> dict[str, Any]:
        """Leave out the experts of each layer whose outputs weigh least, judged on the dense model at once."""
        norms = mean_router_weighted_norms(model, self.calibration)
        kept = [sorted(layer.argsort(descending=True)[: self.size.experts - count].tolist()) for layer in norms]
        drop_experts(model, kept)
        share = 1 - count / self.size.experts
        found = {"experts_kept": share, "kept": kept}
        return {**found, "router_weighted_norms": [layer.tolist() for layer in norms]}

    @torch.no_grad()
    def one(self, what: str, make: Callable[[Any], dict[str, Any]]) -> None:
        """Change a copy of the model and judge it, unless the log has it; the function returns what it has to say."""
        key = f"{what} 0"
        if key in self.log.done:
            return
        model = copy.deepcopy(self.model).eval()
        started = time.perf_counter()
        facts = make(model)
        facts["seconds"] = time.perf_counter() - started
        judged: dict[str, Any] = {"packages_perplexity": self.perplexity(model)}
        with served(model, "int8"):
            judged["int8"] = {"packages_perplexity": self.perplexity(model)}
        name, method = what.split()
        self.log.write(key, pattern=name, method=method, share=0.0, **judged, **facts)

    def perplexity(self, model: Any) -> float:
        found = measure_perplexity(
            lambda ids: model(input_ids=ids, use_cache=False).logits, self.judged, CONTEXT, CONTEXT * 3 // 4, batch=16
        )
        return found.perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="the file that corpus.py wrote")
    parser.add_argument("--weights", type=Path, required=True, help="folder where trained weights are kept")
    parser.add_argument("--steps", type=int, default=3600, help="of training, two windows each")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of text to calibrate on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="tokens of text, to try the script")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Data(options.corpus, device, options.limit, VOCABULARY)
    Mixture(options.seed, data, options).run(options.steps)


if __name__ == "__main__":
    main()
