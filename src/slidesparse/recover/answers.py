"""Let a model answer many prompts: through vLLM where it is installed, else through transformers, in large batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from slidesparse.base.log import LOG
from slidesparse.base.other_libraries import LOCAL, other_library
from slidesparse.base.progress import progress_bar
from slidesparse.base.ranks import Ranks
from slidesparse.errors import LONGEST, CheckpointError, UnsupportedError, first_line
from slidesparse.models.parts import text_config
from slidesparse.offline.calibrate.calibration import positions
from slidesparse.recover.decode_attention import use_decode_attention

Writer = Literal["auto", "vllm", "transformers"]
"""What runs the model; ``auto``: vLLM on a GPU where it is installed."""

MOST_AT_ONCE = 4096
"""Prompts that transformers answers at once; fewer where their keys and values would take more than
:data:`CACHE_SHARE` of the free memory."""

CACHE_SHARE = 0.4

SAMPLING = {"temperature": 0.8, "min_p": 0.05}
"""How answers are drawn, so that they vary and make sense. A token needs ``min_p`` of the likeliest one's probability:
a bound that takes no sorting of the vocabulary, as nucleus sampling does, which costs as much as the model for a
thousand answers at once."""

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says to its processes. Each one's vLLM is alone, and would take these for its own."""


@dataclass(frozen=True)
class Job:
    """What is asked of a checkpoint: prompts as token numbers, the most tokens of an answer, and a seed."""

    model: Path
    prompts: tuple[list[int], ...]
    longest: int
    seed: int


def write_answers(job: Job, tokenizer: Any, writer: Writer, device: str, ranks: Ranks) -> list[str]:
    """Return the answers to prompts, of which each process has its own; of too long ones the ends are read."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(job.model), **LOCAL)
    most = max(1, positions(config, 1 << 20) - job.longest)
    job = replace(job, prompts=tuple(one[-most:] for one in job.prompts))
    if writer == "vllm" or (writer == "auto" and device.startswith("cuda") and find_spec("vllm") is not None):
        return _of_vllm(job, ranks)
    return _of_transformers(job, tokenizer, device)


def _of_transformers(job: Job, tokenizer: Any, device: str) -> list[str]:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    try:
        with other_library():
            model: Any = AutoModelForCausalLM.from_pretrained(str(job.model), dtype=dtype, **LOCAL)
            model = model.to(device).eval()
            use_decode_attention(model)
    except Exception as error:  # a broken checkpoint can raise anything in transformers
        raise CheckpointError(f"transformers cannot load {job.model}", got=first_line(error)) from error
    prompts = job.prompts
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # alike lengths together: little is padded
    answers = [""] * len(prompts)
    torch.manual_seed(job.seed)
    with progress_bar("answers", len(prompts), unit="answers") as advance, torch.inference_mode():
        for batch in _batches(model, prompts, order, job.longest, device):
            found = _answered(model, tokenizer, [prompts[i] for i in batch], job.longest)
            for i, answer in zip(batch, found, strict=True):
                answers[i] = answer
            advance(len(batch))
    del model
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # for what comes after it in this process
    return answers


def _batches(
    model: Any, prompts: Sequence[list[int]], order: list[int], longest: int, device: str
) -> Iterator[list[int]]:
    """Yield prompts, longest first, as many at a time as their keys and values leave room for."""
    config = text_config(model.config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    room = CACHE_SHARE * torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else 4e9
    left = order[::-1]
    while left:
        count = max(1, min(MOST_AT_ONCE, int(room // (token * (len(prompts[left[0]]) + longest)))))
        yield left[:count]
        left = left[count:]


def _answered(model: Any, tokenizer: Any, prompts: list[list[int]], longest: int) -> list[str]:
    padding = next(one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if one is not None)
    width = max(map(len, prompts))
    ids = torch.tensor([[padding] * (width - len(one)) + one for one in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=model.device)
    drawn = {"do_sample": True, **SAMPLING, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    much = {"max_new_tokens": longest, "pad_token_id": padding, "use_cache": True}
    with other_library():
        found = model.generate(ids, attention_mask=mask, **much, **drawn)
    answers: list[str] = tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
    return answers


def _of_vllm(job: Job, ranks: Ranks) -> list[str]:
    """Ask vLLM in a process of its own, which gives all memory of the GPU back when it ends."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder) / "job.json", Path(folder) / "answers.json"
        said = {**asdict(job), "model": str(job.model.resolve()), "sampling": SAMPLING}
        asked.write_text(json.dumps(said))
        LOG.info("asking vLLM for %d answers", len(job.prompts))
        ended = subprocess.run(
            [sys.executable, "-m", "slidesparse.recover.vllm_answers", str(asked), str(answers)],
            env=_alone(ranks), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            check=False,
        )  # fmt: skip
        if ended.returncode or not answers.exists():
            lines = [line for line in ended.stdout.splitlines() if line.strip()] or ["no word"]
            got = next((line for line in reversed(lines) if "Error" in line), lines[-1])[:LONGEST]
            remedy = "write them with: slidesparse chats --writer transformers"
            raise UnsupportedError("vLLM cannot write the answers", got=got, remedy=remedy)
        found: list[str] = json.loads(answers.read_text())
        return found


def _alone(ranks: Ranks) -> dict[str, str]:
    """Return the environment of a process that is none of torchrun's, and has the GPU of this one."""
    ours = (name for name in os.environ if name not in RANK_NAMES and not name.startswith("TORCHELASTIC_"))
    kept = {name: os.environ[name] for name in ours}
    if ranks.world > 1:
        visible = kept.get("CUDA_VISIBLE_DEVICES")
        kept["CUDA_VISIBLE_DEVICES"] = str(ranks.local) if not visible else visible.split(",")[ranks.local]
    return kept
