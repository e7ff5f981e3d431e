"""Writers: models that answer up to ``at_once`` prompts a call, run by vLLM on a GPU, else by transformers.

Nothing but :data:`SAMPLING` and :func:`end_tokens` decides how they draw: a ``generation_config.json`` may name beams,
penalties, or several answers to a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from slidesparse.base.other_libraries import need, other_library
from slidesparse.checkpoints.checkpoint import GENERATION_FILE, Checkpoint
from slidesparse.checkpoints.meta_model import model_class
from slidesparse.errors import InputError, UnsupportedError, first_line, library_errors
from slidesparse.files.json_files import read_json
from slidesparse.models.causal import require_causal, vocabulary_of
from slidesparse.offline.evaluate import load_by_transformers

WriterName = Literal["auto", "vllm", "transformers"]  # auto: vLLM on a GPU where it is installed

SAMPLING = {"temperature": 0.8, "min_p": 0.05}  # so that answers vary and make sense


def end_tokens(checkpoint: Checkpoint, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: those that tokenizer, config.json or generation_config.json name."""
    path, config = checkpoint.path / GENERATION_FILE, model_class(checkpoint)[1]
    settings = read_json(path) if path.exists() else {}
    parts = (config, config.get_text_config(decoder=True), tokenizer)
    named = [settings.get("eos_token_id"), *(getattr(one, "eos_token_id", None) for one in parts)]
    ends = [end for one in named for end in (one if isinstance(one, list) else [one])]
    return sorted({end for end in ends if type(end) is int and 0 <= end < (vocabulary_of(config) or 1 << 31)})


class VllmWriter:
    """A model in an engine of vLLM, on the first GPU. Each answer has a seed of its own."""

    name, at_once = "vLLM", 4096  # it runs 1024 at a time, and waits for the last ones of a call

    def __init__(self, model: Path, length: int, device: str, ends: Sequence[int]) -> None:
        if index := torch.device(device).index:
            raise InputError("device for vLLM", got=device, needed=f"cuda, with CUDA_VISIBLE_DEVICES={index}")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results
        self.vllm, self.ends = need("vllm", "pip install vllm"), list(ends)
        how = {"generation_config": "vllm", "max_model_len": length, "max_num_seqs": 1024}
        remedy = "see its log with --verbose, or take --writer transformers"
        with library_errors(UnsupportedError, "vLLM cannot run the model", remedy=remedy):
            self.engine = self.vllm.LLM(str(model), dtype="bfloat16", use_tqdm_on_load=False, **how)

    def answer(self, prompts: Sequence[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        """Return the answers to prompts, both as token numbers; an answer that was not cut ends in an end token."""
        how = {"max_tokens": max_tokens, "detokenize": False, "stop_token_ids": self.ends, **SAMPLING}
        drawn = [self.vllm.SamplingParams(seed=seed + i, **how) for i in range(len(prompts))]
        answers = self.engine.generate([{"prompt_token_ids": one} for one in prompts], drawn, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in answers]


class TransformersWriter:
    """A model of transformers. Each call has one seed."""

    name, at_once = "transformers", 2048

    def __init__(self, model: Path, length: int, device: str, ends: Sequence[int]) -> None:
        known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        fast = device.startswith("cuda") or known.get("avx512_bf16", False)
        dtype = torch.bfloat16 if fast else torch.float32
        require_causal(*model_class(Checkpoint(model)))
        self.model: Any = load_by_transformers(Checkpoint(model), torch.device(device), dtype)
        self.ends = list(ends)
        self.at_once = min(self.at_once, self._fitting(length) if device.startswith("cuda") else 16)
        usual = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0, **SAMPLING}
        settings = need("transformers").GenerationConfig
        self.model.generation_config = settings(eos_token_id=self.ends or None, **usual)  # and nothing of a file

    def _fitting(self, length: int) -> int:
        """Return the number of answers whose keys, values, activations and logits take 3/4 of the free GPU memory."""
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_attention_heads", None) or 1
        width = max(heads * (getattr(config, "head_dim", None) or 0), config.hidden_size)
        kept = 4 * width * (getattr(config, "num_key_value_heads", None) or heads) // heads * config.num_hidden_layers
        each = length * (kept + 40 * config.hidden_size) + 32 * (vocabulary_of(config) or 0)
        return max(1, int(3 * torch.cuda.mem_get_info(self.model.device)[0] // 4 // each))

    def answer(self, prompts: Sequence[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        """Return answers as :class:`VllmWriter` does; after an error of memory, fewer at once from then on."""
        answers: list[list[int]] = []
        while (start := len(answers)) < len(prompts):
            some = prompts[start : start + self.at_once]
            try:
                with other_library():  # some decompress their weights in the first call
                    answers += self._generate(some, max_tokens, seed + start)
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                if not isinstance(error, torch.OutOfMemoryError) or len(some) == 1:
                    raise UnsupportedError("transformers cannot run the model", got=first_line(error)) from error
                self.at_once = len(some) // 2  # tried once the error, which holds tensors, is gone
        return answers

    def _generate(self, prompts: Sequence[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=ids.device)
        torch.manual_seed(seed)
        rows = self.model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, use_cache=True).tolist()
        found = [next((i + 1 for i in range(width, len(row)) if row[i] in self.ends), len(row)) for row in rows]
        return [row[width:end] for row, end in zip(rows, found, strict=True)]


def writer_class(name: WriterName, device: str) -> type[VllmWriter | TransformersWriter]:
    """Return the class of the writer of this name."""
    usable = device.startswith("cuda") and find_spec("vllm") is not None
    return VllmWriter if name == "vllm" or (name == "auto" and usable) else TransformersWriter
