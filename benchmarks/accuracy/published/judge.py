"""Judge a checkpoint: HumanEval, held-out code and chats, questions with exact answers, SQL. One record a run.

    python judge.py CHECKPOINT --out RECORDS.jsonl --tag "6:8 sparsegpt" [--dense DENSE] [--chats HELD.jsonl]
    python judge.py CHECKPOINT ... --served                             # INT8, FP8 or six bits, by slidesparse.load
    python judge.py CHECKPOINT ... --url http://localhost:8000/v1       # by the server that has loaded it

A record holds a score for each problem, so that ``compare.py`` can pair two of them, and says which file the model came
from, what it ran on and how it was asked. Programs that the model writes run apart (``humaneval.py``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import humaneval
import reasoning
import sql
import texts
import torch
import transformers
from models import Local, Model, Served

import slidesparse as ss
from slidesparse_bench.environment import commit

SAMPLES, HEAT = 10, 0.2
PROGRAM_TOKENS = 384
WINDOW = 512
TASKS: dict[str, Any] = {"reasoning": reasoning, "sql": sql}
PARTS = ("code", "chats", "humaneval", *TASKS)


def open_model(options: argparse.Namespace, tokenizer: Any) -> Model:
    """Return the model that the options name."""
    if options.url:
        return Served(options.url, tokenizer)
    return Local(loaded(options.checkpoint, options.served), tokenizer, options.rows)


def loaded(path: Path, served: bool) -> Any:
    """Return a checkpoint as a transformers model on this machine's GPU, or CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if served:
        return ss.load(path, device=device).eval()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def about(options: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Return what a record says of the model and the machine."""
    told = [path / "source.json" for path in (options.checkpoint, options.dense) if path is not None]
    source = next((json.loads(path.read_text()) for path in told if path.exists()), {"name": str(options.checkpoint)})
    digest = hashlib.sha256()
    for path in sorted(options.checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    by = f"server: {options.by or 'unnamed'}" if options.url else "slidesparse.load" if options.served else "float"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and not options.url else options.gpu
    return {
        "tag": options.tag,
        "checkpoint": options.checkpoint.name,
        "weights": digest.hexdigest()[:16],
        "source": source,
        "run_by": by,
        "gpu": gpu,
        "commit": commit(),
        "versions": {
            "slidesparse": ss.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def score_text(model: Model, dense: Local | None, windows: torch.Tensor) -> dict[str, Any]:
    """Return the loss of each window, and its divergence from the dense model's predictions."""
    found = {"windows": list(windows.shape), "digest": texts.digest(windows), "loss": rounded(model.losses(windows))}
    if dense is not None and isinstance(model, Local):
        found["kl"] = rounded(model.divergences(dense, windows))
    return found


def score_programs(model: Model, options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Return which problems the greedy answer passes, and the share of samples that do."""
    asked = humaneval.problems(options.limit)
    prompts = [humaneval.prompt(tokenizer, problem) for problem in asked]
    start = time.time()
    answers = model.answers(prompts, PROGRAM_TOKENS, humaneval.STOP, options.samples, HEAT)
    written = time.time()
    passed = humaneval.passed(asked, answers, options.workers)
    if options.answers:
        both = zip(answers, passed, strict=True)
        options.answers.write_text("".join(json.dumps({"answers": a, "passed": p}) + "\n" for a, p in both))
    found = {
        "greedy": [int(one[0]) for one in passed],
        "samples": options.samples,
        "temperature": HEAT,
        "tokens": PROGRAM_TOKENS,
        "seconds": [round(written - start, 1), round(time.time() - written, 1)],
    }
    if options.samples:
        found["sampled"] = [round(sum(one[1:]) / options.samples, 3) for one in passed]
    return found


def asked_so(tokenizer: Any, request: str) -> str:
    """Return a user's request as the model reads it, up to where its answer begins."""
    chat = [{"role": "user", "content": request}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def score_questions(model: Model, task: Any, options: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Return which questions of each of a task's generators are answered exactly."""
    asked = task.questions(min(options.questions, options.limit or options.questions))
    prompts = [asked_so(tokenizer, one.request) + task.BEGUN for one in asked]
    answers = model.answers(prompts, task.TOKENS, task.STOP, 0, HEAT)
    right: dict[str, list[int]] = {}
    for question, (answer,) in zip(asked, answers, strict=True):
        right.setdefault(question.generator, []).append(int(question.is_right(answer)))
    return {"seed": task.JUDGED, "right": right}


def rounded(values: list[float]) -> list[float]:
    return [round(value, 5) for value in values]


def judge(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one checkpoint; what is found is printed as it comes."""
    start = time.time()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.checkpoint)
    model = open_model(options, tokenizer)
    record = about(options, model)
    dense = Local(loaded(options.dense, False), tokenizer) if options.dense and not options.url else None

    def tell(part: str, found: dict[str, Any]) -> None:
        record[part] = found
        print(f"{options.tag}: {part}: {summary(found)} ({time.time() - start:.0f} s)", flush=True)

    if "code" in options.parts:
        text, versions = texts.held_out_code()
        windows = texts.windows(tokenizer, text, options.tokens, WINDOW)
        tell("code", {"packages": versions, **score_text(model, dense, windows)})
    if "chats" in options.parts and options.chats:
        text = texts.chats_text(options.chats, tokenizer)
        tell("chats", score_text(model, dense, texts.windows(tokenizer, text, options.tokens, WINDOW)))
    del dense
    if "humaneval" in options.parts:
        tell("humaneval", score_programs(model, options, tokenizer))
    for part, task in TASKS.items():
        if part in options.parts:
            tell(part, score_questions(model, task, options, tokenizer))
    return record | {"seconds": round(time.time() - start, 1)}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a part without the problems one by one."""

    def mean(values: list[float]) -> float:
        return round(sum(values) / max(len(values), 1), 4)

    lists = found.get("right", {name: found[name] for name in ("loss", "kl", "greedy", "sampled") if name in found})
    return {name: mean(values) for name, values in lists.items()} | {"seconds": found.get("seconds")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a folder; with --url the one that the server has loaded")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines to append the record to")
    parser.add_argument("--tag", required=True, help="what the record is called in tables")
    parser.add_argument("--dense", type=Path, help="the dense model, for the divergence from it")
    parser.add_argument("--chats", type=Path, help="held-out chats")
    parser.add_argument("--served", action="store_true", help="run by slidesparse.load, not as a float model")
    parser.add_argument("--url", help="ask this server, http://HOST:PORT/v1")
    parser.add_argument("--by", help="name of that server and its version, for the record")
    parser.add_argument("--gpu", help="its GPU, for the record")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--samples", type=int, default=SAMPLES, help="answers to each problem at temperature 0.2")
    parser.add_argument("--questions", type=int, default=100, help="of each generator")
    parser.add_argument("--tokens", type=int, default=65_536, help="of held-out text")
    parser.add_argument("--rows", type=int, default=2048, help="answers written at a time")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 16), help="programs run at a time")
    parser.add_argument("--answers", type=Path, help="keep the programs here, to look at")
    parser.add_argument("--limit", type=int, help="problems, to try the script")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    record = judge(options)
    with options.out.open("ab", buffering=0) as file:  # in one piece: others append to it, too
        file.write(json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    main()
