"""What else makes a model smaller or faster, as BF16 checkpoints that are judged as the pruned ones are.

    python rivals.py int4 DENSE OUT [--method gptq --chats CHATS.jsonl] [--asymmetric]
    python rivals.py depth DENSE OUT --speedup 1.18 --chats CHATS.jsonl      # or --text FILE

``int4`` rounds the weights of the layers to 4 bits in groups of 128 inputs, by the grid of vLLM's W4A16 checkpoints:
to nearest, or by GPTQ (Frantar et al. 2023), written anew here on this package's calibration; it sweeps in the order of
columns. ``depth`` leaves out the layers that change their input least (block influence: Men et al., "ShortGPT", 2024),
as many as make the layers faster by the factor: what is not in layers takes time, too, so these models are rather
larger than the speed allows. Both write what they are into ``rival.json``; ``train_rival.py`` trains them on.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import texts
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from slidesparse.base.rank_tensors import RankTensors
from slidesparse.base.ranks import ALONE
from slidesparse.models.layer_stack import find_layer_list, record_inputs
from slidesparse.models.layerwise import prune_layers
from slidesparse.models.shared_layers import SharedLayers
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.pruning import Linears
from slidesparse.pruning.gram import checked_gram
from slidesparse.pruning.sparsegpt import inverse_factor
from slidesparse.weights.pattern import Pattern

GROUP = 128
LEVELS = 15
"""Steps between the least and the greatest of the 16 values."""

WINDOWS, LENGTH = 128, 512


@dataclass(frozen=True)
class Grid:
    """The 16 values of each row in a group of columns: ``(q - zero) * scale`` for q from -8 to 7."""

    scale: torch.Tensor
    zero: torch.Tensor

    @classmethod
    def of(cls, group: torch.Tensor, symmetric: bool) -> Grid:
        """Return the grid that holds a group's least and greatest value: [out, 1] each."""
        least, most = group.amin(1, keepdim=True).clamp(max=0), group.amax(1, keepdim=True).clamp(min=0)
        if symmetric:
            most = torch.maximum(most, -least)
            return cls((2 * most / LEVELS).clamp(min=1e-10), torch.zeros_like(most))
        scale = ((most - least) / LEVELS).clamp(min=1e-10)
        return cls(scale, (-8 - least / scale).round().clamp(-8, 7))

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the nearest values of the grid."""
        return ((weight / self.scale + self.zero).round().clamp(-8, 7) - self.zero) * self.scale


def nearest(weight: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """Round a weight [out, in] to nearest, each group of 128 columns to a grid of its own."""
    wide = weight.float()
    return torch.cat([Grid.of(part, symmetric).round(part) for part in wide.split(GROUP, 1)], 1).to(weight.dtype)


def gptq(weight: torch.Tensor, factor: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """Round a weight column by column; the later ones make up for the error of each.

    Args:
        weight: [out, in].
        factor: Upper Cholesky factor of the inverse Hessian, float32 [in, in].
        symmetric: Whether zero is in the middle of the grids.
    """
    current = weight.float().clone()
    for start in range(0, current.shape[1], GROUP):
        end = min(start + GROUP, current.shape[1])
        grid, errors = Grid.of(current[:, start:end], symmetric), torch.zeros_like(current[:, start:end])
        for column in range(start, end):
            rounded = grid.round(current[:, column, None])[:, 0]
            error = (current[:, column] - rounded) / factor[column, column]
            current[:, column:end] -= torch.outer(error, factor[column, column:end])
            current[:, column], errors[:, column - start] = rounded, error
        current[:, end:] -= errors @ factor[start:end, end:]
    return current.to(weight.dtype)


class Gptq:
    """GPTQ in the place of a pruning method: it gets the same calibration."""

    name, needs_calibration = "gptq", True

    def __init__(self, symmetric: bool) -> None:
        self.symmetric = symmetric

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """Return the rounded weights."""
        factor, _ = inverse_factor(checked_gram(linears), ", ".join(linears.weights))
        return {name: gptq(weight, factor, self.symmetric) for name, weight in linears.weights.items()}


def round_model(model: Any, windows: torch.Tensor | None, symmetric: bool) -> None:
    """Round the linears of all layers in place: to nearest, or by GPTQ with windows of text."""
    linears = find_targets(model).linears
    if windows is None:
        for linear in linears.values():
            linear.weight.data = nearest(linear.weight.data, symmetric)
        return
    patterns = dict.fromkeys(linears, Pattern.parse("2:4"))  # any but dense: the method does not look at it
    method, layers = Gptq(symmetric), find_layer_list(model, linears)
    sets = sets_to_prune(model, linears, patterns, method, run_once(model))
    samples = record_inputs(model, layers, batches(windows, model))
    alone = SharedLayers(RankTensors(ALONE, samples[0].hidden.device), len(samples))
    steps = prune_layers(model, layers, sets, patterns, method, samples, alone.prune_layer)
    for number, losses in enumerate(steps):
        print(f"layer {number}: {max(loss.loss for loss in losses):.2e} of the outputs' energy", flush=True)


def batches(windows: torch.Tensor, model: Any) -> list[dict[str, torch.Tensor]]:
    device = next(model.parameters()).device
    return [{"input_ids": some.to(device)} for some in windows.split(8)]


@torch.no_grad()
def influences(model: Any, layers: list[nn.Module], windows: torch.Tensor) -> list[float]:
    """Return for each layer one less the mean cosine of its output with its input."""
    sums = torch.zeros(len(layers), dtype=torch.float64)

    def see(number: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            before = (args[0] if args else kwargs["hidden_states"]).float()
            after = (out[0] if isinstance(out, tuple) else out).float()
            sums[number] += float(nn.functional.cosine_similarity(before, after, dim=-1).mean()) * len(before)

        return hook

    handles = [layer.register_forward_hook(see(n), with_kwargs=True) for n, layer in enumerate(layers)]
    for batch in batches(windows, model):
        model.model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return (1 - sums / len(windows)).tolist()


def cut_depth(model: Any, windows: torch.Tensor, speedup: float) -> dict[str, Any]:
    """Leave out layers in place, and return which."""
    layers = list(model.model.layers)
    found = influences(model, layers, windows)
    count = round(len(layers) * (1 - 1 / speedup))
    out = sorted(sorted(range(len(layers)), key=found.__getitem__)[:count])
    kept = [n for n in range(len(layers)) if n not in out]
    model.model.layers = nn.ModuleList(layers[n] for n in kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[n] for n in kept]
    return {"left_out": out, "of": len(layers), "influence": [round(one, 5) for one in found]}


def save(model: Any, tokenizer: Any, source: Path, out: Path, about: dict[str, Any]) -> None:
    """Write a checkpoint, and what it is."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "rival.json").write_text(json.dumps(about, indent=1) + "\n")
    if (source / "source.json").exists():
        shutil.copy(source / "source.json", out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    int4, depth = kinds.add_parser("int4"), kinds.add_parser("depth")
    for kind in (int4, depth):
        kind.add_argument("dense", type=Path)
        kind.add_argument("out", type=Path)
        given = kind.add_mutually_exclusive_group()
        given.add_argument("--chats", type=Path, help="to calibrate on")
        given.add_argument("--text", type=Path, help="to calibrate on")
    int4.add_argument("--method", choices=("nearest", "gptq"), default="nearest")
    int4.add_argument("--asymmetric", action="store_true")
    depth.add_argument("--speedup", type=float, required=True)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    needs_text = options.kind == "depth" or options.method == "gptq"
    if needs_text and not (options.chats or options.text):
        raise SystemExit("this calibrates: give it --chats or --text")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.dense)
    model = AutoModelForCausalLM.from_pretrained(options.dense, dtype=torch.bfloat16).to(device).eval()
    windows = None
    if needs_text:
        text = texts.chats_text(options.chats, tokenizer) if options.chats else options.text.read_text(encoding="utf8")
        windows = texts.windows(tokenizer, text, WINDOWS * LENGTH, LENGTH)
    about: dict[str, Any] = {"kind": options.kind}
    if options.kind == "int4":
        round_model(model, windows, not options.asymmetric)
        about |= {"method": options.method, "symmetric": not options.asymmetric, "group": GROUP}
    else:
        about |= {"speedup": options.speedup, **cut_depth(model, windows, options.speedup)}
    save(model, tokenizer, options.dense, options.out, about)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
