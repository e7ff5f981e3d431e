"""Train a model to answer questions exactly, dense or under a pattern: the experiment of the SlideSparse paper.

    python regimes.py DENSE OUT                       # the dense regime
    python regimes.py PRUNED OUT                      # the zeros of a pruned BF16 checkpoint held
    python regimes.py DENSE OUT --task sql --prompts prompts.jsonl

All regimes see the same questions in the same order, at the same learning rate: those of :mod:`reasoning`'s or
:mod:`sql`'s generators, with seeds that nobody is judged by. The loss is that of the answers' tokens. ``judge.py
--parts reasoning`` judges. ``--prompts`` keeps the questions, for ``slidesparse chats`` or ``compress``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from judge import TASKS, asked_so
from rivals import save
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from slidesparse import HeldZeros, InputError
from slidesparse.recovery.options import lr_share
from slidesparse.recovery.training import BETAS, CLIP

NO_LOSS = -100


def examples(tokenizer: Any, asked: Sequence[Any], seed: int = 0) -> list[tuple[list[int], int]]:
    """Return questions with their answers as tokens, and where the answer begins, in a fixed mixed order."""
    starts = tokenizer([asked_so(tokenizer, one.request) for one in asked], add_special_tokens=False).input_ids
    answers = tokenizer([one.answer + tokenizer.eos_token for one in asked], add_special_tokens=False).input_ids
    found = [(start + answer, len(start)) for start, answer in zip(starts, answers, strict=True)]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    return [found[n] for n in order]


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
    parser.add_argument("--task", choices=TASKS, default="reasoning")
    parser.add_argument("--prompts", type=Path, help="keep the questions here, as chats without answers")
    parser.add_argument("--questions", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=256, help="questions of a step")
    parser.add_argument("--lr", type=float, default=2e-5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.start)
    model = AutoModelForCausalLM.from_pretrained(options.start, dtype=torch.float32).to(device).train()
    model.gradient_checkpointing_enable()  # activations of a step would nearly fill an H200
    asked = TASKS[options.task].training(options.questions)
    if options.prompts:
        lines = [json.dumps({"messages": [{"role": "user", "content": one.request}]}) for one in asked]
        random.Random(0).shuffle(lines)  # whoever takes the first ones gets some of every generator
        options.prompts.write_text("\n".join(lines) + "\n")
    tokens = train(model, examples(tokenizer, asked), options)
    about = {"kind": "regime", "task": options.task, "lr": options.lr, "trained_on": tokens}
    save(model.to(torch.bfloat16), tokenizer, options.start, options.out, about)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
