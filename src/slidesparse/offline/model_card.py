"""The model card of a pruned checkpoint: README.md, which a hub shows, and to which ``eval --card`` adds measurements.

It has what somebody who finds the folder needs: what was done to which model, how to serve and to load it, and what was
measured. Licence, language and task are those of the source's own card.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slidesparse import __version__
from slidesparse.base.counted import counted
from slidesparse.base.readable_size import readable_size
from slidesparse.base.whole_file import read_regular, replace_file
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.hub import HubModel, hub_model
from slidesparse.files.write_errors import write_errors
from slidesparse.models.targets import describe_dense
from slidesparse.offline.outcome import PruneSummary
from slidesparse.offline.prune_options import PruneOptions, Recipe
from slidesparse.weights.quant import QUANTISED, parse_dtype

FILE_NAME = "README.md"

ROUNDED: dict[Recipe, str] = {
    "absmax": "",
    "6bit": ", of six bits where pruned",
    "ternary": ", of three values (BitNet b1.58)",
}
"""Recipe -> what it makes of a type's values."""

CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""Keys of the source's card that hold for the pruned model too."""

MAX_BYTES = 1 << 20
"""Most bytes of a card that are read."""

MAX_FRONT_MATTER = 1 << 16
"""Most characters of YAML that are read; a parser in Python takes its time."""

MAX_LINES = 40
"""Most lines on what stays dense."""

LEFT = "left dense: "
"""How a line on what stays dense begins in a log; here a heading says so."""

NAMED = " --quantization slidesparse"
"""What makes vLLM ask the plugin where there is no ``quantization_config``."""

NO_CARD = "leave --card out"

HEAD, BEGIN, END = "| what | value | how |\n|---|---:|---|", "<!-- measured -->", "<!-- end -->"
"""Around the rows that ``eval --card`` writes."""


def write_card(folder: Path, source: Path, summary: PruneSummary, options: PruneOptions, method: str) -> None:
    """Write the card of a pruned checkpoint.

    Args:
        folder: The pruned checkpoint, which has the source's own card already.
        source: The folder of the dense model.
        summary: What was done.
        options: How.
        method: How weights were chosen, with the text that the method saw.
    """
    dtype, quantised = summary.dtype, parse_dtype(summary.dtype) in QUANTISED
    scales = ", a scale for each channel" if quantised else ""
    origin = hub_model(source)
    name = _plain(source.resolve().name if origin is None else origin.repository.rpartition("/")[2])
    counts = Counter(summary.patterns.values()).most_common()
    left = describe_dense({**summary.dense, **summary.other})
    rows = {
        "patterns": ", ".join(f"{pattern} in {counted(count, 'linear')}" for pattern, count in counts) or "none",
        "experts": "; ".join(summary.treated_experts),
        "method": method,
        "weights": f"{dtype}{ROUNDED[summary.recipe]}{scales}, zeros in place",
        "activations": "quantised while the model runs, a scale for each token" if quantised else "as in the source",
        "size": f"{readable_size(summary.destination_bytes)}, of {readable_size(summary.source_bytes)}",
    }
    dense = [*left[:MAX_LINES], *([f"and {len(left) - MAX_LINES} lines more"] if len(left) > MAX_LINES else [])]
    by = "the slidesparse plugin" if quantised else "that option"
    card = None if summary.source_card is None else folder / summary.source_card
    reads = f"transformers loads the folder dense{', with compressed-tensors' if quantised else ''}."
    text = f"""{_front_matter(origin, card, quantised)}
# {name}, {counts[0][0] if counts else "dense"}, {dtype.upper()}

{_origin_words(origin, name)}, pruned{" and quantised" if quantised else ""} by slidesparse {__version__}.
Of the weights of a linear at 6:8, at most six in each group of eight are not zero; other patterns likewise.

| | |
|---|---|
{chr(10).join(f"| {key} | {_plain(value)} |" for key, value in rows.items() if value)}

## Serve and load

```bash
pip install "slidesparse[vllm]"
vllm serve THIS_FOLDER{"" if quantised else NAMED}
```

vLLM runs the linears on Sparse Tensor Cores with {by}, and dense without it.
{reads if summary.in_transformers else "transformers 5.23 cannot load experts in this form."}

```python
import slidesparse as ss

model = ss.load("THIS_FOLDER", device="cuda")
```

## Measured

{BEGIN}
{END}

`slidesparse eval THIS_FOLDER --text FILE --card` adds a line.

## Left dense

{chr(10).join(f"- {_plain(line).removeprefix(LEFT)}" for line in dense) or "- nothing"}
"""
    replace_file(folder / FILE_NAME, text)


def card_to_measure(folder: Path) -> Path:
    """Return the card of a folder, to which measurements can be added.

    Raises:
        InputError: The folder is of huggingface_hub's cache, which is not ours to change.
        CheckpointError: There is no card that ``prune`` wrote, or the folder may not be written.
    """
    if hub_model(folder) is not None:
        raise InputError(f"--card writes into {FILE_NAME}", got="a model of the hub", needed="a folder of your own")
    _read_card(folder / FILE_NAME)
    if not os.access(folder, os.W_OK):  # asked now, since what was measured in hours would be lost then
        raise CheckpointError(f"{folder} cannot be written to", needed=f"a new {FILE_NAME} in it", remedy=NO_CARD)
    return folder / FILE_NAME


def add_measurements(card: Path, rows: Mapping[str, tuple[str, str]]) -> None:
    """Add lines to a card, each in the place of an earlier one of the same name.

    Args:
        card: The file.
        rows: What was measured -> its value, and how it was measured.

    Raises:
        CheckpointError: It is no card that ``prune`` wrote, or the disk is full; then the error says what was measured.
    """
    before, lines, after = _read_card(card)
    known = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    for what, (value, how) in rows.items():
        known[_plain(what)] = f"| {_plain(what)} | {value} | {_plain(how)} |"
    measured = ", ".join(f"{_plain(what)}: {value}" for what, (value, _) in rows.items())  # in hours, perhaps
    with write_errors(card, f"free some space and run again, or write into it what was measured: {measured}"):
        replace_file(card, f"{before}{BEGIN}\n{HEAD}\n{chr(10).join(known.values())}\n{END}{after}")


def _read_card(card: Path) -> tuple[str, list[str], str]:
    """Return the text before the measurements, their lines without the table head, and the text after them."""
    remedy = f"{NO_CARD}, or prune again: prune writes a card"
    try:
        text = read_regular(card, MAX_BYTES).decode("utf-8")
    except (FileNotFoundError, InputError, UnicodeDecodeError) as error:
        what = f"{card} is {'missing' if isinstance(error, FileNotFoundError) else 'no text in UTF-8'}"
        raise CheckpointError(str(error) if isinstance(error, InputError) else what, remedy=remedy) from error
    found = re.search(f"{BEGIN}\n(.*?){END}", text, re.DOTALL)
    if found is None:
        raise CheckpointError(f"{card} has no place for measurements", needed=f"{BEGIN} and {END}", remedy=remedy)
    lines = found[1].removeprefix(f"{HEAD}\n").splitlines()
    return text[: found.start()], lines, text[found.end() :]


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
    """Return what the source's card says that holds for the pruned model too; nothing of a card that is no YAML."""
    import yaml

    try:
        text = read_regular(card, MAX_BYTES).decode("utf-8-sig")
        found = re.match(r"---\r?\n(.*?)\r?\n---\s*(?:\n|$)", text, re.DOTALL)
        # The loader that knows texts alone: merge keys, which the safe one follows, can multiply without end.
        said = yaml.load(found[1], Loader=yaml.BaseLoader) if found and len(found[1]) <= MAX_FRONT_MATTER else {}
    except (OSError, InputError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError):
        return {}
    values = {key: said[key] for key in CARRIED if key in said} if isinstance(said, dict) else {}
    return {key: value for key, value in values.items() if _is_short(value)}


def _is_short(value: Any) -> bool:
    """Return whether a value is a short text or a few, can be written, and is not taken for the measurements' place."""
    words = value if isinstance(value, list) else [value]
    short = 0 < len(words) < 100 and all(isinstance(word, str) and 0 < len(word) < 300 for word in words)
    return short and not any(re.search(f"[\ud800-\udfff]|{BEGIN}|{END}", word) for word in words)


def _plain(text: str) -> str:
    """Return a text that stays in its line, in its cell of a table, and apart from the place of the measurements."""
    return " ".join(text.replace("|", "/").replace("<!--", "<").split())
