"""What rounding alone takes from a model, by part and by remedy: perplexity of held-out code over that in float.

    python rounding.py CHECKPOINT [--out RECORDS.jsonl] [--tokens 4096] [--only REGEX]

Rounding is simulated in float32 with ordinary linears: weights as ``weights.quant`` rounds them, inputs by token to
INT8. Remedies are those of the product: weights rounded for outputs (``prune/round_outputs.py``), outliers folded into
weights (``models/smooth.py``) behind norms and between up and down. What they calibrate on is the standard library.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import texts
import torch
from compare import paired
from judge import about
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from slidesparse.models.hooks import hooked
from slidesparse.models.smooth import best_exponents, exponents
from slidesparse.models.targets import find_targets
from slidesparse.offline.calibrate.smoothing import TOKENS
from slidesparse.prune.round_outputs import round_for_outputs
from slidesparse.prune.sparsegpt import DAMPING
from slidesparse.weights.quant import dequantize, quantize_rows, quantize_rows_to_six_bits

MOST = {"int8": 127.0, "6bit": 31.0}
READERS = {"norm": (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")), "down": (("down_proj",),)}
"""Linears that read one input into which outliers may be folded: behind a norm, and behind the rows of up."""


class Study:
    """A model in float32, what its linears read on a text, and its weights as they were."""

    def __init__(self, path: Path, calibration: torch.Tensor, judged: torch.Tensor) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        self.linears = find_targets(self.model).linears
        self.judged, calibration = judged.to(device), calibration.to(device)
        self.weights = {name: linear.weight.detach().clone() for name, linear in self.linears.items()}
        self.grams: dict[str, torch.Tensor] = {}
        self.largest: dict[str, torch.Tensor] = {}
        self.some: dict[str, torch.Tensor] = {}
        self.see(calibration)
        self.base = self.losses()

    @torch.no_grad()
    def see(self, windows: torch.Tensor) -> None:
        """Sum up what linears read; those that read one input share it."""

        def hook(name: str) -> Any:
            def collect(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                x = args[0].flatten(0, -2)
                self.grams[name] = self.grams.get(name, 0) + x.T @ x
                self.some.setdefault(name, x[:TOKENS].clone())
                self.largest[name] = torch.maximum(self.largest.get(name, x.new_zeros(())), x.abs().amax(0))

            return collect

        first = [name for name in self.linears if name.endswith(("q_proj", "o_proj", "gate_proj", "down_proj"))]
        with hooked(self.linears[name].register_forward_pre_hook(hook(name)) for name in first):
            for some in windows.split(4):
                self.model(some, use_cache=False)
        for name in self.linears:
            first_name = re.sub("[kv]_proj$", "q_proj", name).replace("up_proj", "gate_proj")
            for seen in (self.grams, self.largest, self.some):
                seen[name] = seen[first_name]

    @torch.no_grad()
    def losses(self) -> list[float]:
        found = []
        for ids in self.judged.split(2):
            logits = self.model(ids, use_cache=False).logits[:, :-1]
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            found += losses.double().mean(1).tolist()
        return found

    def factors(self, kinds: list[str], strength: float | None, weights: str | None) -> dict[str, torch.Tensor]:
        """Return by what columns are multiplied and inputs divided; without a strength, as ``prune`` finds it."""
        found = {name: torch.ones_like(self.largest[name]) for name in self.linears}
        sets = {(name.rsplit(".", 1)[0], readers) for kind in kinds for readers in READERS[kind] for name in found}
        for parent, readers in sets:
            names = [f"{parent}.{leaf}" for leaf in readers if f"{parent}.{leaf}" in found]
            if names:
                own, first = [self.weights[name] for name in names], names[0]
                if strength is None:
                    eight = partial(quantize_rows, dtype=torch.int8)
                    of_weights = quantize_rows_to_six_bits if weights == "6bit" else eight
                    powers = best_exponents(self.some[first], self.largest[first], own, eight, of_weights)
                else:
                    powers = exponents(self.largest[first], own, strength)
                found |= dict.fromkeys(names, torch.exp2(powers.float()))
        return found

    @contextmanager
    def rounded(
        self, weights: str | None, feedback: bool, inputs: str, factors: dict[str, torch.Tensor]
    ) -> Iterator[None]:
        """Round weights and the inputs of linears whose names match."""
        handles = []
        for name, linear in self.linears.items():
            factor = factors[name]
            scaled = self.weights[name] * factor
            if weights is not None:
                if feedback:
                    gram = self.grams[name] / torch.outer(factor, factor)
                    scaled = round_for_outputs(scaled, gram, MOST[weights], DAMPING * float(gram.diagonal().mean()))
                scaled = dequantize(
                    *(quantize_rows_to_six_bits(scaled) if weights == "6bit" else quantize_rows(scaled, torch.int8))
                )
            linear.weight.data = scaled / factor

            def round_input(_: nn.Module, args: tuple[torch.Tensor, ...], factor: torch.Tensor = factor) -> Any:
                x = args[0].flatten(0, -2) / factor
                return ((dequantize(*quantize_rows(x, torch.int8)) * factor).view_as(args[0]),)

            if inputs and re.search(inputs, name):
                handles.append(linear.register_forward_pre_hook(round_input))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name, linear in self.linears.items():
                linear.weight.data = self.weights[name]

    def measure(
        self, weights: str | None, feedback: bool, inputs: str, kinds: list[str], strength: float | None
    ) -> dict[str, Any]:
        """Return what rounding so takes, in percent of perplexity."""
        with self.rounded(weights, feedback, inputs, self.factors(kinds, strength, weights)):
            mean, error = paired(self.losses(), self.base)
        return {"percent": round(100 * math.expm1(mean), 3), "error": round(100 * error, 3)}


def cases() -> Iterator[tuple[str, tuple[str | None, bool, str, list[str], float | None]]]:
    """Yield what is measured, by name."""
    yield "inputs", (None, False, ".", [], 0.5)
    for kinds in (["norm"], ["down"], ["norm", "down"]):
        for strength in (0.25, 0.5, 0.75):
            yield f"inputs, smooth {' and '.join(kinds)} {strength}", (None, False, ".", kinds, strength)
    for weights in ("int8", "6bit"):
        for feedback in (False, True):
            how = "for outputs" if feedback else "to nearest"
            yield f"weights {weights} {how}", (weights, feedback, "", [], None)
            yield f"{weights} {how}", (weights, feedback, ".", [], None)
            for kinds in (["norm"], ["norm", "down"]):
                for strength in (0.5, None):
                    told = "measured" if strength is None else str(strength)
                    yield (
                        f"{weights} {how}, smooth {' and '.join(kinds)} {told}",
                        (weights, feedback, ".", kinds, strength),
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tag", default="rounding")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--calibration", type=int, default=4096, help="tokens")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    judged = texts.windows(tokenizer, texts.held_out_code(100_000)[0], options.tokens, 512)
    calibration = texts.windows(tokenizer, texts.library_code(100_000), options.calibration, 256)
    study = Study(options.checkpoint, calibration, judged)
    options.dense = options.url = options.by = options.gpu = None
    options.served = False
    record = about(options, None) | {"tokens": list(judged.shape), "digest": texts.digest(judged)}
    record["perplexity"] = round(math.exp(math.fsum(study.base) / len(study.base)), 4)
    print(f"float: {record['perplexity']}", flush=True)
    record["over_float"] = {}
    for name, case in cases():
        if re.search(options.only, name):
            record["over_float"][name] = found = study.measure(*case)
            print(f"{name}: {found['percent']:+.2f} ± {found['error']:.2f} %", flush=True)
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
