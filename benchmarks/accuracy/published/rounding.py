"""What rounding alone takes from a model, and where: by kind of linear, by token, by remedy.

    python rounding.py CHECKPOINT --out RECORDS.jsonl [--windows 2] [--only REGEX]

Linears are simulated: inputs by token to INT8, weights by channel to INT8 or six bits, as ``weights.quant`` rounds
them. Of each case there is perplexity of held-out code over that in float, and the divergence from the float model's
predictions, which scatters less. Weights rounded for outputs are those of ``prune``, for the inputs that the float
model has on 16 windows of 256 tokens of the standard library.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import texts
import torch
import torch.nn.functional as F
from compare import paired
from judge import about
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from slidesparse.models.grams import alike_tokens
from slidesparse.models.hooks import hooked
from slidesparse.pruning import Linears, RoundForOutputs
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import Rounding, dequantize, quantize_rows, quantize_weight

SETS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
Case = tuple[str, Callable[[], None]]


class Simulated(nn.Module):
    """A linear that rounds: its inputs, its weight, both or neither; of all tokens, the first ones or the others."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.set()

    def set(self, inputs: bool = False, weights: Rounding | None = None, where: slice = slice(None)) -> None:
        self.inputs, self.where = inputs, where
        own = self.weight.data
        self.rounded = own if weights is None else dequantize(*quantize_weight(own, torch.int8, rounding=weights))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self.weight, self.bias) if self.where != slice(None) else x.new_empty(0)
        some = x[:, self.where]
        some = F.linear(dequantize_tokens(some) if self.inputs else some, self.rounded, self.bias)
        if self.where == slice(None):
            return some
        out[:, self.where] = some
        return out


def dequantize_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return [..., in] as INT8 holds them."""
    values, scale = quantize_rows(x, torch.int8)
    return values.to(torch.float32) * scale


class Study:
    """A model of simulated linears in float32, what they read on a text, and the float model's predictions."""

    def __init__(self, path: Path, windows: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        for name, module in list(self.model.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                parent, leaf = name.rsplit(".", 1)
                setattr(self.model.get_submodule(parent), leaf, Simulated(module))
        self.linears = {n: m for n, m in self.model.named_modules() if isinstance(m, Simulated)}
        self.weights = {n: m.weight.detach().clone() for n, m in self.linears.items()}
        self.read = self.inputs(texts.windows(tokenizer, texts.library_code(1_200_000), 16 * 256, 256))
        self.judged = texts.windows(tokenizer, texts.held_out_code()[0], windows * 512, 512)
        self.float = self.predictions()

    @torch.inference_mode()
    def inputs(self, windows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the first linear of each set reads."""
        found: dict[str, list[torch.Tensor]] = {}

        def see(name: str) -> Callable[..., None]:
            return lambda _, args: found.setdefault(name, []).append(args[0])

        heads = (name for name in self.linears if name.endswith(tuple(names[0] for names in SETS)))
        with hooked(self.linears[name].register_forward_pre_hook(see(name)) for name in heads):
            for some in windows.split(4):
                self.model.model(some, use_cache=False)
        return {name: torch.cat(parts) for name, parts in found.items()}

    @torch.inference_mode()
    def predictions(self) -> list[torch.Tensor]:
        return [F.log_softmax(self.model(ids[None], use_cache=False).logits[0, :-1], -1) for ids in self.judged]

    def sets(self) -> Iterator[tuple[str, ...]]:
        for head in self.read:
            parent, leaf = head.rsplit(".", 1)
            yield next(tuple(f"{parent}.{name}" for name in names) for names in SETS if names[0] == leaf)

    def round_for_outputs(self) -> None:
        """Give all linears weights that are rounded to six bits for what they read."""
        for names in self.sets():
            x = alike_tokens(self.read[names[0]]).flatten(0, -2)
            rounded = RoundForOutputs().prune(Linears({name: self.weights[name] for name in names}, DENSE, x.T @ x))
            for name, found in rounded.items():
                self.linears[name].weight.data.copy_(found)

    def set(self, names: str, **how: Any) -> None:
        for name, linear in self.linears.items():
            linear.set(**how if re.search(names, name) else {})

    def measure(self) -> dict[str, Any]:
        """Return what the linears take as they are set now."""
        losses: list[list[float]] = [[], []]
        divergence = []
        for ids, base, found in zip(self.judged, self.float, self.predictions(), strict=True):
            for into, of in zip(losses, (found, base), strict=True):
                into.append(float(F.nll_loss(of, ids[1:]).double()))
            divergence.append(float(F.kl_div(found, base, reduction="batchmean", log_target=True)))
        mean, error = paired(*losses)
        kl, kl_error = paired(divergence, [0.0] * len(divergence))
        percent = {"percent": round(100 * math.expm1(mean), 2), "error": round(100 * error, 2)}
        return percent | {"kl": round(1000 * kl, 2), "kl_error": round(1000 * kl_error, 2)}

    def cases(self) -> Iterator[Case]:
        """Yield what is measured, by name; rounding for outputs comes last, since it changes the weights."""
        kinds = {"down": "down", "q, k, v": "[qkv]_proj", "gate, up": "gate|up", "o": "o_proj"}
        largest = max((name for name in self.read if "down" in name), key=lambda name: float(self.read[name].norm()))
        kinds["the down that writes the largest activations"] = re.escape(largest)
        how: dict[str, dict[str, Any]] = {"inputs": {"inputs": True}, "six-bit weights": {"weights": "6bit"}}
        for name, one in how.items():
            yield name, lambda one=one: self.set("", **one)
            yield f"{name}, first token exact", lambda one=one: self.set("", **one, where=slice(1, None))
            yield f"{name}, first token alone", lambda one=one: self.set("", **one, where=slice(0, 1))
            for kind, names in kinds.items():
                yield f"{name} of {kind}", lambda one=one, names=names: self.set(names, **one)
        for recipe, told in (("absmax", "INT8"), ("6bit", "six bits")):
            yield told, lambda recipe=recipe: self.set("", inputs=True, weights=recipe)
        yield "six bits, rounded for outputs", self.rounded

    def rounded(self) -> None:
        self.round_for_outputs()
        self.set("", inputs=True, weights="6bit")
        for name, linear in self.linears.items():
            linear.weight.data.copy_(self.weights[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=2, help="of 512 tokens")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    options.tag, options.dense, options.url, options.gpu, options.served = "rounding", None, None, None, False
    study = Study(options.checkpoint, options.windows)
    record = about(options, None) | {"windows": list(study.judged.shape), "digest": texts.digest(study.judged)}
    for name, begin in study.cases():
        if re.search(options.only, name):
            begin()
            found = study.measure()
            print(name, found, flush=True)
            with options.out.open("a") as file:
                file.write(json.dumps(record | {"tag": name, "over_float": found}) + "\n")


if __name__ == "__main__":
    main()
