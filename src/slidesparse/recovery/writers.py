"""Writers: models that answer prompts, run by vLLM on a GPU, else by transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from slidesparse.base.other_libraries import LOCAL, need, other_library
from slidesparse.errors import CheckpointError, InputError, UnsupportedError, first_line

WriterName = Literal["auto", "vllm", "transformers"]  # auto: vLLM on a GPU where it is installed

SAMPLING = {"temperature": 0.8, "min_p": 0.05}  # so that answers vary and make sense


class Writer(Protocol):
    """A model that answers up to ``at_once`` prompts a call."""

    at_once: int

    def answer(self, prompts: Sequence[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        """Return the answers to prompts, both as token numbers; an answer that was not cut ends in an end token."""


class VllmWriter:
    """A model in an engine of vLLM, on the first GPU. Each answer has a seed of its own."""

    name, at_once = "vLLM", 4096  # it runs 1024 at a time, and waits for the last ones of a call

    def __init__(self, model: Path, length: int, device: str) -> None:
        if index := torch.device(device).index:
            raise InputError("device for vLLM", got=device, needed=f"cuda, with CUDA_VISIBLE_DEVICES={index}")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results
        self.vllm, much = need("vllm", "pip install vllm"), {"max_model_len": length, "max_num_seqs": 1024}
        try:
            self.engine = self.vllm.LLM(str(model), dtype="bfloat16", use_tqdm_on_load=False, **much)
        except Exception as error:  # an engine can raise anything
            remedy = "see its log with --verbose, or take --writer transformers"
            raise UnsupportedError("vLLM cannot run the model", got=first_line(error), remedy=remedy) from error

    def answer(self, prompts: Sequence[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        """See :class:`Writer`."""
        how = {"max_tokens": max_tokens, "detokenize": False, **SAMPLING}
        drawn = [self.vllm.SamplingParams(seed=seed + i, **how) for i in range(len(prompts))]
        answers = self.engine.generate([{"prompt_token_ids": one} for one in prompts], drawn, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in answers]


class TransformersWriter:
    """A model of transformers. Each call has one seed."""

    name, at_once = "transformers", 32

    def __init__(self, model: Path, length: int, device: str) -> None:
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        try:
            with other_library():
                load = need("transformers").AutoModelForCausalLM.from_pretrained
                self.model: Any = load(str(model), dtype=dtype, **LOCAL).to(device).eval()
        except Exception as error:  # a broken checkpoint can raise anything
            raise CheckpointError(f"transformers cannot load {model}", got=first_line(error)) from error

    def answer(self, prompts: Sequence[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        """See :class:`Writer`."""
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        width, padding = max(map(len, prompts)), ends[0] or 0
        ids = torch.tensor([[padding] * (width - len(one)) + one for one in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=ids.device)
        much = {"max_new_tokens": max_tokens, "pad_token_id": padding, "use_cache": True}
        usual = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}  # a generation_config.json may have others
        torch.manual_seed(seed)
        rows = self.model.generate(ids, attention_mask=mask, do_sample=True, **SAMPLING, **usual, **much).tolist()
        return [row[width : next((i + 1 for i in range(width, len(row)) if row[i] in ends), len(row))] for row in rows]


def writer_class(name: WriterName, device: str) -> type[VllmWriter | TransformersWriter]:
    """Return the class of the writer of this name."""
    usable = device.startswith("cuda") and find_spec("vllm") is not None
    return VllmWriter if name == "vllm" or (name == "auto" and usable) else TransformersWriter
