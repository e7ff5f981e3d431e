"""The model card of a pruned checkpoint: README.md, which a hub shows.

It states the source, the treatment, and how to serve and load the result. Licence, language and task are those of the
source's own card.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slidesparse.base.counted import counted
from slidesparse.base.readable_size import readable_size
from slidesparse.base.version import __version__
from slidesparse.base.whole_file import read_whole, replace_file
from slidesparse.errors import InputError, printable
from slidesparse.files.hub import HubModel, hub_model
from slidesparse.offline.outcome import NOT_IN_TRANSFORMERS, PruneSummary
from slidesparse.offline.prune_options import PruneRounding
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import QUANTISED, parse_dtype

FILE_NAME = "README.md"

SERVE = "## Serve and load"
"""The heading before which ``slidesparse recover`` adds its section."""

ROUNDED: dict[PruneRounding, str] = {
    "absmax": "",
    "6bit": ", of six bits",
    "ternary": ", of three values (BitNet b1.58)",
}
"""PruneRounding -> its words after the type."""

ZEROS = "\nOf the weights of a linear at 6:8, at most six in each group of eight are not zero; other patterns likewise."

BLACKWELL = "INT8 does not start in stock vLLM on Blackwell GPUs: prune into FP8 for these.\n"

CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""Keys of the source's card that hold for the pruned model too."""

MAX_BYTES = 1 << 20
"""Most bytes of a card that are read."""

LEFT = "left dense: "
"""Beginning of the log's lines on dense layers, which a heading replaces here."""

NAMED = " --quantization slidesparse"
"""vLLM's option to load the plugin where there is no ``quantization_config``."""


def write_card(folder: Path, source: Path, done: PruneSummary) -> None:
    """Write the card of a pruned checkpoint into its folder."""
    quantised, origin = parse_dtype(done.dtype) in QUANTISED, hub_model(source)
    scales = ", a scale for each channel" if quantised else ""
    name = _plain(source.resolve().name if origin is None else origin.repository.rpartition("/")[2])
    counts, prunes = done.counts, {*done.patterns.values(), *done.experts.values()} != {str(DENSE)}
    places, deeds = ", zeros in place" if prunes else "", ["pruned"] * prunes + ["quantised"] * quantised
    runs = "on Sparse Tensor Cores" if prunes else "fused, and in six bits where they have these,"
    card = None if done.source_card is None else folder / done.source_card
    rows = {
        "patterns": ", ".join(f"{pattern} in {counted(count, 'linear')}" for pattern, count in counts) or "none",
        "experts": "; ".join(done.treated_experts),
        "method": _method(done),
        "weights": f"{done.dtype}{ROUNDED[done.rounding]}{scales}{places}",
        "activations": "quantised while the model runs, a scale for each token" if quantised else "as in the source",
        "size": f"{readable_size(done.destination_bytes)}, of {readable_size(done.source_bytes)}",
    }
    by = "the slidesparse plugin" if quantised else "that option"
    reads = f"transformers loads the folder dense{', with compressed-tensors' if quantised else ''}.\n"
    first = f"**Before all else: {NOT_IN_TRANSFORMERS}.**\n\n" if done.in_transformers is False else ""
    text = f"""{_front_matter(origin, card, quantised)}
# {name}, {counts[0][0] if counts else "dense"}, {done.dtype.upper()}

{first}{_origin_words(origin, name)}, {" and ".join(deeds)} by slidesparse {__version__}.{ZEROS if prunes else ""}

| | |
|---|---|
{chr(10).join(f"| {key} | {_plain(value)} |" for key, value in rows.items() if value)}

What the model lost is not measured here: compare it with the dense one, `slidesparse eval THIS_FOLDER --text FILE`.
{BLACKWELL if done.dtype == "int8" else ""}
{SERVE}

```bash
pip install ".[vllm]"  # in a checkout of slidesparse
vllm serve THIS_FOLDER{"" if quantised else NAMED}
```

vLLM runs the linears {runs} with {by}, and dense without it.
{reads if done.in_transformers else ""}
```python
import slidesparse as ss

model = ss.load("THIS_FOLDER", device="cuda")
```

## Left dense

{chr(10).join(f"- {_plain(line).removeprefix(LEFT)}" for line in done.left) or "- nothing"}
"""
    replace_file(folder / FILE_NAME, text)


def _method(done: PruneSummary) -> str:
    """Describe the method of pruning and rounding."""
    if not done.was_pruned:
        return done.calibrated or done.method
    rounded = f", rounded with {done.calibrated}" if done.calibrated else ""
    before = f"; what was done before: {done.source_card}" if done.source_card else ""
    return f"zeros of the source kept{rounded}{before}"


def _origin_words(origin: HubModel | None, name: str) -> str:
    if origin is None:
        return name
    link = f"[{origin.repository}](https://huggingface.co/{origin.repository})"
    return f"{link}, commit `{origin.commit}`"


def _front_matter(origin: HubModel | None, source_card: Path | None, quantised: bool) -> str:
    """Return the YAML that a hub reads; JSON's strings and lists are YAML."""
    relation = "quantized" if quantised else "finetune"  # a hub knows no pruned models
    base = {} if origin is None else {"base_model": origin.repository, "base_model_relation": relation}
    carried = {} if source_card is None else _carried(source_card)
    tags = ["slidesparse", *(["compressed-tensors"] if quantised else []), "sparse"]
    values = {**base, "library_name": "transformers", **carried, "tags": tags}
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _carried(card: Path) -> dict[str, Any]:
    """Return the entries of the source's card that hold for the pruned model too; none if it is no YAML."""
    import yaml

    try:
        text = read_whole(card, MAX_BYTES).decode("utf-8-sig")
        matter = re.match(r"---\r?\n(.*?)\r?\n---\s*(?:\n|$)", text, re.DOTALL)
        # Not SafeLoader, whose merge keys can multiply without end.
        card_data = yaml.load(matter[1], Loader=yaml.BaseLoader) if matter else {}
    except (OSError, InputError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError):
        return {}
    known = card_data if isinstance(card_data, dict) else {}
    return {key: known[key] for key in CARRIED if _are_words(known.get(key))}


def _are_words(value: Any) -> bool:
    words = value if isinstance(value, list) else [value]
    return bool(words) and all(isinstance(word, str) and word and word.isprintable() for word in words)


def _plain(text: str) -> str:
    """Return a text that fits in one line and one cell of a table, without control characters."""
    return printable(" ".join(text.replace("|", "/").split()))
