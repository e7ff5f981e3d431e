"""A small Llama-like language model: its data on the device, its training from scratch, and how it is judged."""

from __future__ import annotations

import functools
import itertools
import json
import lzma
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import END, PARTS
from task import KINDS, problems
from torch import nn
from torch.overrides import TorchFunctionMode

from slidesparse.models.expert_weights import expert_weights
from slidesparse.models.experts import find_experts
from slidesparse.models.perplexity import measure_perplexity
from slidesparse.models.targets import find_targets
from slidesparse.weights.quant import Rounding, parse_dtype, quantize_rows, quantize_weight

CONTEXT = 512
TASK_SHARE = 3 / 16
TASK_LINES = 100_000  # of each kind
EXAMS = 500  # of each kind
SAVED_EVERY = 400  # steps
BALANCE = 0.01  # weight of the loss that keeps the experts of a mixture busy


@dataclass(frozen=True)
class Size:
    """A model and how it is trained."""

    hidden: int
    intermediate: int
    layers: int
    rate: float
    batch: int = 128
    experts: int = 0  # of each layer, two for a token; 0: no mixture


SIZES = {
    "tiny": Size(48, 144, 4, 3e-3, 8),  # to try the script on a CPU
    "tiny-3": Size(48, 144, 3, 3e-3, 8),
    "30m": Size(384, 1152, 14, 2e-3),
    "30m-12": Size(384, 1152, 12, 2e-3),  # the smaller dense models that a pruned one competes with
    "30m-10": Size(384, 1152, 10, 2e-3),
    "100m": Size(768, 1920, 14, 1e-3),
    "mixture": Size(96, 96, 3, 3e-3, 2, experts=12),  # small enough for a CPU
}


def build(size: Size, seed: int, vocabulary: int) -> nn.Module:
    """Float32 weights, as transformers initialises them."""
    import transformers

    torch.manual_seed(seed)
    heads = max(size.hidden // (32 if size.experts else 64), 1)
    mixture = {
        "moe_intermediate_size": size.intermediate,
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "head_dim": size.hidden // heads,
        "output_router_logits": True,
    }
    config = (transformers.Qwen3MoeConfig if size.experts else transformers.LlamaConfig)(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        **(mixture if size.experts else {}),
    )
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    if size.experts:
        model.set_experts_implementation("eager")  # one after the other: so products can be watched, and CPUs are fast
    found: nn.Module = model
    return found


def first_merges(tokenizer: str, vocabulary: int) -> tuple[str, list[list[int]]]:
    """A tokenizer of the first tokens alone, and of which of them each token is made: merges are in order of rank."""
    told = json.loads(tokenizer)
    names, merges = told["model"]["vocab"], told["model"]["merges"]
    parts = [[i] for i in range(len(names))]
    for one, other in merges:
        made = names[one + other]
        if made >= vocabulary:
            parts[made] = parts[names[one]] + parts[names[other]]
    told["model"]["vocab"] = {name: i for name, i in names.items() if i < vocabulary}
    told["model"]["merges"] = [pair for pair in merges if names["".join(pair)] < vocabulary]
    return json.dumps(told), parts


def taken_apart(tokens: np.ndarray, parts: list[list[int]]) -> np.ndarray:
    """Tokens as those that they are made of, int32 [more]."""
    lengths = np.array([len(part) for part in parts])
    table = np.array([part + [0] * (lengths.max() - len(part)) for part in parts], dtype=np.int32)
    rows = [table[some][np.arange(table.shape[1]) < lengths[some, None]] for some in np.array_split(tokens, 64)]
    return np.concatenate(rows)


class Data:
    """Tokens on the device: text and problems to train on, text and problems held out.

    Args:
        corpus: The file that corpus.py wrote.
        device: Where the tokens lie.
        limit: Tokens of each text; None: all.
        vocabulary: How many of the tokenizer's tokens are used, the first; None: all.
    """

    def __init__(
        self, corpus: Path, device: torch.device, limit: int | None = None, vocabulary: int | None = None
    ) -> None:
        from tokenizers import Tokenizer

        head, _, body = lzma.decompress(corpus.read_bytes()).partition(b"\n")
        told = json.loads(head)
        self.facts: dict[str, Any] = told["facts"]
        parts: list[list[int]] | None = None
        if vocabulary is not None:
            told["tokenizer"], parts = first_merges(told["tokenizer"], vocabulary)
        self.tokenizer = Tokenizer.from_str(told["tokenizer"])
        self.device, start = device, 0
        self.text: dict[str, torch.Tensor] = {}
        self.bytes: dict[str, int] = {}
        for part in PARTS:
            count = self.facts[part]["tokens"]
            tokens = np.frombuffer(body, dtype="<u2", count=count, offset=2 * start)[:limit]
            text = tokens.astype(np.int32) if parts is None else taken_apart(tokens, parts)
            self.text[part] = torch.from_numpy(text).to(device)
            self.bytes[part] = self.facts[part]["bytes"] if len(tokens) == count else 0  # 0: not known
            start += count
        lines = TASK_LINES if limit is None else limit // 1000
        taken = [["".join(p) for p in itertools.islice(problems(kind, 0, False), lines)] for kind in KINDS]
        mixed = [line for group in zip(*taken, strict=True) for line in group]
        self.task = self._encode(["".join(mixed[i : i + 64]) for i in range(0, len(mixed), 64)])
        self.exams = {kind: self._exam(kind, EXAMS if limit is None else 20) for kind in KINDS}

    def _encode(self, texts: list[str]) -> torch.Tensor:
        (end,) = self.tokenizer.encode(END).ids
        ids = [[*encoding.ids, end] for encoding in self.tokenizer.encode_batch(texts)]
        return torch.tensor(list(itertools.chain.from_iterable(ids)), dtype=torch.int32, device=self.device)

    def _exam(self, kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Problems as token numbers [count, length], and which of them are the answer; the rest is padding."""
        rows, answers = [], []
        for question, answer in itertools.islice(problems(kind, 1, True), count):
            head, tail = self.tokenizer.encode(f"\n{question}").ids, self.tokenizer.encode(answer).ids
            rows.append(head + tail)
            answers.append([False] * len(head) + [True] * len(tail))
        length = max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=self.device)
        return ids, torch.tensor([row + [False] * (length - len(row)) for row in answers], device=self.device)

    def steps(self, epochs: float, rows: int) -> int:
        """Steps of ``rows`` windows in which the text is read so many times."""
        return int(epochs * self._windows() / (rows - round(TASK_SHARE * rows)))

    def _windows(self) -> int:
        return len(self.text["train"]) // CONTEXT - 1

    def batch(self, step: int, rows: int, seed: int) -> torch.Tensor:
        """The windows of a step, int64 [rows, CONTEXT + 1]: no window of text comes again before all were read."""
        of_task = round(TASK_SHARE * rows)
        numbers = torch.arange(step * (rows - of_task), (step + 1) * (rows - of_task))
        starts = torch.cat(
            [
                self._starts(int(epoch), seed)[numbers[numbers // self._windows() == epoch] % self._windows()]
                for epoch in (numbers // self._windows()).unique()
            ]
        )
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        of_problems = torch.randint(len(self.task) - CONTEXT, (of_task,), generator=generator)
        span = torch.arange(CONTEXT + 1, device=self.device)
        parts = [
            tokens[begin.to(self.device)[:, None] + span]
            for tokens, begin in ((self.text["train"], starts), (self.task, of_problems))
        ]
        return torch.cat(parts).to(torch.int64)

    @functools.lru_cache(maxsize=4)  # noqa: B019 - one object lives as long as the program
    def _starts(self, epoch: int, seed: int) -> torch.Tensor:
        """Where the windows of an epoch begin, in its order; each epoch cuts the text elsewhere."""
        generator = torch.Generator().manual_seed(1009 * seed + epoch)
        return torch.randperm(self._windows(), generator=generator) * CONTEXT + 191 * epoch % CONTEXT


def autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _head_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).to(torch.float32).flatten(0, 1), targets.flatten())


def _head_divergence(
    hidden: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor, wanted_weight: torch.Tensor
) -> torch.Tensor:
    """Mean over tokens of the Kullback-Leibler divergence from a teacher's prediction."""
    log_q = F.log_softmax((hidden @ weight.T).to(torch.float32), -1)
    log_p = F.log_softmax((wanted @ wanted_weight.T).to(torch.float32), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


class Trainer:
    """Trains one set of weights, again and again from given values: compiled once.

    ``plain`` is the model itself; training runs a twin that shares its weights and whose layers are compiled, because
    compiled layers are no place for hooks.
    """

    def __init__(self, plain: Any, size: Size, data: Data, compiled: bool) -> None:
        self.plain, self.size, self.data = plain, size, data
        self.device = next(plain.parameters()).device
        self.twin: Any = build(size, 0, plain.config.vocab_size).to(self.device)
        self.twin.load_state_dict(plain.state_dict(), assign=True)
        self.twin.tie_weights()
        self.head_loss: Callable[..., torch.Tensor] = _head_loss
        self.head_divergence: Callable[..., torch.Tensor] = _head_divergence
        if compiled:
            for layer in self.twin.model.layers:
                layer.compile()
            self.head_loss, self.head_divergence = torch.compile(_head_loss), torch.compile(_head_divergence)

    @contextmanager
    def only_layers(self, kept: Sequence[int]) -> Iterator[None]:
        """Leave out the other layers, of the model and of its twin."""
        whole = [(model.model, model.model.layers) for model in (self.plain, self.twin)]
        for stack, layers in whole:
            stack.layers = nn.ModuleList(layers[i] for i in kept)
        try:
            yield
        finally:
            for stack, layers in whole:
                stack.layers = layers

    def train(
        self,
        steps: int,
        rate: float,
        seed: int,
        *,
        warmup: int = 0,
        after_step: Callable[[], None] = lambda: None,
        teacher: Any = None,
        saved: Path | None = None,
    ) -> dict[str, float]:
        """AdamW with warm-up and a cosine down to a tenth of the rate.

        Args:
            steps: Steps in all.
            rate: The highest rate.
            seed: Decides which windows each step reads.
            warmup: Steps in which the rate grows.
            after_step: Called after each step.
            teacher: A model whose predictions are the target; None: the text is.
            saved: Where the state is kept every now and then, to go on from after an interruption.
        """
        parameters = list(self.twin.parameters())
        decayed = [p for p in parameters if p.dim() >= 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=self.device.type == "cuda")
        begin = 0
        if saved is not None and saved.exists():
            state = torch.load(saved, map_location=self.device)
            self.twin.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            begin = state["step"]
        self.twin.train()
        started, measured_from = time.perf_counter(), min(begin + 10, steps - 1)
        final = math.nan
        for step in range(begin, steps):
            progress = max(step - warmup, 0) / max(steps - warmup, 1)
            factor = min((step + 1) / max(warmup, 1), 0.55 + 0.45 * math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            loss = self._loss(self.data.batch(step, self.size.batch, seed), teacher)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            after_step()
            if step == measured_from:
                float(loss.detach())  # waits for the device
                started = time.perf_counter()
            if step == steps - 1 or step % 200 == 0:
                final = float(loss.detach())
                print(f"  step {step} of {steps}, loss {final:.3f}", flush=True)
            if saved is not None and step % SAVED_EVERY == SAVED_EVERY - 1:
                save({"model": self.twin.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, saved)
        seconds = time.perf_counter() - started
        tokens = self.size.batch * CONTEXT * (steps - 1 - measured_from)
        return {"loss": final, "seconds": seconds, "tokens_per_s": tokens / seconds if tokens else 0.0}

    def _imbalance(self, logits: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of Switch Transformers, which is least where all experts get as much."""
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        found: torch.Tensor = load_balancing_loss_func(tuple(logits), self.size.experts, 2)
        return found

    def _loss(self, ids: torch.Tensor, teacher: Any) -> torch.Tensor:
        inputs = {"input_ids": ids[:, :-1], "use_cache": False}
        with autocast(self.device):
            out = self.twin.model(**inputs)
            hidden = out.last_hidden_state
            if teacher is None:
                loss = self.head_loss(hidden, self.twin.lm_head.weight, ids[:, 1:])
                return loss + BALANCE * self._imbalance(out.router_logits) if self.size.experts else loss
            with torch.no_grad():
                wanted = teacher.model(**inputs).last_hidden_state
            return self.head_divergence(hidden, self.twin.lm_head.weight, wanted, teacher.lm_head.weight)


def save(values: object, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(values, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


class _Products(TorchFunctionMode):
    """Takes other functions for products with weights that are slices of a parameter, told by where they lie."""

    def __init__(self, products: dict[int, Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        product = self.products.get(args[1].data_ptr()) if func is F.linear else None
        return func(*args, **(kwargs or {})) if product is None else product(args[0])


@contextmanager
def served(model: nn.Module, dtype: str, recipe: Rounding = "absmax") -> Iterator[None]:
    """Let linears and experts multiply as a server does: inputs by token in 8 bits, and weights by channel in 8 or 6.

    The numbers are slidesparse's, and exact in BF16; the products are summed in float32, as on tensor cores.
    """
    linears, kind = find_targets(model).linears.values(), parse_dtype(dtype)

    def forward(held: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        weight = quantize_weight(held, kind, recipe=recipe)
        values = weight.values.to(torch.bfloat16)

        def product(x: torch.Tensor) -> torch.Tensor:
            inputs = quantize_rows(x.to(torch.bfloat16), kind)
            with torch.autocast(x.device.type, enabled=False):
                out = F.linear(inputs.values.to(torch.bfloat16), values).to(torch.float32)
            return (out * inputs.scale * weight.scale.T).to(x.dtype)

        return product

    for linear in linears:
        linear.forward = forward(linear.weight)  # type: ignore[method-assign]
    found = find_experts(model)
    experts = expert_weights(model, found, {one.layer(leaf) for one in found for leaf in one.weights}).values()
    try:
        with _Products({one.held.data_ptr(): forward(one.weight) for one in experts}) if found else nullcontext():
            yield
    finally:
        for linear in linears:
            del linear.forward


@torch.no_grad()
def judge(model: Any, data: Data, parts: Iterable[str] = ("packages", "files")) -> dict[str, Any]:
    """Perplexity of held-out text, and the share of held-out problems that greedy decoding answers exactly.

    A greedy answer is right when every token of the right answer is the likeliest after what stands before it, so one
    reading of question and answer decides it.
    """
    model.eval()

    def logits(ids: torch.Tensor) -> torch.Tensor:
        with autocast(data.device):
            out: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return out

    measured = {
        part: measure_perplexity(
            logits,
            data.text[part].to(torch.int64),
            CONTEXT,
            CONTEXT * 3 // 4,
            n_bytes=data.bytes[part],
            batch=64,
        )
        for part in parts
    }
    exact = {}
    for kind, (ids, is_answer) in data.exams.items():
        guesses = logits(ids)[:, :-1].argmax(-1)
        right = (guesses == ids[:, 1:]) | ~is_answer[:, 1:]
        exact[kind] = float(right.all(1).float().mean())
    return {
        **{f"{part}_perplexity": found.perplexity for part, found in measured.items()},
        **{f"{part}_bits_per_byte": found.bits_per_byte for part, found in measured.items()},
        "exact": exact,
        "exact_mean": sum(exact.values()) / len(exact),
    }


def calibration(data: Data, samples: int, seed: int) -> list[dict[str, Any]]:
    """Windows of the training mixture as inputs of the model, 16 at a time."""
    ids = data.batch(0, samples, seed)[:, :-1]
    return [{"input_ids": chunk, "use_cache": False} for chunk in ids.split(16)]


@torch.no_grad()
def influence(model: Any, batches: Iterable[dict[str, Any]], device: torch.device) -> list[float]:
    """How much each layer turns the hidden state: one less the mean cosine between what it reads and what it gives.

    Source: Men et al., "ShortGPT: Layers in Large Language Models are More Redundant Than You Expect" (2024), who drop
    the layers that turn it least.
    """
    turned = [0.0] * len(model.model.layers)
    tokens = 0

    def hook(index: int) -> Callable[..., None]:
        def see(layer: nn.Module, args: Any, out: Any) -> None:
            given = out[0] if isinstance(out, tuple) else out
            turned[index] += float((1 - F.cosine_similarity(args[0].float(), given.float(), dim=-1)).sum())

        return see

    handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(model.model.layers)]
    try:
        for batch in batches:
            tokens += batch["input_ids"].numel()
            with autocast(device):
                model.model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return [total / tokens for total in turned]
