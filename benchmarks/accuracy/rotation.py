"""Whether a rotation of the residual stream makes a small language model easier to prune.

RMSNorm without a gain gives the same for a rotated input. So a Llama whose gains are folded into the linears that read
them stays the same function when its residual stream is rotated: what writes to it is multiplied by an orthogonal Q,
and what reads it by Q's inverse. Weights are then spread over columns, and other ones are pruned. Source: Ashkboos et
al., "QuaRot" (2024), whose rotations of the stream these are. Q is a Hadamard matrix with random signs, or learned from
one for a pattern.

Appends to its records as run.py does. The model is small enough to be trained on a CPU; ``--size 30m`` is for a GPU.

    python benchmarks/accuracy/rotation.py --corpus corpus.xz --weights FOLDER --out results/accuracy
"""

from __future__ import annotations

import argparse
import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from learned_rotation import COSTS, STEPS, costed, reads
from lm import CONTEXT, SIZES, Data, Trainer, build, calibration, save, served
from mixture import EVERY, PIECE, VOCABULARY, WINDOWS
from run import CALIBRATION_WINDOWS, PATTERNS, Log, commit, machine
from torch import nn

from slidesparse.models.layer_stack import find_layer_list, record_inputs
from slidesparse.models.layerwise import prune_layers
from slidesparse.models.learn_rotation import learn, mean_damage, random_rotation
from slidesparse.models.perplexity import measure_perplexity
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import Pattern

SMALL = "rotated"
METHODS = ("sparsegpt", "magnitude")
EPOCHS = 1.25
"""How often a larger model reads the text, as in run.py."""

DRAWS = 3
"""Random rotations."""


@torch.no_grad()
def fold_gains(model: Any) -> None:
    """Move the gains of all norms into the linears that read them; the output embedding gets weights of its own."""
    embedding = model.get_input_embeddings().weight
    model.lm_head.weight = nn.Parameter(embedding.detach().clone())
    model.config.tie_word_embeddings = False
    readers = [(layer.input_layernorm, _attention(layer)) for layer in model.model.layers]
    readers += [(layer.post_attention_layernorm, _mlp(layer)) for layer in model.model.layers]
    for norm, linears in [*readers, (model.model.norm, [model.lm_head])]:
        for linear in linears:
            linear.weight.mul_(norm.weight)
        norm.weight.fill_(1.0)


@torch.no_grad()
def rotate(model: Any, q: torch.Tensor) -> None:
    """Rotate the residual stream of a model whose gains are folded: q is orthogonal, [hidden, hidden]."""
    layers = model.model.layers
    readers = [linear for layer in layers for linear in (*_attention(layer), *_mlp(layer))]
    for reader in [model.get_input_embeddings(), *readers, model.lm_head]:
        reader.weight.copy_(reader.weight @ q)
    for layer in layers:
        for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
            writer.weight.copy_(q.T @ writer.weight)


def _attention(layer: Any) -> list[Any]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _mlp(layer: Any) -> list[Any]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


def prune(model: Any, pattern: str, method: str, batches: list[dict[str, Any]]) -> float:
    """Prune all linears of the layers in one shot; the mean loss of their outputs."""
    model.eval()
    linears = find_targets(model).linears
    patterns, pruner = dict.fromkeys(linears, Pattern.parse(pattern)), get_pruner(method)
    sets = sets_to_prune(model, linears, patterns, pruner, run_once(model))
    layer_list = find_layer_list(model, linears)
    samples = record_inputs(model, layer_list, batches)
    found = list(prune_layers(model, layer_list, sets, patterns, pruner, samples))
    losses = [one.loss for layer in found for one in layer]
    return sum(losses) / len(losses)


class Experiment:
    """One trained model, and how its prunings are judged."""

    def __init__(self, options: argparse.Namespace) -> None:
        device, name = torch.device("cuda" if torch.cuda.is_available() else "cpu"), options.size
        small = name == SMALL
        self.size, self.steps, self.seed = SIZES[name], options.steps, options.seed
        self.data = Data(options.corpus, device, options.limit, VOCABULARY if small else None)
        self.warmup, windows = (100, WINDOWS) if small else (200, CALIBRATION_WINDOWS)
        name = f"{SMALL}-{options.seed}" if small else f"{SMALL}-{name}-{options.seed}"
        facts = {"model": name.rpartition("-")[0], "seed": options.seed, "commit": commit(), "machine": machine(device)}
        self.log = Log(options.out / f"{name}.jsonl", **facts)
        self.model: Any = build(self.size, options.seed, self.data.tokenizer.get_vocab_size()).to(device)
        self.train(options.weights / f"{name}.pt")
        self.model.eval()
        self.judged = torch.cat(self.data.text["packages"].split(PIECE)[::EVERY]).to(torch.int64)
        self.batches = calibration(self.data, windows, 9000 + options.seed)

    def train(self, weights: Path) -> None:
        """Train the model, unless its weights are there."""
        device = self.data.device
        if weights.exists():
            self.model.load_state_dict(torch.load(weights, map_location=device))
            return
        self.log.refuse_another_model(weights)
        trainer = Trainer(self.model, self.size, self.data, compiled=device.type == "cuda")
        steps = self.steps or (3000 if self.size is SIZES[SMALL] else self.data.steps(EPOCHS, self.size.batch))
        told = trainer.train(steps, self.size.rate, self.seed, warmup=min(self.warmup, steps // 10))
        parameters, tokens = sum(p.numel() for p in self.model.parameters()), steps * self.size.batch * CONTEXT
        self.log.write("trained", parameters=parameters, tokens=tokens, corpus=self.data.facts, **told)
        save(self.model.state_dict(), weights)

    def perplexity(self, model: Any) -> float:
        """Of held-out packages."""

        def logits(ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
            return found

        return measure_perplexity(logits, self.judged, CONTEXT, CONTEXT * 3 // 4, batch=16).perplexity

    def start(self, q: torch.Tensor | None = None) -> Any:
        """The dense model with folded gains, rotated or not."""
        found = copy.deepcopy(self.model)
        fold_gains(found)
        if q is not None:
            rotate(found, q)
        return found

    def draw(self, seed: int) -> torch.Tensor:
        """A random rotation."""
        return random_rotation(self.size.hidden, seed).to(self.data.device)

    def judge(self, key: str, start: Any, pattern: str, **told: float) -> None:
        """Prune by SparseGPT, and tell the perplexity in INT8 too, where a rotation may make outliers."""
        found = copy.deepcopy(start)
        with served(found, "int8"):
            told["dense_int8"] = self.perplexity(found)
        loss = prune(found, pattern, "sparsegpt", self.batches)
        with served(found, "int8"):
            told["packages_int8"] = self.perplexity(found)
        self.log.write(key, packages_perplexity=self.perplexity(found), set_loss_mean=loss, **told)

    def learned(self) -> None:
        """Rotations that are learned for one pattern each, from random ones."""
        seen = reads(self.start(), self.batches)
        for pattern in reversed(PATTERNS):
            group = Pattern.parse(pattern).group
            if (key := f"{pattern} sparsegpt, as it is, in INT8") not in self.log.done:
                self.judge(key, self.model, pattern)
            for cost, draw in itertools.product(COSTS, range(DRAWS)):
                key = f"{pattern} sparsegpt, learned by {cost} {draw}"
                if key not in self.log.done:
                    linears, begin = [costed(one, cost, group) for one in seen], self.draw(draw)
                    q = learn(begin, linears, group, STEPS)
                    costs = [mean_damage(one, linears, group) for one in (begin, q)]
                    self.judge(key, self.start(q), pattern, damage_before=costs[0], damage=costs[1])

    def random(self) -> None:
        """The model as it is, with its gains folded, and after random rotations."""
        starts = {"as it is": self.model, "gains folded": self.start()}
        starts |= {f"rotated {draw}": self.start(self.draw(draw)) for draw in range(DRAWS)}
        for base, start in starts.items():
            if f"dense, {base}" not in self.log.done:
                self.log.write(f"dense, {base}", packages_perplexity=self.perplexity(start))
            for method, pattern in itertools.product(METHODS, PATTERNS):
                key = f"{pattern} {method}, {base}"
                if key not in self.log.done:
                    found = copy.deepcopy(start)
                    loss = prune(found, pattern, method, self.batches)
                    self.log.write(key, packages_perplexity=self.perplexity(found), set_loss_mean=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="the file that corpus.py wrote")
    parser.add_argument("--weights", type=Path, required=True, help="folder where trained weights are kept")
    parser.add_argument("--size", default=SMALL, help="a model of lm.py; the default is small enough for a CPU")
    parser.add_argument("--steps", type=int, help="of training (default: 3000, of a larger model as in run.py)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="tokens of text, to try the script")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    experiment = Experiment(parser.parse_args())
    experiment.learned()
    experiment.random()


if __name__ == "__main__":
    main()
