"""The accuracy experiment on one model: train it, prune it in every way, train on with the zeros held, judge each.

Appends one JSON line for each result and skips those that the file holds already, so an interrupted run goes on (with
the same weights, which ``--weights`` keeps).

    python benchmarks/accuracy/run.py --data FOLDER --size 10m --seed 0 --out results/accuracy/10m-0.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from lm import CONTEXT, SIZES, Data, Trainer, build, calibration, judge

from slidesparse.models.choose_patterns import PatternChoice, PlanSet, Target, choose_patterns, modelled_cost
from slidesparse.models.layerwise import SetLoss, find_layer_list, prune_layers, record_inputs
from slidesparse.models.sensitivity import measure_sensitivities
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.pattern import DENSE, Pattern
from slidesparse.prune import get_pruner
from slidesparse.recovery import HeldZeros
from slidesparse.support import is_nonzero

PATTERNS = ("14:16", "8:10", "6:8", "4:6@50%", "4:6", "2:4")
MORE = ("10:12", "4:6@25%", "4:6@75%", "2:4@25%", "2:4@50%")  # for the frontier, SparseGPT and no recovery only
METHODS = ("magnitude", "wanda", "sparsegpt")
CANDIDATES = ("dense", "14:16", "10:12", "8:10", "6:8", "4:6", "2:4", "4:6@25%", "4:6@50%", "4:6@75%", "2:4@50%")
RIVALS = (("10:12", Fraction(2)), ("6:8", Fraction(2)), ("4:6", Fraction(8, 5)))
"""Uniform patterns that a plan of the same modelled speed must beat, and the gain of a 2:4 multiply."""

CALIBRATION_WINDOWS = 128
HELD_OUT_WINDOWS = 16
RECOVERY_RATE = 0.3  # of the rate of training


class Log:
    """Results as JSON lines; the key of each says what it is of."""

    def __init__(self, path: Path, **common: Any) -> None:
        self.path, self.common = path, common
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.done = {json.loads(line)["key"] for line in lines}

    def write(self, key: str, **fields: Any) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"format": 1, "key": key, "written": now, **self.common, **fields}) + "\n")
        shown = {name: round(value, 4) for name, value in fields.items() if isinstance(value, float)}
        print(f"{key}: {shown}", flush=True)


def commit() -> str:
    """Of a copied tree, which has no git: the environment says it."""
    told = os.environ.get("SLIDESPARSE_COMMIT")
    if told:
        return told
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def machine(device: torch.device) -> dict[str, str]:
    import transformers

    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


class Experiment:
    """One trained model and everything that is done to it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.size = options, SIZES[options.size]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.log = Log(
            options.out,
            model=options.size,
            seed=options.seed,
            commit=commit(),
            machine=machine(self.device),
        )
        self.data = Data(options.data, self.device, options.limit)
        self.model: Any = build(self.size, options.seed).to(self.device)
        self.trainer = Trainer(self.model, self.size, self.data, compiled=self.device.type == "cuda")
        self.linears = find_targets(self.model).linears
        everything = dict.fromkeys(self.linears, Pattern.parse("6:8"))
        run = run_once(self.model)
        self.sets = sets_to_prune(self.model, self.linears, everything, get_pruner("sparsegpt"), run)
        self.calibration = calibration(self.data, CALIBRATION_WINDOWS if options.limit is None else 8, options.seed)

    def train(self) -> None:
        weights: Path | None = self.options.weights
        if weights is not None and weights.exists():
            self.model.load_state_dict(torch.load(weights, map_location=self.device))
        else:
            steps = self.options.steps
            told = self.trainer.train(steps, self.size.rate, self.options.seed, warmup=min(200, steps // 10))
            if weights is not None:
                torch.save(self.model.state_dict(), weights)
            self.log.write(
                "trained",
                parameters=sum(p.numel() for p in self.model.parameters()),
                linear_parameters=sum(linear.weight.numel() for linear in self.linears.values()),
                steps=steps,
                tokens=steps * self.size.batch * CONTEXT,
                corpus=self.data.facts,
                rate=self.size.rate,
                **told,
            )
        self.trained = {name: value.clone() for name, value in self.model.state_dict().items()}

    def restore(self) -> None:
        self.model.load_state_dict(self.trained)

    @torch.no_grad()
    def calibration_nats(self) -> float:
        """Loss of the model as it is on the calibration windows."""
        total, tokens = 0.0, 0
        for batch in self.calibration:
            ids = batch["input_ids"]
            logits = self.model(**batch).logits[:, :-1].float()
            total += float(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            )
            tokens += ids[:, 1:].numel()
        return total / tokens

    def prune(self, patterns: dict[str, Pattern], method: str) -> list[SetLoss]:
        self.restore()
        self.model.eval()
        layer_list = find_layer_list(self.model, self.linears)
        samples = record_inputs(self.model, layer_list, self.calibration)
        steps = prune_layers(self.model, layer_list, self.sets, patterns, get_pruner(method), samples)
        return [loss for losses in steps for loss in losses]

    def zeros(self) -> float:
        weights = [linear.weight.detach() for linear in self.linears.values()]
        return 1 - sum(int(is_nonzero(w).sum()) for w in weights) / sum(w.numel() for w in weights)

    def judged(self, pattern: str, method: str, recovery_steps: int, **more: Any) -> None:
        key = f"{pattern} {method} {recovery_steps}"
        self.log.write(
            key,
            pattern=pattern,
            method=method,
            recovery_steps=recovery_steps,
            zeros=self.zeros(),
            calibration_nats=self.calibration_nats(),
            **judge(self.model, self.data),
            **more,
        )

    def one_shot(self, pattern: str, method: str) -> None:
        if f"{pattern} {method} 0" in self.log.done:
            return
        started = time.perf_counter()
        losses = self.prune(dict.fromkeys(self.linears, Pattern.parse(pattern)), method)
        seconds = time.perf_counter() - started
        values = [loss.loss for loss in losses]
        self.judged(
            pattern, method, 0, set_loss_mean=sum(values) / len(values), set_loss_max=max(values), seconds=seconds
        )

    def dense(self, recovery_steps: int) -> None:
        if f"dense none {recovery_steps}" in self.log.done:
            return
        self.restore()
        if recovery_steps:
            self.trainer.train(recovery_steps, RECOVERY_RATE * self.size.rate, 1000 + self.options.seed, warmup=10)
        self.judged("dense", "none", recovery_steps)

    def recovered(self, pattern: str, method: str) -> None:
        steps = self.options.recovery_steps
        if f"{pattern} {method} {steps}" in self.log.done:
            return
        self.prune(dict.fromkeys(self.linears, Pattern.parse(pattern)), method)
        zeros, before = HeldZeros(self.model), self.zeros()
        # The same batches as for the dense model.
        self.trainer.train(
            steps, RECOVERY_RATE * self.size.rate, 1000 + self.options.seed, warmup=10, after_step=zeros.apply_
        )
        assert self.zeros() >= before
        self.judged(pattern, method, steps)

    def plans(self) -> None:
        if all(f"plan {rival} {gain}" in self.log.done for rival, gain in RIVALS):
            return
        self.restore()
        self.model.eval()
        patterns = [Pattern.parse(text) for text in CANDIDATES]
        started = time.perf_counter()
        held_out = calibration(
            self.data, HELD_OUT_WINDOWS if self.options.limit is None else 4, 500 + self.options.seed
        )
        choices: dict[tuple[str, ...], list[PatternChoice]] = {}
        pruner = get_pruner(self.options.plan_method)
        for found in measure_sensitivities(self.model, self.sets, patterns, pruner, self.calibration, held_out):
            kept = choices.setdefault(found.names, [PatternChoice(DENSE, 0.0)])
            kept.append(PatternChoice(Pattern.parse(found.pattern), found.damage))
        shapes = {name: (linear.out_features, linear.in_features) for name, linear in self.linears.items()}
        sets = [PlanSet(names, tuple(shapes[n] for n in names), tuple(found)) for names, found in choices.items()]
        self.log.write(
            "sensitivities",
            seconds=time.perf_counter() - started,
            method=self.options.plan_method,
            damages=[[" ".join(s.names), {str(c.pattern): c.damage for c in s.choices}] for s in sets],
        )
        for rival, gain in RIVALS:
            uniform = Pattern.parse(rival)
            total = sum(out * columns for out, columns in shapes.values())
            speedup = float(total / sum(modelled_cost(uniform, *shape, gain) for shape in shapes.values()))
            plan = choose_patterns(sets, Target(speedup=speedup), gain)
            self.prune(dict(plan.patterns), "sparsegpt")
            self.log.write(
                f"plan {rival} {gain}",
                rival=rival,
                mma_gain=float(gain),
                rival_speedup=speedup,
                speedup=plan.speedup,
                damage=plan.damage,
                rival_damage=sum(c.damage for s in sets for c in s.choices if c.pattern == uniform),
                zeros=self.zeros(),
                patterns={name: str(pattern) for name, pattern in plan.patterns.items()},
                **judge(self.model, self.data),
            )


def everything(experiment: Experiment) -> None:
    options = experiment.options
    experiment.train()
    experiment.dense(0)
    for method in reversed(METHODS):
        for pattern in options.patterns if method == "sparsegpt" else options.compared:
            experiment.one_shot(pattern, method)
    if options.plan_method != "none":
        for pattern in MORE:
            experiment.one_shot(pattern, "sparsegpt")
        experiment.plans()
    experiment.dense(options.recovery_steps)
    for method in options.recovery_methods:
        for pattern in options.recovered:
            experiment.recovered(pattern, method)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--recovery-steps", type=int, required=True)
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    parser.add_argument("--compared", nargs="+", default=PATTERNS, help="patterns for Wanda and magnitude")
    parser.add_argument("--recovered", nargs="+", default=PATTERNS)
    parser.add_argument("--recovery-methods", nargs="+", default=tuple(reversed(METHODS)))
    parser.add_argument("--plan-method", default="none", help="method that sensitivities are measured with, or none")
    parser.add_argument("--weights", type=Path, help="where the trained weights are kept")
    parser.add_argument("--limit", type=int, help="characters of text, to try the script")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    everything(Experiment(options))


if __name__ == "__main__":
    main()
