"""Train a model to answer questions exactly, dense or under a pattern: the experiment of the SlideSparse paper.

    python regimes.py DENSE OUT                       # the dense regime
    python regimes.py PRUNED OUT                      # the zeros of a pruned BF16 checkpoint held

All regimes see the same questions in the same order, at the same learning rate: those of :mod:`reasoning`'s generators,
with seeds that nobody is judged by. The loss is that of the answers' tokens. ``judge.py --parts reasoning`` judges.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reasoning
import torch
from rivals import save
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from slidesparse import HeldZeros, InputError
from slidesparse.recovery.options import lr_share
from slidesparse.recovery.training import BETAS, CLIP

NO_LOSS = -100


def examples(tokenizer: Any, number: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Return questions with their answers as tokens, and where the answer begins, in a fixed mixed order."""
    judged = {words(one.entry["question"]) for one in reasoning.questions(100)}
    each = -(-number // len(reasoning.GENERATORS))
    asked = [one for one in reasoning.questions(each, seed) if words(one.entry["question"]) not in judged]
    starts = tokenizer([reasoning.prompt(tokenizer, one) for one in asked], add_special_tokens=False).input_ids
    answers = tokenizer([f" {one.entry['answer']}\n" for one in asked], add_special_tokens=False).input_ids
    found = [(start + answer, len(start)) for start, answer in zip(starts, answers, strict=True)]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    return [found[n] for n in order]


def words(question: str) -> tuple[str, ...]:
    """Return a question's words in order of the alphabet: it is the same with its numbers exchanged."""
    return tuple(sorted(re.findall(r"\w+", question)))


def batches(found: list[tuple[list[int], int]], size: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches, padded to the right: what is asked, and the tokens that count."""
    for at in range(0, len(found) - size + 1, size):
        some = found[at : at + size]
        longest = max(len(ids) for ids, _ in some)
        ids, labels = torch.zeros(size, longest, dtype=torch.long), torch.full((size, longest), NO_LOSS)
        mask = torch.zeros(size, longest, dtype=torch.long)
        for row, (tokens, start) in enumerate(some):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, start : len(tokens)] = ids[row, start : len(tokens)]
            mask[row, : len(tokens)] = 1
        yield {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


def answer_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of the answers' tokens, of whose states alone logits are made."""
    hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).last_hidden_state
    counted = batch["labels"][:, 1:] != NO_LOSS
    logits = model.lm_head(hidden[:, :-1][counted])
    return nn.functional.cross_entropy(logits.float(), batch["labels"][:, 1:][counted])


def train(model: Any, found: list[tuple[list[int], int]], options: argparse.Namespace) -> int:
    """Train in place; return the tokens that were read."""
    device, steps, tokens = next(model.parameters()).device, len(found) // options.batch, 0
    embeddings = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    parameters = [one for one in model.parameters() if id(one) not in embeddings]
    optimizer = torch.optim.AdamW(parameters, betas=BETAS, weight_decay=0.0, fused=device.type == "cuda")
    held, start = held_zeros(model), time.monotonic()
    for step, batch in enumerate(batches(found, options.batch, device)):
        with torch.autocast(device.type, torch.bfloat16):
            loss = answer_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * lr_share(step / steps)
        optimizer.step()
        optimizer.zero_grad()
        if held is not None:
            held.apply_()
        tokens += int(batch["attention_mask"].sum())
        if step % max(steps // 20, 1) == 0 or step == steps - 1:
            print(
                f"step {step + 1} of {steps}, loss {float(loss.detach()):.4f}, {time.monotonic() - start:.0f} s",
                flush=True,
            )
    return tokens


def held_zeros(model: Any) -> HeldZeros | None:
    """Return what holds the zeros of a pruned model, or None for a dense one."""
    try:
        return HeldZeros(model)
    except InputError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path, help="a dense checkpoint, or one that is pruned in BF16")
    parser.add_argument("out", type=Path)
    parser.add_argument("--questions", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=256, help="questions of a step")
    parser.add_argument("--lr", type=float, default=2e-5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.start)
    model = AutoModelForCausalLM.from_pretrained(options.start, dtype=torch.float32).to(device).train()
    model.gradient_checkpointing_enable()  # activations of a step would nearly fill an H200
    tokens = train(model, examples(tokenizer, options.questions), options)
    about = {"kind": "regime", "lr": options.lr, "trained_on": tokens}
    save(model.to(torch.bfloat16), tokenizer, options.start, options.out, about)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
