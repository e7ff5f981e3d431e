"""Whether a rotation of the residual stream makes a small language model easier to prune.

RMSNorm without a gain gives the same for a rotated input. So a Llama whose gains are folded into the linears that read
them stays the same function when its residual stream is rotated: what writes to it is multiplied by an orthogonal Q,
and what reads it by Q's inverse. Weights are then spread over columns, and other ones are pruned. Source: Ashkboos et
al., "QuaRot" (2024), whose rotations of the stream these are; Q is a Hadamard matrix with random signs.

Appends to its records as run.py does. The model is small enough to be trained on a CPU.

    python benchmarks/accuracy/rotation.py --corpus corpus.xz --weights FOLDER --out results/accuracy
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm import CONTEXT, SIZES, Data, Trainer, build, calibration, save
from mixture import EVERY, PIECE, VOCABULARY, WINDOWS
from run import PATTERNS, Log, commit, machine
from torch import nn

from slidesparse.models.layerwise import find_layer_list, prune_layers, record_inputs
from slidesparse.models.perplexity import measure_perplexity
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.pattern import Pattern
from slidesparse.prune import get_pruner

METHODS = ("sparsegpt", "magnitude")
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


def hadamard(size: int, seed: int) -> torch.Tensor:
    """An orthogonal matrix with entries of one magnitude, float32 [size, size]; size is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return signs[:, None] * matrix / size**0.5


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


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="the file that corpus.py wrote")
    parser.add_argument("--weights", type=Path, required=True, help="folder where trained weights are kept")
    parser.add_argument("--steps", type=int, default=3000, help="of training, two windows each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="tokens of text, to try the script")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, size = Data(options.corpus, device, options.limit, VOCABULARY), SIZES["rotated"]
    facts = {"model": "rotated", "seed": options.seed, "commit": commit(), "machine": machine(device)}
    log = Log(options.out / f"rotated-{options.seed}.jsonl", **facts)
    model: Any = build(size, options.seed, VOCABULARY).to(device)
    weights = options.weights / f"rotated-{options.seed}.pt"
    if weights.exists():
        model.load_state_dict(torch.load(weights))
    else:
        trainer = Trainer(model, size, data, compiled=device.type == "cuda")
        told = trainer.train(options.steps, size.rate, options.seed, warmup=min(100, options.steps // 10))
        parameters, tokens = sum(p.numel() for p in model.parameters()), options.steps * size.batch * CONTEXT
        log.write("trained", parameters=parameters, tokens=tokens, corpus=data.facts, **told)
        save(model.state_dict(), weights)
    judged = torch.cat(data.text["packages"].split(PIECE)[::EVERY]).to(torch.int64)
    batches = calibration(data, WINDOWS, 9000 + options.seed)

    def perplexity(found: Any) -> float:
        stride = CONTEXT * 3 // 4
        return measure_perplexity(partial(_logits, found), judged, CONTEXT, stride, batch=16).perplexity

    bases = ["as it is", "gains folded", *(f"rotated {draw}" for draw in range(DRAWS))]
    for base in bases:
        start = copy.deepcopy(model).eval()
        if base != "as it is":
            fold_gains(start)
        if base.startswith("rotated"):
            rotate(start, hadamard(size.hidden, int(base.split()[1])).to(device))
        if f"dense, {base}" not in log.done:
            log.write(f"dense, {base}", packages_perplexity=perplexity(start))
        for method in METHODS:
            for pattern in PATTERNS:
                key = f"{pattern} {method}, {base}"
                if key not in log.done:
                    found = copy.deepcopy(start)
                    loss = prune(found, pattern, method, batches)
                    log.write(key, packages_perplexity=perplexity(found), set_loss_mean=loss)


if __name__ == "__main__":
    main()
