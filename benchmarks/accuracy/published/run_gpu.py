"""Prune, train on and judge one model in all ways, each job on one of the visible GPUs, until a deadline.

    python run_gpu.py --dense DENSE --work FOLDER --out RECORDS.jsonl --chats CHATS.jsonl --text CODE.txt
        [--patterns 14:16 6:8 4:6 2:4] [--tokens 5M 20M] [--minutes 25] [--only 'match|recover'] [--compress 10]
        [--dry-run]

A job is a line of commands, of which each needs the one before; jobs wait for those whose checkpoints they read. What
``judge.py`` finds is printed as it comes. At the deadline, what runs is ended and no record of it is kept. Checkpoints
stay in the folder, and jobs whose record is there are not run again, so the same command goes on. Run
``slidesparse compress`` alone on its GPU (``--only compress``): it measures the machine, and does less on a busy one.
Look for problems of HumanEval in its ``training.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

HERE = Path(__file__).parent
SPEEDUPS = {"6:8": "1.14", "4:6": "1.18", "2:4": "1.42"}
"""How much faster served dense INT8 models are at a pattern, by the records' mixed load: depth is cut for the same."""

KINDS = {"int8": ["--dtype", "int8"], "6bit": ["--dtype", "int8", "--rounding", "6bit"], "fp8": ["--dtype", "fp8"]}
"""In which types pruned and recovered models are served."""

TOLD = re.compile(r"KL|tokens/s|^\{|: (code|chats|humaneval|reasoning): |rror")


@dataclass
class Job:
    """Commands that run one after another on one GPU.

    Attributes:
        tag: Its name, and that of its record.
        path: Its checkpoint.
        commands: Command lines. The last judges the checkpoint, and the others make it where it is not there.
        after: Tags of jobs that make what it reads.
    """

    tag: str
    path: str
    commands: list[list[str]]
    after: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)


class Jobs:
    """All jobs for one model, the most wanted first."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.found = options, dict[str, Job]()
        self.texts = [f"--text={options.text}:1", f"--text={options.chats}:{options.share}"]
        self.text = ["--calibration", options.chats, "--samples", "256", "--length", "512"]
        self.add("dense", [], options.dense)
        for pattern in options.patterns:
            self.pruned(pattern)
        for pattern in options.patterns:
            self.baselines(pattern)
        self.rivals()
        self.regimes()
        for pattern in options.patterns:
            self.compressed(pattern)

    def path(self, tag: str) -> str:
        return str(self.options.work / re.sub(r"\W+", "-", tag))

    def judged(self, tag: str, path: str, *more: str) -> list[str]:
        o = self.options
        common = ["--dense", o.dense, "--out", str(o.out), "--tag", tag, *(["--chats", o.held] if o.held else [])]
        return [sys.executable, str(HERE / "judge.py"), path, *common, *more, *shlex.split(o.judge)]

    def add(self, tag: str, commands: list[list[str]], path: str, after: tuple[str, ...] = (), *more: str) -> None:
        self.found[tag] = Job(tag, path, [*commands, self.judged(tag, path, *more)], after)

    def prune(self, source: str, target: str, *how: str) -> list[str]:
        return [sys.executable, "-m", "slidesparse", "prune", source, target, *how]

    def calibrated(self, tag: str, pattern: str, *how: str) -> None:
        """Add a model that is pruned with calibration."""
        sparsegpt = ["--dtype", "bf16", "--method", "sparsegpt", *self.text, *how]
        made = [self.prune(self.options.dense, self.path(tag), "--pattern", pattern, *sparsegpt)]
        self.add(tag, made, self.path(tag))

    def compressed(self, pattern: str) -> None:
        """Add what the one command makes, in six bits, and before it is rounded if it was trained."""
        tag, folder = f"{pattern} compress 6bit", self.path(f"{pattern} compress")
        made = [sys.executable, "-m", "slidesparse", "compress", self.options.dense, folder, "--pattern", pattern]
        made += ["--rounding", "6bit", "--minutes", str(self.options.compress)]
        self.add(tag, [made], f"{folder}/served", (), "--served")
        self.add(f"{pattern} compress", [], f"{folder}/recovered", (tag,))

    def pruned(self, pattern: str) -> None:
        """Add one shot, recovery by each budget, and the types in which the best is served."""
        start = f"{pattern} match"
        self.calibrated(start, pattern, "--match-steps", "200")
        best = start
        for tokens in self.options.tokens:
            best = f"{pattern} recover {tokens}"
            trained = [sys.executable, "-m", "slidesparse", "recover", self.path(start), self.path(best)]
            trained += [
                "--dense",
                self.options.dense,
                "--tokens",
                tokens,
                *self.texts,
                *shlex.split(self.options.recover),
            ]
            self.add(best, [trained], self.path(best), (start,))
        for source in dict.fromkeys((start, best)):
            for kind, how in KINDS.items():
                tag = f"{source} {kind}"
                calibrated = ["--method", "sparsegpt", *self.text]
                made = self.prune(self.path(source), self.path(tag), "--pattern", pattern, *how, *calibrated)
                self.add(tag, [made], self.path(tag), (source,), "--served")

    def baselines(self, pattern: str) -> None:
        """Add what older ways give in one shot."""
        tag = f"{pattern} magnitude"
        how = ["--pattern", pattern, "--dtype", "bf16"]
        self.add(tag, [self.prune(self.options.dense, self.path(tag), *how)], self.path(tag))
        self.calibrated(f"{pattern} sparsegpt", pattern)

    def rivals(self) -> None:
        """Add four bits and fewer layers, each as it is and trained on."""
        kinds = {"int4 nearest": ["int4"], "int4 gptq": ["int4", "--method", "gptq", "--chats", self.options.chats]}
        for pattern in self.options.patterns:
            if speedup := SPEEDUPS.get(pattern):
                kinds[f"depth {speedup}"] = ["depth", "--speedup", speedup, "--chats", self.options.chats]
        for tag, (kind, *how) in kinds.items():
            made = [sys.executable, str(HERE / "rivals.py"), kind, self.options.dense, self.path(tag), *how]
            self.add(tag, [made], self.path(tag))
            for tokens in self.options.tokens if tag != "int4 gptq" else []:
                best = f"{tag} recover {tokens}"
                train = [sys.executable, str(HERE / "train_rival.py"), self.path(tag), self.path(best)]
                train += ["--dense", self.options.dense, "--tokens", tokens, *self.texts]
                self.add(best, [train], self.path(best), (tag,))

    def regimes(self) -> None:
        """Add the model trained to answer questions: dense, and with the zeros of one shot held."""
        runs: dict[str, tuple[str, tuple[str, ...]]] = {"dense": (self.options.dense, ())}
        runs |= {one: (self.path(f"{one} match"), (f"{one} match",)) for one in self.options.patterns}
        for name, (start, after) in runs.items():
            tag = f"{name} regime"
            made = [sys.executable, str(HERE / "regimes.py"), start, self.path(tag)]
            self.add(tag, [made], self.path(tag), after, "--parts", "reasoning")


class Queue:
    """Runs jobs, one on each GPU, until none is left or time is up."""

    def __init__(self, jobs: list[Job], done: set[str], options: argparse.Namespace) -> None:
        self.waiting = [job for job in jobs if job.tag not in done]
        self.done, self.options = done, options
        self.known = {job.tag for job in jobs} | done
        self.failed: set[str] = set()
        self.running: dict[str, tuple[Job, Path, int]] = {}
        self.start = time.time()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = visible.split(",") if visible else [str(gpu) for gpu in range(max(torch.cuda.device_count(), 1))]

    def run(self) -> None:
        while (self.waiting or self.running) and time.time() - self.start < 60 * self.options.minutes:
            for gpu in self.gpus:
                if gpu not in self.running and (job := next(self.ready(), None)):
                    self.waiting.remove(job)
                    self.begin(gpu, job)
            if not self.running:
                break
            time.sleep(0.5)
            for gpu in list(self.running):
                self.look(gpu)
        for gpu, (job, _, _) in self.running.items():
            self.say(f"ended at the deadline on GPU {gpu}: {job.tag}")
            if job.process is not None:
                os.killpg(job.process.pid, signal.SIGKILL)
        left = [job.tag for job in self.waiting]
        self.say(f"done: {len(self.done)}, failed: {sorted(self.failed)}, not begun: {left}")

    def ready(self) -> Iterator[Job]:
        """Yield the jobs that may begin; what a failed or unknown job would have made is never there."""
        for job in self.waiting:
            if all(tag in self.done for tag in job.after):
                yield job

    def begin(self, gpu: str, job: Job) -> None:
        log = self.options.work / f"{re.sub(r'[^a-zA-Z0-9]+', '-', job.tag)}.log"
        *made, judged = map(shlex.join, job.commands)
        line = " && ".join([*(f"{{ test -d {shlex.quote(job.path)} || {one}; }}" for one in made), judged])
        threads = str(max(len(os.sched_getaffinity(0)) // len(self.gpus), 1))
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as out:
            job.process = subprocess.Popen(
                ["bash", "-c", line], stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        self.running[gpu] = job, log, 0
        self.say(f"GPU {gpu}: {job.tag}")

    def look(self, gpu: str) -> None:
        """Print what a job found since the last look, and how it ended."""
        job, log, seen = self.running[gpu]
        ended = job.process is None or job.process.poll() is not None
        text = log.read_bytes()[seen:]
        whole = len(text) if ended else text.rfind(b"\n") + 1
        for line in text[:whole].decode(errors="replace").splitlines():
            if TOLD.search(line) and "it/s" not in line:
                self.say(f"[{job.tag}] {line[:300]}")
        self.running[gpu] = job, log, seen + whole
        if not ended:
            return
        del self.running[gpu]
        if job.process is not None and job.process.returncode == 0:
            self.done.add(job.tag)
            return
        self.failed.add(job.tag)
        self.say(f"FAILED: {job.tag}\n" + log.read_text(errors="replace")[-1500:])

    def say(self, line: str) -> None:
        print(f"{time.time() - self.start:6.0f} s  {line}", flush=True)


def recorded(path: Path) -> set[str]:
    """Return the tags that have a record."""
    return {json.loads(line)["tag"] for line in path.read_text().splitlines()} if path.exists() else set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="records")
    parser.add_argument("--chats", required=True, help="to calibrate and to train on, without problems of HumanEval")
    parser.add_argument("--held", help="chats to judge by")
    parser.add_argument("--text", required=True, help="text to train on beside the chats")
    parser.add_argument("--share", type=float, default=3, help="weight of the chats; that of the text is 1")
    parser.add_argument("--patterns", nargs="+", default=["6:8", "4:6", "2:4", "14:16"])
    parser.add_argument("--tokens", nargs="+", default=["5M", "20M"])
    parser.add_argument("--minutes", type=float, default=25, help="deadline")
    parser.add_argument("--compress", type=float, default=10, help="minutes of slidesparse compress")
    parser.add_argument("--only", default="", help="regular expression: run these tags, and what they need")
    parser.add_argument("--judge", default="", help="more options of judge.py, in one word")
    parser.add_argument("--recover", default="", help="more options of slidesparse recover, in one word")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    jobs, done = Jobs(options).found, recorded(options.out)
    wanted = {tag for tag in jobs if re.search(options.only, tag)}
    wanted |= {before for tag in wanted for one in jobs[tag].after for before in (one, *jobs[one].after)}
    chosen = [job for job in jobs.values() if job.tag in wanted]
    if options.dry_run:
        print("\n".join(f"{job.tag}: {' && '.join(map(shlex.join, job.commands))}" for job in chosen))
        return
    Queue(chosen, done, options).run()


if __name__ == "__main__":
    main()
