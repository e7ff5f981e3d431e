"""Train a rival toward the dense model with the budget, text, learning rate and loss of ``slidesparse recover``.

    python train_rival.py RIVAL OUT --dense DENSE --tokens 20M --text FILE[:WEIGHT] --text CHATS.jsonl[:WEIGHT]

What ``rivals.py`` cut in depth trains freely. What it rounded to 4 bits begins as the dense model, and rounds in the
loop as it will be rounded, gradients passing straight through, so that the result has 4 bits again. One GPU, or a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rivals import nearest, save
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoTokenizer

from slidesparse.models.targets import find_targets
from slidesparse.recovery.loss import Predictions, distillation
from slidesparse.recovery.networks import DenseNetwork, StudentNetwork, compile_, compiles
from slidesparse.recovery.options import RecoverOptions, default_lr, lr_share, parse_amount
from slidesparse.recovery.training import BETAS, CLIP
from slidesparse.recovery.windows import read_windows


class FourBits(nn.Module):
    """A weight as it is rounded, with the gradient of the weight as it is."""

    def __init__(self, symmetric: bool) -> None:
        super().__init__()
        self.symmetric = symmetric

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (nearest(weight.detach(), self.symmetric) - weight.detach())


def predictions(model: Any, ids: torch.Tensor) -> Predictions:
    """Return what a model predicts for all tokens of some windows."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return Predictions(hidden.flatten(0, 1).to(torch.bfloat16), model.lm_head.weight.to(torch.bfloat16))


def train(student: Any, dense: Any, options: RecoverOptions, folder: Path, micro_batch: int) -> float:
    """Train in place; return tokens a second."""
    device = next(student.parameters()).device
    windows = read_windows(folder, student.config, options)
    embeddings = {id(student.get_input_embeddings().weight), id(student.get_output_embeddings().weight)}
    parameters = [one for one in student.parameters() if id(one) not in embeddings]
    student.requires_grad_(False)
    for one in parameters:
        one.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, betas=BETAS, weight_decay=0.0, fused=device.type == "cuda")
    lr, steps = options.lr or default_lr(student.config.hidden_size), options.steps or 1
    networks = StudentNetwork(student), DenseNetwork(dense)
    if compiles(device):
        for network in networks:
            compile_(network)
    start = said = time.monotonic()
    for step in range(steps):
        ids = windows.step(step, options.windows).to(device)
        total = 0.0
        for part in ids.split(micro_batch):
            with torch.no_grad():
                wanted = predictions(dense, part)
            with torch.autocast(device.type, torch.bfloat16):
                own = predictions(student, part)
            loss = distillation(own, wanted, by=networks[0].divergence)
            (loss / ids.numel()).backward()
            total += float(loss.detach()) / ids.numel()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = lr * lr_share(step / steps)
        optimizer.step()
        optimizer.zero_grad()
        if time.monotonic() - said > 10 or step == steps - 1:
            said = time.monotonic()
            print(f"step {step + 1} of {steps}, KL {total:.4f}, {said - start:.0f} s", flush=True)
    return steps * options.step_tokens / (time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rival", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dense", type=Path, required=True)
    parser.add_argument("--tokens", default="20M")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--lr", type=float, help="(default: that of recover)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = json.loads((options.rival / "rival.json").read_text())
    begin = options.dense if about["kind"] == "int4" else options.rival
    student = AutoModelForCausalLM.from_pretrained(begin, dtype=torch.float32).to(device)
    dense = AutoModelForCausalLM.from_pretrained(options.dense, dtype=torch.bfloat16).to(device).eval()
    rounded = list(find_targets(student).linears.values()) if about["kind"] == "int4" else []
    for linear in rounded:
        parametrize.register_parametrization(linear, "weight", FourBits(about["symmetric"]))
    tokens = parse_amount(options.tokens)
    size = {"batch": options.batch, "window": options.window}
    how = RecoverOptions(tuple(options.text), tokens=tokens, lr=options.lr, **size)
    about |= {
        "trained_on": tokens,
        "tokens_a_second": round(train(student, dense, how, options.dense, options.micro_batch)),
    }
    for linear in rounded:
        parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)
    save(student.to(torch.bfloat16), AutoTokenizer.from_pretrained(options.dense), options.dense, options.out, about)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
