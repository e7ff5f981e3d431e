"""The accuracy experiment: train models, prune them in every way, and judge each, in float and as served.

Appends one JSON line for each result and skips those that a file holds already, so an interrupted run goes on: with the
weights that ``--weights`` keeps, and within a training with its last saved state. Results whose weights are gone stay
alone: a model that is trained again is another one. What says most comes first.

    python benchmarks/accuracy/run.py --corpus corpus.xz --weights FOLDER --out results/accuracy
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from lm import CONTEXT, SIZES, Data, Trainer, build, calibration, influence, judge, save, served

from slidesparse import HeldZeros
from slidesparse.models.layer_stack import find_layer_list, record_inputs
from slidesparse.models.layerwise import prune_layers
from slidesparse.models.match_layer import Matching
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import is_nonzero

PATTERNS = ("6:8", "4:6", "2:4")
MATCHED = "sparsegpt + match"
METHODS = (MATCHED, "sparsegpt", "magnitude")
LAYERS_LEFT_OUT = (2, 4)
"""Of 14, which makes the model about as fast as 4:6 and 2:4 do."""

MATCH_STEPS = 200
CALIBRATION_WINDOWS = 512
EIGHT_BITS = ("int8", "fp8")


@dataclass(frozen=True)
class Recovery:
    """Training on with the zeros held: a share of the budget of training, and of its rate."""

    share: float
    rate: float

    def __str__(self) -> str:
        """The end of a record's key."""
        return f"{self.share}@{self.rate}"


GENTLE, MIDDLE, STRONG = (Recovery(0.03, rate) for rate in (0.05, 0.15, 0.3))
BRIEF = Recovery(0.01, 0.05)
RECOVERIES = (GENTLE, BRIEF, MIDDLE)
RECOVERIES_LEFT_OUT = (GENTLE, MIDDLE, STRONG)
"""Fewer layers have more to recover than zeros have, so they get a higher rate too."""


@dataclass(frozen=True)
class Job:
    """What is done with one model."""

    size: str
    seed: int
    methods: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()


JOBS = (
    *(Job("30m", seed, METHODS, LAYERS_LEFT_OUT) for seed in range(3)),
    *(Job("30m-12", seed) for seed in range(3)),
    Job("100m", 0, METHODS, LAYERS_LEFT_OUT),
)
"""In the order of what they tell."""

TINY = (Job("tiny", 0, METHODS, (1,)), Job("tiny-3", 0))
"""To try the script on a CPU."""


class Log:
    """Results as JSON lines; the key of each says what it is of."""

    def __init__(self, path: Path, **common: Any) -> None:
        self.path, self.common = path, common
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.done: dict[str, dict[str, Any]] = {record["key"]: record for record in map(json.loads, lines)}

    def refuse_another_model(self, weights: Path) -> None:
        """Refuse to train where results of a trained model are there already; to be called where weights are not."""
        if self.done:
            raise SystemExit(
                f"{self.path} has results of a trained model, and {weights} is not there; name its --weights, or"
                " another --out"
            )

    def write(self, key: str, **fields: Any) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.done[key] = {"format": 1, "key": key, "written": now, **self.common, **fields}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(self.done[key]) + "\n")
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

    def __init__(self, job: Job, data: Data, options: argparse.Namespace) -> None:
        self.job, self.data, self.size = job, data, SIZES[job.size]
        self.device = data.device
        name = f"{job.size}-{job.seed}"
        self.log = Log(
            options.out / f"{name}.jsonl", model=job.size, seed=job.seed, commit=commit(), machine=machine(self.device)
        )
        self.weights: Path = options.weights / f"{name}.pt"
        self.state: Path = options.weights / f"{name}-state.pt"
        self.steps = data.steps(options.epochs, self.size.batch)
        self.epochs: float = options.epochs
        self.match_steps: int = options.match_steps
        vocabulary = data.tokenizer.get_vocab_size()
        self.model: Any = build(self.size, job.seed, vocabulary).to(self.device)
        self.trainer = Trainer(self.model, self.size, data, compiled=self.device.type == "cuda")
        self.linears = find_targets(self.model).linears
        everything = dict.fromkeys(self.linears, Pattern.parse("6:8"))
        run = run_once(self.model)
        self.sets = sets_to_prune(self.model, self.linears, everything, get_pruner("sparsegpt"), run)
        self.calibration = calibration(data, options.windows, 9000 + job.seed)
        self.kept: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

    def run(self) -> None:
        """What the job asks for."""
        job = self.job
        self.train()
        self.one("dense none 0", self.restore)
        for method in job.methods:
            for pattern in PATTERNS:
                self.pruned(pattern, method)
        for count in job.left_out:
            self.leave_out(count)
        for recovery in RECOVERIES if job.methods else ():
            for pattern in PATTERNS:
                self.pruned(pattern, MATCHED, recovery)
        for count in job.left_out:
            for recovery in RECOVERIES_LEFT_OUT:
                self.leave_out(count, recovery)

    def train(self) -> None:
        if self.weights.exists():
            self.model.load_state_dict(torch.load(self.weights, map_location=self.device))
        else:
            self.log.refuse_another_model(self.weights)
            told = self.trainer.train(
                self.steps, self.size.rate, self.job.seed, warmup=min(200, self.steps // 10), saved=self.state
            )
            self.log.write(
                "trained",
                parameters=sum(p.numel() for p in self.model.parameters()),
                linear_parameters=sum(linear.weight.numel() for linear in self.linears.values()),
                layers=self.size.layers,
                steps=self.steps,
                epochs=self.epochs,
                tokens=self.steps * self.size.batch * CONTEXT,
                corpus=self.data.facts,
                rate=self.size.rate,
                **told,
            )
            save(self.model.state_dict(), self.weights)
            self.state.unlink(missing_ok=True)
        self.trained = self.copied()
        self.teacher = copy.deepcopy(self.model).eval()

    def one(self, key: str, make: Any) -> None:
        """Make a model by a function and judge it, unless the log has it; the function returns more fields, or none."""
        if key in self.log.done:
            return
        started = time.perf_counter()
        more = make() or {}
        seconds = time.perf_counter() - started
        what, _, recovery = key.rpartition(" ")
        share = recovery.partition("@")[0]
        name, _, method = what.partition(" ")
        judged = judge(self.model, self.data)
        for dtype in EIGHT_BITS:
            with served(self.model, dtype):
                judged[dtype] = judge(self.model, self.data, ("packages",))
        zeros = self.zeros()
        self.log.write(
            key, pattern=name, method=method, share=float(share), zeros=zeros, seconds=seconds, **judged, **more
        )

    def copied(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def restore(self) -> None:
        self.model.load_state_dict(self.trained)

    def pruned(self, pattern: str, method: str, recovery: Recovery | None = None) -> None:
        """Prune, and recover."""

        def make() -> dict[str, Any]:
            if (pattern, method) in self.kept:  # matching takes longer than all else
                self.model.load_state_dict(self.kept[pattern, method])
                found: dict[str, Any] = {}
            else:
                found = self.prune(pattern, method)
                self.kept[pattern, method] = self.copied()
            if recovery is None:
                return found
            zeros, before = HeldZeros(self.model), self.zeros()
            steps = self.recover(recovery, zeros.apply_)
            assert self.zeros() >= before
            return steps

        self.one(f"{pattern} {method} {recovery or 0}", make)

    def prune(self, pattern: str, method: str) -> dict[str, Any]:
        self.restore()
        self.model.eval()
        layer_list = find_layer_list(self.model, self.linears)
        samples = record_inputs(self.model, layer_list, self.calibration)
        pruner, matching = get_pruner(method.split()[0]), Matching(self.match_steps, self.job.seed)
        steps = prune_layers(
            self.model,
            layer_list,
            self.sets,
            dict.fromkeys(self.linears, Pattern.parse(pattern)),
            pruner,
            samples,
            matching=matching if method == MATCHED else None,
        )
        losses = [loss.loss for losses in steps for loss in losses]
        return {"set_loss_mean": sum(losses) / len(losses), "set_loss_max": max(losses)}

    def recover(self, recovery: Recovery, after_step: Any = lambda: None) -> dict[str, float]:
        """Train towards the dense model's predictions; the same windows whatever is recovered."""
        steps = max(round(recovery.share * self.steps), 2)
        self.trainer.train(
            steps,
            recovery.rate * self.size.rate,
            1000 + self.job.seed,
            warmup=max(steps // 10, 1),
            after_step=after_step,
            teacher=self.teacher,
        )
        return {"recovery_steps": steps, "recovery_rate": recovery.rate}

    def leave_out(self, count: int, recovery: Recovery | None = None) -> None:
        """Depth pruning: leave out the layers that turn the hidden state least."""

        key = f"{count}-layers left-out {recovery or 0}"
        if key in self.log.done:
            return
        self.restore()
        turned = influence(self.model.eval(), self.calibration, self.device)
        kept = sorted(sorted(range(len(turned)), key=turned.__getitem__)[count:])
        with self.trainer.only_layers(kept):
            self.one(key, lambda: {"kept": kept, "influence": turned, **(self.recover(recovery) if recovery else {})})

    def zeros(self) -> float:
        weights = [linear.weight.detach() for linear in self.linears.values()]
        return 1 - sum(int(is_nonzero(w).sum()) for w in weights) / sum(w.numel() for w in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="the file that corpus.py wrote")
    parser.add_argument("--epochs", type=float, default=1.25, help="how often the text is read")
    parser.add_argument("--weights", type=Path, required=True, help="folder where trained weights are kept")
    parser.add_argument("--windows", type=int, default=CALIBRATION_WINDOWS, help="of text to calibrate on")
    parser.add_argument("--match-steps", type=int, default=MATCH_STEPS)
    parser.add_argument("--models", nargs="+", help="only these, such as 30m-0 and 30m-12-0 (default: all)")
    parser.add_argument("--tiny", action="store_true", help="to try the script on a CPU")
    parser.add_argument("--limit", type=int, help="tokens of text, to try the script")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Data(options.corpus, device, options.limit)
    for job in TINY if options.tiny else JOBS:
        if options.models is None or f"{job.size}-{job.seed}" in options.models:
            Experiment(job, data, options).run()


if __name__ == "__main__":
    main()
