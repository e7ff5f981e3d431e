"""A small Llama-like language model: its data on the device, its training from scratch, and how it is judged."""

from __future__ import annotations

import itertools
import json
import lzma
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import END, VOCABULARY
from task import KINDS, problems
from torch import nn

from slidesparse.models.perplexity import measure_perplexity

CONTEXT = 512
TASK_SHARE = 0.25
TASK_LINES = 80_000  # of each kind
EXAMS = 500  # of each kind


@dataclass(frozen=True)
class Size:
    """A model and how it is trained."""

    hidden: int
    intermediate: int
    layers: int
    rate: float
    batch: int


SIZES = {
    "tiny": Size(64, 152, 2, 3e-3, 8),  # to try the script on a CPU
    "10m": Size(320, 896, 8, 3e-3, 128),
    "100m": Size(768, 2048, 14, 1e-3, 128),
}


def build(size: Size, seed: int) -> nn.Module:
    """Float32 weights, as transformers initialises them."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=max(size.hidden // 64, 1),
        num_key_value_heads=max(size.hidden // 64, 1),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


class Data:
    """Tokens on the device: text and problems to train on, text and problems held out."""

    def __init__(self, folder: Path, device: torch.device, limit: int | None = None) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.facts = json.loads((folder / "facts.json").read_text())
        texts = {
            part: lzma.decompress((folder / f"{part}.xz").read_bytes()).decode()[:limit]
            for part in ("train", "held_out")
        }
        self.train = self._encode(texts["train"].split(END)).to(device)
        self.held_out = self._encode(texts["held_out"].split(END)).to(device)
        self.held_out_bytes = len(texts["held_out"].encode())
        lines = TASK_LINES if limit is None else limit // 1000
        taken = [["".join(p) for p in itertools.islice(problems(kind, 0, False), lines)] for kind in KINDS]
        mixed = [line for group in zip(*taken, strict=True) for line in group]
        self.task = self._encode(["".join(mixed[i : i + 64]) for i in range(0, len(mixed), 64)]).to(device)
        self.exams = {kind: self._exam(kind, EXAMS if limit is None else 20, device) for kind in KINDS}

    def _encode(self, texts: list[str]) -> torch.Tensor:
        (end,) = self.tokenizer.encode(END).ids
        ids = [[*encoding.ids, end] for encoding in self.tokenizer.encode_batch(texts)]
        return torch.tensor(list(itertools.chain.from_iterable(ids)), dtype=torch.int32)

    def _exam(self, kind: str, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Problems as token numbers [count, length], and which of them are the answer; the rest is padding."""
        rows, answers = [], []
        for question, answer in itertools.islice(problems(kind, 1, True), count):
            head, tail = self.tokenizer.encode(f"\n{question}").ids, self.tokenizer.encode(answer).ids
            rows.append(head + tail)
            answers.append([False] * len(head) + [True] * len(tail))
        length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
        return ids, torch.tensor([row + [False] * (length - len(row)) for row in answers], device=device)

    def batch(self, size: int, generator: torch.Generator) -> torch.Tensor:
        """Random windows, int64 [size, CONTEXT + 1]."""
        of_task = round(TASK_SHARE * size)
        parts = []
        for tokens, count in ((self.train, size - of_task), (self.task, of_task)):
            starts = torch.randint(len(tokens) - CONTEXT, (count, 1), generator=generator, device=tokens.device)
            parts.append(tokens[starts + torch.arange(CONTEXT + 1, device=tokens.device)])
        return torch.cat(parts).to(torch.int64)


def autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _head_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).to(torch.float32).flatten(0, 1), targets.flatten())


class Trainer:
    """Trains one set of weights, again and again from given values: compiled once.

    ``plain`` is the model itself; training runs a twin that shares its weights and whose layers are compiled, because
    compiled layers are no place for hooks.
    """

    def __init__(self, plain: Any, size: Size, data: Data, compiled: bool) -> None:
        self.plain, self.size, self.data = plain, size, data
        self.device = next(plain.parameters()).device
        self.twin = build(size, 0)
        self.twin.to(self.device).load_state_dict(plain.state_dict(), assign=True)
        self.twin.tie_weights()
        self.head_loss: Callable[..., torch.Tensor] = _head_loss
        if compiled:
            for layer in self.twin.model.layers:
                layer.compile()
            self.head_loss = torch.compile(_head_loss)

    def train(
        self, steps: int, rate: float, seed: int, *, warmup: int = 0, after_step: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """AdamW with warm-up and a cosine down to a tenth of the rate."""
        parameters = list(self.twin.parameters())
        decayed = [p for p in parameters if p.dim() == 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=self.device.type == "cuda")
        generator = torch.Generator(self.device).manual_seed(seed)
        self.twin.train()
        losses = []
        started, measured_from = time.perf_counter(), min(10, steps - 1)
        for step in range(steps):
            progress = max(step - warmup, 0) / max(steps - warmup, 1)
            factor = min((step + 1) / max(warmup, 1), 0.55 + 0.45 * math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            ids = self.data.batch(self.size.batch, generator)
            with autocast(self.device):
                hidden = self.twin.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
                loss = self.head_loss(hidden, self.twin.lm_head.weight, ids[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            after_step()
            if step == measured_from:
                float(loss.detach())  # waits for the device
                started = time.perf_counter()
            if step % 50 == 0 or step == steps - 1:
                losses.append(loss.detach())
                if step % 500 == 0:
                    print(f"  step {step} loss {float(loss.detach()):.3f}", flush=True)
        final = float(losses[-1])
        seconds = time.perf_counter() - started
        tokens = self.size.batch * CONTEXT * (steps - 1 - measured_from)
        return {"loss": final, "seconds": seconds, "tokens_per_s": tokens / seconds if tokens else 0.0}


@torch.no_grad()
def judge(model: Any, data: Data) -> dict[str, Any]:
    """Perplexity of the held-out text, and the share of held-out problems that greedy decoding answers exactly.

    A greedy answer is right when every token of the right answer is the likeliest after what stands before it, so one
    reading of question and answer decides it.
    """
    model.eval()
    device = data.held_out.device

    def logits(ids: torch.Tensor) -> torch.Tensor:
        with autocast(device):
            out: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return out

    measured = measure_perplexity(
        logits, data.held_out.to(torch.int64), CONTEXT, CONTEXT // 2, n_bytes=data.held_out_bytes, batch=64
    )
    exact = {}
    for kind, (ids, is_answer) in data.exams.items():
        guesses = logits(ids)[:, :-1].argmax(-1)
        right = (guesses == ids[:, 1:]) | ~is_answer[:, 1:]
        exact[kind] = float(right.all(1).float().mean())
    return {
        "perplexity": measured.perplexity,
        "bits_per_byte": measured.bits_per_byte,
        "tokens": measured.tokens,
        "exact": exact,
        "exact_mean": sum(exact.values()) / len(exact),
    }


def calibration(data: Data, samples: int, seed: int) -> list[dict[str, Any]]:
    """Windows of the training mixture as inputs of the model, 16 at a time."""
    generator = torch.Generator(data.train.device).manual_seed(seed)
    ids = data.batch(samples, generator)[:, :-1]
    return [{"input_ids": chunk, "use_cache": False} for chunk in ids.split(16)]
