"""Find where a served checkpoint computes something else on a GPU than by the reference on the CPU.

    python cpu_vs_gpu.py CHECKPOINT [--out RECORDS.jsonl] [--windows 128] [--cpu-windows 4]

1. Layer by layer: each linear of the GPU's model gets what it reads in a run on held-out code, cut to several numbers
   of tokens, since kernels differ by them; the reference gets the same bits. INT8 sums are exact, so what may differ is
   one rounding of the result. The first layer beyond that is named.
2. Whole models on the same windows, with paired errors: the checkpoint's weights in float; these with inputs rounded in
   a float model, which is what rounding explains; by ``slidesparse.load`` on the GPU; and on some windows by the
   reference on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import texts
import torch
from compare import paired
from judge import WINDOW, about
from models import Local
from torch import nn
from transformers import AutoTokenizer

import slidesparse as ss
from slidesparse.layer.linear import SlideLinear
from slidesparse.weights.quant import dequantize, quantize_rows

TOKENS = (1, 7, 16, 64, 128, 200, 512, 2048)
LIMIT = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
"""Largest difference of one output over its size: one rounding to the next number of its type."""


def sparse_linears(model: nn.Module) -> dict[str, SlideLinear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, SlideLinear)}


@torch.no_grad()
def read_inputs(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what each sparse linear reads in one run: [tokens, in]."""
    read: dict[str, torch.Tensor] = {}

    def see(name: str) -> Any:
        return lambda _, args: read.update({name: args[0].detach().flatten(0, -2).clone()})

    handles = [one.register_forward_pre_hook(see(name)) for name, one in sparse_linears(model).items()]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return read


def compare_layers(fast: Any, reference: Any, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Return for each linear its largest difference from the reference, over all numbers of tokens."""
    own, other = sparse_linears(fast), sparse_linears(reference)
    found = []
    for name, x in read_inputs(fast, ids).items():
        wanted = other[name](x.cpu())
        scale = wanted.abs().float().clamp(min=wanted.abs().float().mean())
        limit, worst = LIMIT[wanted.dtype], {}
        for tokens in sorted({min(count, len(x)) for count in TOKENS}):
            got = own[name](x[:tokens]).cpu().float()
            worst[tokens] = float(((got - wanted[:tokens].float()).abs() / scale[:tokens]).max())
        whole = own[name](x).cpu()
        found.append(
            {
                "linear": name,
                "shape": [own[name].out_features, own[name].in_features],
                "backends": [route.backend for route in own[name].choice.routes],
                "worst": {tokens: round(one, 6) for tokens, one in worst.items()},
                "unequal": round(float((whole != wanted).double().mean()), 6),
                "beyond": not all(one <= limit for one in worst.values()),  # NaN is beyond, too
            }
        )
    return found


class Plain(nn.Module):
    """A sparse linear's weight in a float linear, its inputs rounded or not."""

    def __init__(self, linear: SlideLinear, rounded: bool) -> None:
        super().__init__()
        weight = linear.unpack()
        wide = weight.float() if linear.weight_scale is None else dequantize(weight, linear.weight_scale)
        bias = None if linear.bias is None else linear.bias.detach().float()
        device, self.dtype = linear.device, linear.weight_dtype
        self.register_buffer("weight", wide.to(device))
        self.register_buffer("bias", bias)
        self.rounded = rounded and linear.weight_scale is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.rounded:
            wide = dequantize(*(part.flatten(0, -2) for part in quantize_rows(wide, self.dtype))).view_as(wide)
        return nn.functional.linear(wide, self.weight, self.bias).to(x.dtype)


def in_floats(path: Path, device: str, rounded: bool) -> Any:
    """Return the checkpoint with float linears in the places of sparse ones."""
    model = ss.load(path, device=device)
    for name, linear in sparse_linears(model).items():
        model.set_submodule(name, Plain(linear, rounded))
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tag", default="cpu against gpu")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--cpu-windows", type=int, default=4)
    options = parser.parse_args()
    options.dense = options.url = options.by = options.gpu = None
    options.served = True
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    text, _ = texts.held_out_code()
    windows = texts.windows(tokenizer, text, options.windows * WINDOW, WINDOW)
    fast, reference = (ss.load(options.checkpoint, device=where) for where in (device, "cpu"))
    layers = compare_layers(fast, reference, windows[:4].to(device))
    beyond = [one for one in layers if one["beyond"]]
    for one in beyond[:5] or layers[:3]:
        print(json.dumps(one), flush=True)
    first = beyond[0]["linear"] if beyond else None
    print(f"{len(beyond)} of {len(layers)} linears beyond one rounding; the first: {first}", flush=True)

    losses: dict[str, list[float]] = {}
    for name, make in {
        "weights in float": lambda: in_floats(options.checkpoint, device, False),
        "rounded in float": lambda: in_floats(options.checkpoint, device, True),
        "GPU": lambda: fast,
        "CPU reference": lambda: reference,
    }.items():
        some = windows[: options.cpu_windows] if name == "CPU reference" else windows
        losses[name] = Local(make(), tokenizer).losses(some)
        base = losses["weights in float"][: len(some)]
        mean, error = paired(losses[name], base)
        perplexity = math.exp(math.fsum(losses[name]) / len(some))
        print(
            f"{name}: perplexity {perplexity:.4f} of {len(some)} windows, "
            f"{100 * math.expm1(mean):+.3f} ± {100 * error:.3f} % against weights in float",
            flush=True,
        )
    if options.out:
        record = {**about(options, Local(fast, tokenizer)), "linears": layers, "losses": losses}
        with options.out.open("ab", buffering=0) as file:
            file.write(json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    main()
