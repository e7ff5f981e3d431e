"""What ``prune``, ``--match-steps`` and ``recover`` take for a 7B of random weights: seconds, and memory of a GPU.

    python benchmarks/recovery_cost.py make FOLDER [--layers 4]
    python benchmarks/recovery_cost.py prune FOLDER --out results/h200/recovery-cost.jsonl
    python benchmarks/recovery_cost.py recover FOLDER --out results/h200/recovery-cost.jsonl
    torchrun --nproc-per-node 4 benchmarks/recovery_cost.py recover FOLDER --out results/h200/recovery-cost.jsonl

``make`` writes a model of Qwen2.5-7B's shape, with as many of its 28 layers as asked for, its pruned form and a text of
random letters. ``prune`` times each layer of it, and matching in it; several processes do not match. ``recover`` sets a
run up as the command does, and times steps; it saves no state and no result. ``--tiny`` is a rehearsal on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from slidesparse.base.ranks import Ranks, joined
from slidesparse.checkpoints.marker import Marker
from slidesparse.errors import UnsupportedError
from slidesparse.files.json_files import read_json, write_json
from slidesparse.models import layerwise
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.offline.calibrate import layer_store
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.pruning import prune_mask
from slidesparse.recovery import run
from slidesparse.recovery.memory import Fit, Size, fit_memory, needed_bytes
from slidesparse.recovery.networks import compiles
from slidesparse.recovery.options import RecoverOptions
from slidesparse.recovery.ordered_sums import ordered_sums
from slidesparse.recovery.pair import Pair
from slidesparse.recovery.windows import Windows
from slidesparse.weights.pattern import Pattern
from slidesparse_bench.environment import machine

PATTERN = "4:6"
LAYERS = 28
QWEN_7B = {
    **{"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"vocab_size": 152064, "max_position_embeddings": 32768, "tie_word_embeddings": False},
}
TINY = {**QWEN_7B, "hidden_size": 104, "intermediate_size": 200, "num_attention_heads": 4, "vocab_size": 512}
MATCH_STEPS = 200
SAMPLES, LENGTH = 256, 512
"""Calibration: windows, and tokens of each."""


def make(folder: Path, layers: int, tiny: bool) -> None:
    """The folders ``dense`` and ``pruned``, by magnitude, and ``text.txt``."""
    import transformers

    config = transformers.Qwen2Config(**(TINY if tiny else QWEN_7B), num_hidden_layers=layers)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    write_text(folder)
    model.save_pretrained(folder / "dense", max_shard_size="4GB")
    with torch.no_grad():
        for linear in (one for one in model.model.layers.modules() if isinstance(one, torch.nn.Linear)):
            linear.weight.mul_(prune_mask(linear.weight, PATTERN))
    model.save_pretrained(folder / "pruned", max_shard_size="4GB")
    marked = {MARKER_KEY: Marker(Pattern.parse(PATTERN), ("lm_head",)).to_config()}
    write_json(folder / "pruned/config.json", read_json(folder / "pruned/config.json") | marked)


def write_text(folder: Path) -> None:
    """A text of random letters, and a tokenizer to which each is a token."""
    import tokenizers
    import transformers

    level = tokenizers.pre_tokenizers.ByteLevel
    letters = {letter: i for i, letter in enumerate(sorted(level.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    made.pre_tokenizer = level(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder / "dense")
    (folder / "text.txt").write_text("".join(random.Random(0).choices(string.ascii_letters, k=2 * SAMPLES * LENGTH)))


def prune(folder: Path, ranks: Ranks, where: torch.device, tiny: bool) -> dict[str, Any]:
    """Seconds of each layer, of matching in it, and of all of ``prune``."""
    text = Calibration(str(folder / "text.txt"), samples=8 if tiny else SAMPLES, length=32 if tiny else LENGTH)
    steps = (2 if tiny else MATCH_STEPS) if ranks.world == 1 else 0
    options = PruneOptions(PATTERN, dtype="bf16", method="sparsegpt", match_steps=steps, calibration=text)
    destination = folder / "by-sparsegpt"
    begin = now(where)
    with timed_layers(where) as seen:
        prune_checkpoint(folder / "dense", destination, options, device=where, progress=False, ranks=ranks)
    seconds = now(where) - begin
    if ranks.is_first:
        shutil.rmtree(destination)
    windows = {"samples": text.samples, "length": text.length}
    return {"match_steps": steps, "seconds": seconds, **windows, **seen}


@contextmanager
def timed_layers(where: torch.device) -> Iterator[dict[str, list[float]]]:
    """Time layers where ``prune`` shows its progress, and matching, by standing in for both."""
    seen: dict[str, list[float]] = {"layer_seconds": [], "match_seconds": []}
    progress_bar, match_layer = layer_store.progress_bar, layerwise.match_layer

    @contextmanager
    def bar(*words: Any, **options: Any) -> Iterator[Callable[..., None]]:
        with progress_bar(*words, **options) as advance:
            last = now(where)

            def timed(*amount: Any) -> None:
                nonlocal last
                here = now(where)
                seen["layer_seconds"].append(here - last)
                print(f"a layer: {here - last:.2f} s", file=sys.stderr, flush=True)
                last = here
                advance(*amount)

            yield timed

    def match(*arguments: Any) -> Any:
        begin = now(where)
        weights = match_layer(*arguments)
        seen["match_seconds"].append(now(where) - begin)
        return weights

    layer_store.progress_bar, layerwise.match_layer = bar, match
    try:
        yield seen
    finally:
        layer_store.progress_bar, layerwise.match_layer = progress_bar, match_layer


def recover(folder: Path, ranks: Ranks, where: torch.device, steps: int, tiny: bool) -> dict[str, Any]:
    """Seconds of each step, the first of which compiles, and how the command fits such GPUs."""
    small = {"batch": 256, "window": 32} if tiny else {}
    options = RecoverOptions(texts=("random",), tokens=10**9, **small)
    begin = now(where)
    pair = Pair(folder / "pruned", folder / "dense", options)
    fits = {str(world): fit(pair.size, options, world, where) for world in sorted({1, 2, 4, 8, ranks.world})}
    compiled = pair.compilable and compiles(where)
    count = 4 * options.windows
    ids = torch.randint(pair.size.config.vocab_size, (count, options.window), dtype=torch.int32)
    with ordered_sums(where), run._connected(ranks, where):
        training = run._set_up(pair, options, ranks, where, compiled)(Windows([ids], ids[:1], [1.0], 0), 1e-5)
        ends = [now(where)]
        for step in range(steps):
            loss, finite = training._step(step, training.lr)
            assert finite, loss
            ends.append(now(where))
            print(f"a step: {ends[-1] - ends[-2]:.2f} s", file=sys.stderr, flush=True)
    seconds = [end - before for before, end in pairwise(ends)]
    return {
        "set_up_seconds": ends[0] - begin,
        "step_seconds": seconds,
        "step_tokens": options.step_tokens,
        "tokens_a_second": options.step_tokens / median(seconds[1:] or seconds),
        "trained": pair.size.trained,
        "parameters": pair.size.parameters,
        "compiled": compiled,
        "taken": asdict(training.fit),
        "needed_gb": needed_bytes(pair.size, options, ranks.world, training.fit) / 1e9,
        "fits": fits,
    }


def fit(size: Size, options: RecoverOptions, world: int, where: torch.device) -> dict[str, Any] | str:
    """What the command decides on as many such GPUs, and the memory that it expects of each; or why it refuses."""
    try:
        found: Fit = fit_memory(size, options, world, where)
    except UnsupportedError as error:
        return str(error)
    return {**asdict(found), "needed_gb": needed_bytes(size, options, world, found) / 1e9}


def now(where: torch.device) -> float:
    """Seconds, once the GPU has nothing left to do."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter()


def peak(where: torch.device) -> dict[str, float]:
    """Memory of a GPU in GB: the most that tensors took, that PyTorch reserved, and what is taken of it at the end."""
    if where.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(where)
    most = {"tensors": torch.cuda.max_memory_allocated(where), "reserved": torch.cuda.max_memory_reserved(where)}
    return {name: value / 1e9 for name, value in {**most, "at_end": total - free, "of": total}.items()}


def main() -> None:
    """Make the model, or measure, print, and append the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("make", "prune", "recover"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.part == "make":
        make(options.folder, options.layers, options.tiny)
        return
    with joined() as ranks:
        where = torch.device("cuda", ranks.local) if torch.cuda.is_available() else torch.device("cpu")
        if options.part == "prune":
            found = prune(options.folder, ranks, where, options.tiny)
        else:
            found = recover(options.folder, ranks, where, options.steps, options.tiny)
        memory = ranks.gather(peak(where))
        if not ranks.is_first:
            return
    config = read_json(options.folder / "dense/config.json")
    record = {
        "benchmark": "recovery-cost",
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": asdict(machine()) if where.type == "cuda" else {"cpu": "a rehearsal", "torch": torch.__version__},
        "part": options.part,
        "gpus": ranks.world,
        "layers": config["num_hidden_layers"],
        "pattern": PATTERN,
        **found,
        "memory_gb": memory,
    }
    print(json.dumps(record))
    if options.out:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
