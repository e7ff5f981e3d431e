"""Let a model answer many prompts: through vLLM where it is installed, else through transformers, in large batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from slidesparse.base.device import usable_device
from slidesparse.base.log import LOG
from slidesparse.base.other_libraries import LOCAL, other_library
from slidesparse.base.progress import progress_bar
from slidesparse.base.ranks import Ranks
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import LONGEST, CheckpointError, UnsupportedError, first_line
from slidesparse.models.parts import text_config
from slidesparse.recovery.decode_attention import use_decode_attention

Writer = Literal["auto", "vllm", "transformers"]
"""What runs the model; ``auto``: vLLM on a GPU where it is installed."""

MOST_AT_ONCE = 4096
"""Prompts that transformers answers at once; fewer where their keys and values would take more than
:data:`CACHE_SHARE` of the free memory."""

MOST_ON_A_CPU = 32
"""There, so that little is lost when a run is interrupted."""

CACHE_SHARE = 0.4

SAMPLING = {"temperature": 0.8, "min_p": 0.05}
"""How answers are drawn, so that they vary and make sense. A token needs ``min_p`` of the likeliest one's probability:
a bound that takes no sorting of the vocabulary, as nucleus sampling does, which costs as much as the model for a
thousand answers at once."""

LOOK_S = 5.0
"""Seconds between two looks at what vLLM's process has kept."""

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says to its processes. Each one's vLLM is alone, and would take these for its own."""


@dataclass(frozen=True)
class Job:
    """What is asked of a checkpoint: prompts as token numbers, the most tokens of an answer, and a seed.

    ``kept`` begins the names of the files that keep answers, one for each batch: see :func:`kept_answers`.
    """

    model: Path
    prompts: tuple[list[int], ...]
    longest: int
    seed: int
    kept: str


def write_answers(job: Job, tokenizer: Any, writer: Writer, device: str, ranks: Ranks) -> list[str]:
    """Return the answers to prompts, of which each process has its own.

    Longest prompts come first, and alike lengths together, so that little is padded. Batches that a run before has kept
    are not asked again.
    """
    order = sorted(range(len(job.prompts)), key=lambda i: -len(job.prompts[i]))
    job = replace(job, prompts=tuple(job.prompts[i] for i in order))
    if done := len(kept_answers(job.kept)):
        whose = f" of rank {ranks.rank}" if ranks.world > 1 else ""
        LOG.warning("%d of %d answers%s are there from an interrupted run", done, len(order), whose)
    if done < len(order):
        if writer == "vllm" or (writer == "auto" and device.startswith("cuda") and find_spec("vllm") is not None):
            _ask_vllm(job, done, ranks)
        else:
            _ask_transformers(job, done, tokenizer, device)
    answers = dict(zip(order, kept_answers(job.kept), strict=True))
    return [answers[i] for i in range(len(order))]


def kept_answers(kept: str, known: int = 0) -> list[str]:
    """Return the answers of all batches so far but the ``known`` first; a batch's name says how many come before it."""
    answers: list[str] = []
    while (path := Path(f"{kept}-{known + len(answers)}.json")).exists():
        answers += json.loads(path.read_bytes())
    return answers


def _ask_transformers(job: Job, done: int, tokenizer: Any, device: str) -> None:
    from transformers import AutoModelForCausalLM

    device = str(usable_device(device))
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    try:
        with other_library():
            model: Any = AutoModelForCausalLM.from_pretrained(str(job.model), dtype=dtype, **LOCAL)
            model = model.to(device).eval()
            use_decode_attention(model)
    except Exception as error:  # a broken checkpoint can raise anything in transformers
        raise CheckpointError(f"transformers cannot load {job.model}", got=first_line(error)) from error
    with progress_bar("answers", len(job.prompts), unit="answers") as advance, torch.inference_mode():
        advance(done)
        while left := job.prompts[done:]:
            batch = left[: _batch_size(model, len(left[0]) + job.longest, device)]
            torch.manual_seed(job.seed + done)  # for each batch, so that it does not matter which ran before
            replace_file(
                Path(f"{job.kept}-{done}.json"), json.dumps(_answered(model, tokenizer, batch, job.longest, advance))
            )
            done += len(batch)
            advance(len(batch))
    del model
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # for what comes after it in this process


def _batch_size(model: Any, length: int, device: str) -> int:
    """Return how many texts of a length in tokens have room for their keys and values."""
    config = text_config(model.config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    if not device.startswith("cuda"):
        return min(MOST_AT_ONCE, MOST_ON_A_CPU, max(1, int(4e9 // (token * length))))
    return max(1, min(MOST_AT_ONCE, int(CACHE_SHARE * torch.cuda.mem_get_info(device)[0] // (token * length))))


def _answered(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], longest: int, advance: Callable[..., None]
) -> list[str]:
    """Return the answers of a batch; ``advance`` is told of each token, since a batch may take minutes."""
    padding = next(one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if one is not None)
    width = max(map(len, prompts))
    ids = torch.tensor([[padding] * (width - len(one)) + one for one in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=model.device)
    drawn = {"do_sample": True, **SAMPLING, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    much = {"max_new_tokens": longest, "pad_token_id": padding, "use_cache": True}

    def told(so_far: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        advance(0, f"{len(prompts)} at once, token {so_far.shape[1] - width} of {longest}")
        return torch.zeros(len(so_far), dtype=torch.bool, device=so_far.device)  # it stops none

    # Not within other_library, which would take what is told.
    found = model.generate(ids, attention_mask=mask, stopping_criteria=[told], **much, **drawn)
    answers: list[str] = tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
    return answers


def _ask_vllm(job: Job, done: int, ranks: Ranks) -> None:
    """Ask vLLM in a process of its own, which gives all memory of the GPU back when it ends."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "job.json"
        said = {**asdict(job), "model": str(job.model.resolve()), "done": done, "sampling": SAMPLING}
        asked.write_text(json.dumps(said))
        LOG.info("asking vLLM for %d answers", len(job.prompts) - done)
        with _counted_meanwhile(job):
            ended = subprocess.run(
                [sys.executable, "-m", "slidesparse.recovery.vllm_answers", str(asked)],
                env=_alone(ranks), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                check=False,
            )  # fmt: skip
        if ended.returncode or len(kept_answers(job.kept)) < len(job.prompts):
            lines = [line for line in ended.stdout.splitlines() if line.strip()] or ["no word"]
            got = next((line for line in reversed(lines) if "Error" in line), lines[-1])[:LONGEST]
            remedy = "write them with: slidesparse chats --writer transformers"
            raise UnsupportedError("vLLM cannot write the answers", got=got, remedy=remedy)


@contextmanager
def _counted_meanwhile(job: Job) -> Iterator[None]:
    """Show how many answers another process has kept, while it is waited for."""
    ended, shown = threading.Event(), 0
    with progress_bar("answers", len(job.prompts), unit="answers") as advance:

        def look() -> None:
            nonlocal shown
            new = len(kept_answers(job.kept, shown))
            advance(new)
            shown += new

        def watch() -> None:
            while not ended.wait(LOOK_S):
                look()

        watching = threading.Thread(target=watch, daemon=True)
        try:
            watching.start()
            yield
        finally:
            ended.set()
            if watching.is_alive():
                watching.join()
        look()


def _alone(ranks: Ranks) -> dict[str, str]:
    """Return the environment of a process that is none of torchrun's, and has the GPU of this one."""
    ours = (name for name in os.environ if name not in RANK_NAMES and not name.startswith("TORCHELASTIC_"))
    kept = {name: os.environ[name] for name in ours}
    if ranks.world > 1:
        visible = kept.get("CUDA_VISIBLE_DEVICES")
        kept["CUDA_VISIBLE_DEVICES"] = str(ranks.local) if not visible else visible.split(",")[ranks.local]
    return kept
